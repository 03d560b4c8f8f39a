"""`ppd doctor`'s checks: pure functions from facts to findings. `examine` runs all of them, in order.

The types are in `values`. The checks of the fleet and of the probe conversation have files of their own.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from ...config import Mode, is_loopback
from ...health.probe import UNTRUSTED
from ...laws.accuracy import Basis
from .conversation import follow_ups_hit_the_cache, handoff_works, nothing_is_lost, prefill_computes, turns_are_answered
from .fleet import (
    connectors_agree,
    connectors_are_known,
    decodes_compute_prompts,
    decodes_keep_prefixes,
    encoders_encode,
    encoders_have_consumers,
    models_are_shared,
    prefix_caching_is_on,
    versions_agree,
    ways_to_serve,
    workers_answer,
)
from .readback import reading_back_works
from .values import Facts, Finding, Level, PortFact

PORT_REMEDIES = {
    os.strerror(number): remedy
    for number, remedy in (
        (
            errno.EADDRINUSE,
            "Stop what uses it or choose another; if it is the proxy itself, check that with `ppd doctor --proxy`.",
        ),
        (errno.EADDRNOTAVAIL, "Give an address of this machine, or run the doctor on the machine that has it."),
        (errno.EACCES, "Give the proxy the right to it, or choose a port from 1024 on."),
    )
}


def config_is_valid(facts: Facts) -> Iterator[Finding]:
    if facts.config_error:
        yield Finding(Level.FAIL, "config", facts.config_error, "Correct the key; docs/configuration.md lists all.")
    elif facts.config is not None:
        yield Finding(Level.OK, "config", "valid")
        for notice in facts.config.notices:
            yield Finding(
                Level.WARN, "config", notice, "Change the keys that it names; docs/configuration.md lists all."
            )


def ports_are_free(facts: Facts) -> Iterator[Finding]:
    if facts.config is None:
        return
    for fact in facts.config.ports:
        yield _port(fact)
    wanted = Counter(fact.port for fact in facts.config.ports if fact.port)
    for port in (port for port, times in wanted.items() if times > 1):
        keys = " and ".join(fact.key for fact in facts.config.ports if fact.port == port)
        yield Finding(Level.FAIL, "ports", f"{keys} are both {port}", "Give each its own port.")


def _port(fact: PortFact) -> Finding:
    where = f"{fact.host}:{fact.port}"
    if not fact.port:
        return Finding(Level.SKIP, fact.key, "0: any free port" if fact.key == "port" else "0: off")
    if not fact.error:
        return Finding(Level.OK, fact.key, f"{where} is free")
    remedy = PORT_REMEDIES.get(fact.error, PORT_REMEDIES[os.strerror(errno.EADDRINUSE)])
    return Finding(Level.FAIL, fact.key, f"{where} can't be bound ({fact.error})", remedy)


def table_can_be_used(facts: Facts) -> Iterator[Finding]:
    config, check = facts.config, "table"
    if config is None:
        return
    if config.table_error:
        yield Finding(Level.FAIL, check, config.table_error, "`ppd table list` shows the tables that ship.")
    elif config.mode != Mode.TABLE:
        yield Finding(Level.SKIP, check, f"not used in mode {config.mode}")
    elif not config.table_cells:
        remedy = "Measure the failed cells again; until then `uncovered` decides every follow-up turn."
        yield Finding(Level.WARN, check, f"{config.table} holds no evidence", remedy)
    else:
        yield Finding(Level.OK, check, f"{config.table}, {config.table_cells} cells with evidence")


def heartbeats_are_guarded(facts: Facts) -> Iterator[Finding]:
    """Anyone who can register a worker is sent clients' prompts."""
    config, check = facts.config, "heartbeats"
    if config is None:
        return
    if config.curve_error:
        remedy = "Make the certificates with `ppd keys curve NAME`, and point the config at them."
        yield Finding(Level.FAIL, check, config.curve_error, remedy)
    if not config.heartbeat_port:
        return
    if is_loopback(config.heartbeat_host):
        yield Finding(Level.OK, check, f"only from this machine ({config.heartbeat_host})")
    elif config.has_allow_list:
        yield Finding(Level.OK, check, "only from the ranges in heartbeat_allow")
    elif config.has_curve:
        yield Finding(Level.OK, check, "agents need a key, and pings are dropped without heartbeat_allow")
    else:
        said = f"anyone who reaches {config.heartbeat_host}:{config.heartbeat_port} can register and get prompts"
        yield Finding(Level.WARN, check, said, "Set heartbeat_allow, or curve_port with its keys.")


def admin_api_is_on(facts: Facts) -> Iterator[Finding]:
    check = "admin API"
    if facts.config is not None:
        said = (
            "on" if facts.config.has_admin_key else "off, as admin_key is empty: no receipts, no `ppd doctor --proxy`"
        )
        yield Finding(Level.OK, check, said)
    proxy = facts.proxy
    if proxy is None or proxy.error:
        return
    match proxy.admin_status:
        case 200:
            yield Finding(Level.OK, check, "answers")
        case 401:
            yield Finding(Level.FAIL, check, "the admin key is missing or wrong", "Give --admin-key or PPD_ADMIN_KEY.")
        case 404:
            remedy = "Set admin_key in the proxy's config: without it workers and receipts can't be looked at."
            yield Finding(Level.WARN, check, "off", remedy)
        case status:
            said = f"answered {status}" if status else "did not answer in time"
            yield Finding(Level.FAIL, check, said, "Look at the proxy's log.")


def data_plane_is_built(facts: Facts) -> Iterator[Finding]:
    planes = facts.proxy.data_planes if facts.proxy else ()
    for one in (facts.config.data_plane,) if facts.config else planes:
        if one.serving != one.configured:
            said = f"{one.configured} is not built {'here' if facts.config else 'there'}, so {one.serving} serves"
            remedy = "Install PPD again on Linux with a C compiler (gcc and the headers of libc)."
            yield Finding(Level.WARN, "data plane", said, remedy)
        else:
            built = "are built" if one.is_built else "are not built"
            yield Finding(Level.OK, "data plane", f"{one.serving} serves; the compiled modules {built}")


GIVE_ADMIN_KEY = "Give a key: --admin-key or PPD_ADMIN_KEY, as the proxy's open_paths leave this path out."


def _how_to_reach(error: str) -> str:
    if error.startswith(UNTRUSTED):
        return "Set SSL_CERT_FILE to the authority that signed it, and name the proxy as its certificate does."
    if error.endswith(("answered 401", "answered 403")):
        return GIVE_ADMIN_KEY
    return "Start it with `ppd serve`, or correct --proxy."


def proxy_answers(facts: Facts) -> Iterator[Finding]:
    proxy = facts.proxy
    if proxy is None:
        return
    if proxy.error:
        yield Finding(Level.FAIL, "proxy", f"no proxy at {proxy.address}: {proxy.error}", _how_to_reach(proxy.error))
        return
    yield Finding(Level.OK, "proxy", f"{proxy.address} answers")
    if proxy.ready_status == 200:
        yield Finding(Level.OK, "ready", f"can serve by {', '.join(proxy.ways)}")
    else:
        said = f"/ready answered {proxy.ready_status}" if proxy.ready_status else "/ready did not answer in time"
        wants_key = proxy.ready_status in (401, 403)
        remedy = GIVE_ADMIN_KEY if wants_key else "Start a D or an R: the proxy knows none that is up."
        yield Finding(Level.FAIL, "ready", said, remedy)


def laws_fit(facts: Facts) -> Iterator[Finding]:
    """Whether measured times are as profiles and the table have them."""
    proxy, check = facts.proxy, "laws"
    if proxy is None or not (proxy.laws or proxy.turns_beyond_range):
        return
    for one in proxy.laws:
        said = f"{one.basis} {one.name}: {one.figure.upper()} is off by {one.median_error:.0%} (median of {one.turns})"
        if one.stale:
            yield Finding(Level.WARN, check, f"{said}: it is stale", _RENEW.get(one.basis, ""))
        else:
            yield Finding(Level.OK, check, said)
    turns = Counter({one.name: one.turns for one in proxy.laws if one.basis == Basis.PROFILE})
    for name, beyond in proxy.turns_beyond_range.items():
        if beyond > turns[name]:
            said = (
                f"{beyond} turns lie beyond what profile {name} was fitted or checked to: their predictions are guesses"
            )
            yield Finding(Level.WARN, check, said, _RENEW[Basis.PROFILE])


_RENEW: dict[str, str] = {
    Basis.PROFILE: "Calibrate a profile for this fleet (`ppd calibrate`), or correct `profile`.",
    Basis.TABLE: "Measure the table on this fleet again (`ppd-build-table`), or choose another one.",
}

Check = Callable[[Facts], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    config_is_valid,
    ports_are_free,
    table_can_be_used,
    heartbeats_are_guarded,
    proxy_answers,
    admin_api_is_on,
    data_plane_is_built,
    laws_fit,
    workers_answer,
    ways_to_serve,
    versions_agree,
    connectors_are_known,
    connectors_agree,
    models_are_shared,
    encoders_have_consumers,
    encoders_encode,
    prefix_caching_is_on,
    decodes_compute_prompts,
    decodes_keep_prefixes,
    turns_are_answered,
    prefill_computes,
    handoff_works,
    follow_ups_hit_the_cache,
    nothing_is_lost,
    reading_back_works,
)


def examine(facts: Facts) -> tuple[Finding, ...]:
    return tuple(finding for check in CHECKS for finding in check(facts))


def exit_code(findings: Iterable[Finding]) -> int:
    return int(any(finding.level is Level.FAIL for finding in findings))
