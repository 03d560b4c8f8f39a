"""The doctor's checks, as tables of (facts, findings), and the order in which they speak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ppd.proxy.cli.doctor import checks, conversation, readback
from ppd.proxy.cli.doctor import fleet as fleet_checks
from ppd.proxy.cli.doctor.checks import (
    CHECKS,
    Check,
    admin_api_is_on,
    config_is_valid,
    examine,
    exit_code,
    heartbeats_are_guarded,
    laws_fit,
    proxy_answers,
    table_can_be_used,
)
from ppd.proxy.cli.doctor.fleet import (
    connectors_agree,
    connectors_are_known,
    models_are_shared,
    prefix_caching_is_on,
    versions_agree,
    ways_to_serve,
    workers_answer,
)
from ppd.proxy.cli.doctor.values import (
    ConfigFact,
    EngineCounts,
    Facts,
    Finding,
    LawsFact,
    Level,
    ProbeConversation,
    ProxyFact,
    TurnFact,
    WorkerFact,
)
from ppd.proxy.fleet.worker import Role, Worker

OK, WARN, FAIL, SKIP = Level.OK, Level.WARN, Level.FAIL, Level.SKIP
Said = list[tuple[Level, str]]  # a level, and words that the message must hold


def worker(name: str, **changes: Any) -> WorkerFact:
    """A healthy worker; `changes` are of the fact, or of the worker itself."""
    own = {key: changes.pop(key) for key in list(changes) if key in Worker.__dataclass_fields__}
    made = Worker(
        **{"role": Role(name[0]), "address": f"{name.lower()}:1", "models": ("m",), "engine_version": "0.33.0"} | own
    )
    return WorkerFact(name=name, worker=made, **changes)


P1, D1, R1 = worker("P1"), worker("D1"), worker("R1")
PROXY = ProxyFact(address="proxy:1", ready_status=200, ways=("split",), admin_status=200, mode="table")


def fleet(*workers: WorkerFact, **facts: Any) -> Facts:
    return Facts(workers=workers, **{"config": ConfigFact()} | facts)


def config(**changes: Any) -> Facts:
    return Facts(config=ConfigFact(**changes))


def check_said(check: Check, facts: Facts, expected: Said) -> None:
    found = list(check(facts))
    assert [finding.level for finding in found] == [level for level, _ in expected], found
    for finding, (_, words) in zip(found, expected, strict=True):
        assert words in finding.message
    assert_actionable(found)


def assert_actionable(findings: list[Finding]) -> None:
    """Every failure and warning says what to do, in one sentence."""
    for finding in findings:
        if finding.level in (WARN, FAIL):
            assert finding.remedy.rstrip().endswith(".")


# -- a config


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Facts(config_error="w_ttft = -1: must be a number of at least 0"), [(FAIL, "w_ttft = -1")]),
        (config(), [(OK, "valid")]),
        (config(notices=("x = 1 has no effect: it needs y",)), [(OK, "valid"), (WARN, "x = 1 has no effect")]),
        (Facts(proxy=PROXY), []),
    ],
)
def test_config(facts: Facts, expected: Said) -> None:
    check_said(config_is_valid, facts, expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"table": "t", "table_cells": 150}, [(OK, "t, 150 cells")]),
        ({"table": "t", "table_cells": 0}, [(WARN, "t holds no evidence")]),
        ({"table_error": "no table 't'"}, [(FAIL, "no table 't'")]),
        ({"mode": "always_local", "table_error": "no table 't'"}, [(FAIL, "no table 't'")]),
        ({"mode": "always_local", "table": "t"}, [(SKIP, "always_local")]),
    ],
)
def test_table(changes: dict[str, Any], expected: Said) -> None:
    check_said(table_can_be_used, config(**changes), expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"heartbeat_port": 0, "heartbeat_host": "0.0.0.0"}, []),
        ({"heartbeat_port": 1, "heartbeat_host": "127.0.0.1"}, [(OK, "only from this machine")]),
        ({"heartbeat_port": 1, "heartbeat_host": "0.0.0.0"}, [(WARN, "anyone who reaches 0.0.0.0:1")]),
        ({"heartbeat_port": 1, "heartbeat_host": "10.0.0.1", "has_allow_list": True}, [(OK, "heartbeat_allow")]),
        ({"heartbeat_port": 1, "heartbeat_host": "*", "has_curve": True}, [(OK, "agents need a key")]),
        ({"heartbeat_port": 0, "curve_error": "no certificate"}, [(FAIL, "no certificate")]),
    ],
)
def test_heartbeats(changes: dict[str, Any], expected: Said) -> None:
    check_said(heartbeats_are_guarded, config(**changes), expected)


def test_who_lacks_a_certificate_is_told_the_command_that_makes_it() -> None:
    (finding,) = heartbeats_are_guarded(config(heartbeat_port=0, curve_error="no certificate"))
    assert "`ppd keys curve NAME`" in finding.remedy


# -- a proxy


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (config(has_admin_key=True), [(OK, "on")]),
        (config(has_admin_key=False), [(OK, "off, as admin_key is empty")]),
        (Facts(proxy=PROXY), [(OK, "answers")]),
        (Facts(proxy=replace(PROXY, admin_status=401)), [(FAIL, "missing or wrong")]),
        (Facts(proxy=replace(PROXY, admin_status=404)), [(WARN, "off")]),
        (Facts(proxy=replace(PROXY, admin_status=500)), [(FAIL, "500")]),
        (Facts(proxy=replace(PROXY, admin_status=0)), [(FAIL, "did not answer")]),
        (Facts(proxy=replace(PROXY, error="refused", admin_status=0)), []),
    ],
)
def test_admin_api(facts: Facts, expected: Said) -> None:
    check_said(admin_api_is_on, facts, expected)


@pytest.mark.parametrize(
    ("proxy", "expected"),
    [
        (PROXY, [(OK, "proxy:1 answers"), (OK, "split")]),
        (replace(PROXY, ready_status=503), [(OK, "answers"), (FAIL, "503")]),
        (replace(PROXY, ready_status=0), [(OK, "answers"), (FAIL, "in time")]),
        (replace(PROXY, error="connection refused"), [(FAIL, "connection refused")]),
    ],
)
def test_proxy(proxy: ProxyFact, expected: Said) -> None:
    check_said(proxy_answers, Facts(proxy=proxy), expected)


@pytest.mark.parametrize(
    ("proxy", "remedy"),
    [
        (replace(PROXY, error="/health answered 401"), "Give a key: --admin-key"),
        (replace(PROXY, ready_status=401), "Give a key: --admin-key"),
        (replace(PROXY, error="its certificate is not trusted: self-signed certificate"), "SSL_CERT_FILE"),
        (replace(PROXY, error="Connection refused"), "ppd serve"),
    ],
)
def test_what_keeps_the_doctor_out_has_its_own_remedy(proxy: ProxyFact, remedy: str) -> None:
    assert remedy in list(proxy_answers(Facts(proxy=proxy)))[-1].remedy


# -- a fleet


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (fleet(P1, D1), [(OK, "all healthy: P1, D1")]),
        (fleet(P1, worker("D1", reachable=False, healthy=False)), [(FAIL, "D1 at d1:1 is not reachable")]),
        (fleet(P1, worker("D1", healthy=False)), [(FAIL, "D1 at d1:1 is not healthy")]),
        (fleet(worker("D1", healthy=False, why="/health answered 503")), [(FAIL, "not healthy: /health answered 503")]),
        (fleet(worker("D1", wants_key=True)), [(FAIL, "D1 at d1:1 wants a key")]),
        (fleet(worker("D1", state="up", wants_key=True)), [(OK, "D1")]),
        (
            fleet(worker("D1", healthy=False, reachable=False, why="its certificate is not trusted: expired")),
            [(FAIL, "D1 at d1:1 cannot be spoken to: its certificate is not trusted: expired")],
        ),
        (fleet(worker("D1", state="up")), [(OK, "D1")]),
        (fleet(worker("D1", state="down")), [(FAIL, "not reachable")]),
        (
            fleet(worker("D1", state="up", reachable=False, healthy=False)),
            [(WARN, "does not answer here, though the proxy calls it up")],
        ),
        (fleet(worker("D1", state="draining")), [(WARN, "draining")]),
        (config(), [(SKIP, "agents")]),
        (Facts(config_error="bad"), []),
        (Facts(proxy=replace(PROXY, error="refused")), []),
        (Facts(proxy=PROXY), [(FAIL, "knows no worker")]),
        (Facts(proxy=replace(PROXY, admin_status=404)), [(SKIP, "admin API")]),
    ],
)
def test_workers(facts: Facts, expected: Said) -> None:
    check_said(workers_answer, facts, expected)


GOOD = LawsFact("profile", "h", "ttft", 200, 0.1, stale=False)
STALE = LawsFact("table", "t", "tpot", 200, 0.4, stale=True)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (config(), []),
        (Facts(proxy=PROXY), []),
        (Facts(proxy=replace(PROXY, laws=(GOOD,))), [(OK, "profile h: TTFT is off by 10% (median of 200)")]),
        (Facts(proxy=replace(PROXY, laws=(STALE,))), [(WARN, "table t: TPOT is off by 40% (median of 200): it is st")]),
        (Facts(proxy=replace(PROXY, laws=(GOOD,), turns_beyond_range={"h": 200})), [(OK, "h")]),
        (
            Facts(proxy=replace(PROXY, laws=(GOOD,), turns_beyond_range={"h": 201})),
            [(OK, "h"), (WARN, "201 turns lie beyond what profile h was fitted or checked to")],
        ),
        (Facts(proxy=replace(PROXY, turns_beyond_range={"h": 1})), [(WARN, "guesses")]),
    ],
)
def test_laws(facts: Facts, expected: Said) -> None:
    check_said(laws_fit, facts, expected)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (fleet(P1, D1, R1), [(OK, "SPLIT, LOCAL, REPLICA")]),
        (fleet(P1, D1), [(OK, "SPLIT, LOCAL")]),
        (fleet(R1), [(OK, "REPLICA")]),
        (fleet(D1), [(WARN, "no P; turns can be LOCAL")]),
        (fleet(P1, R1), [(WARN, "serves nobody")]),
        (fleet(P1), [(FAIL, "no worker can answer")]),
        (fleet(P1, config=ConfigFact(prefills_answer=True)), [(WARN, "P answer in its place; turns can be REPLICA")]),
        (fleet(P1, config=None, proxy=replace(PROXY, ways=("replica",))), [(WARN, "P answer in its place")]),
        (fleet(P1, R1, config=None, proxy=replace(PROXY, ways=("replica",))), [(WARN, "serves nobody")]),
        (fleet(worker("P1", connector="none"), config=ConfigFact(prefills_answer=True)), [(FAIL, "no worker can")]),
        (fleet(worker("D1", healthy=False)), [(FAIL, "no worker can answer")]),
        (fleet(worker("P1", connector="none"), D1), [(FAIL, "no P can hand over to any D; turns can be LOCAL")]),
        (fleet(P1, D1, config=ConfigFact(mode="replica")), [(OK, "SPLIT"), (WARN, "mode is replica")]),
        (fleet(R1, config=None, proxy=replace(PROXY, mode="replica")), [(OK, "REPLICA")]),
        (config(), []),
    ],
)
def test_ways_to_serve(facts: Facts, expected: Said) -> None:
    check_said(ways_to_serve, facts, expected)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"P1": "0.33.0", "D1": "0.33.0"}, [(OK, "0.33.0")]),
        ({"P1": "0.33.0", "D1": "0.32.0"}, [(FAIL, "P1 0.33.0, D1 0.32.0")]),
        ({"P1": "0.33.0", "D1": "0.33.0", "D2": "0.32.0"}, [(FAIL, "D2 0.32.0")]),
        ({"P1": "0.33.0", "P2": "0.32.0", "D1": "0.32.0", "D2": "0.33.0"}, [(WARN, "like with like")]),
        ({"P1": "0.33.0", "D1": ""}, [(WARN, "D1 unknown")]),
        ({"P1": "", "D1": ""}, [(SKIP, "not known")]),
        ({"D1": "0.33.0", "R1": "0.32.0"}, []),
        ({"P1": "0.33.0", "D1": "0.33.0", "R1": "0.32.0"}, [(OK, "0.33.0")]),
    ],
)
def test_versions(versions: dict[str, str], expected: Said) -> None:
    workers = [worker(name, engine_version=version) for name, version in versions.items()]
    check_said(versions_agree, fleet(*workers), expected)


@pytest.mark.parametrize(
    ("connectors", "expected"),
    [
        ({"P1": "nixl", "D1": "nixl"}, [(OK, "nixl")]),
        ({"P1": "nixl", "D1": "none"}, [(FAIL, "P1 nixl, D1 none")]),
        ({"P1": "nixl", "P2": "none", "D1": "none", "D2": "nixl"}, [(WARN, "like with like")]),
    ],
)
def test_connectors_agree(connectors: dict[str, str], expected: Said) -> None:
    workers = [worker(name, connector=connector) for name, connector in connectors.items()]
    check_said(connectors_agree, fleet(*workers), expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"connector": "bogus"}, [(FAIL, "P1 uses 'bogus', which is not known")]),
        ({"connector": "p2p_nccl", "coordinates": {"zmq_address": "a:1"}, "engine_version": "0.23.1"}, []),
        ({"connector": "p2p_nccl", "engine_version": ""}, [(FAIL, "it does not tell its zmq_address")]),
        (
            {"connector": "p2p_nccl", "coordinates": {"zmq_address": "a:1"}, "engine_version": "0.24.0"},
            [(FAIL, "no p2p_nccl any more")],
        ),
    ],
)
def test_connectors_known(changes: dict[str, Any], expected: Said) -> None:
    check_said(connectors_are_known, fleet(worker("P1", **changes), R1), expected)


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ({"P1": "m", "D1": "m"}, [(OK, "served: m")]),
        ({"P1": "m", "D1": "n"}, [(FAIL, "P serves m, D n")]),
        ({"P1": "m", "D1": "m n"}, [(WARN, "n is on D only")]),
        ({"P1": "m", "D1": "m", "R1": "n"}, [(OK, "served: m, n")]),
        ({"P1": "m", "D1": ""}, [(SKIP, "not known of D1")]),
        ({"P1": "m", "D1": "m", "R1": ""}, [(SKIP, "not known of R1"), (OK, "served: m")]),
        ({"D1": "m", "R1": "n"}, [(OK, "served: m, n")]),
    ],
)
def test_models(models: dict[str, str], expected: Said) -> None:
    workers = [worker(name, models=tuple(names.split())) for name, names in models.items()]
    check_said(models_are_shared, fleet(*workers), expected)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"P1": True, "D1": True}, [(OK, "P1, D1")]),
        ({"P1": None, "D1": None}, [(SKIP, "do not tell")]),
        ({"P1": None, "D1": False}, [(FAIL, "off on D1")]),
        ({"P1": False, "D1": True}, [(WARN, "off on P1")]),
        ({"R1": False}, [(FAIL, "off on R1")]),
        ({}, []),
    ],
)
def test_prefix_caching(told: dict[str, bool | None], expected: Said) -> None:
    check_said(prefix_caching_is_on, fleet(*(worker(n, prefix_caching=v) for n, v in told.items())), expected)


# -- all of it


def test_a_healthy_fleet_has_nothing_but_good_findings() -> None:
    workers = tuple(replace(fact, state="up", prefix_caching=True) for fact in (P1, D1))
    first = TurnFact(
        route="SPLIT",
        number=1,
        decode="D1",
        prefill="P1",
        prompt_tokens=1000,
        growth=(("P1", EngineCounts(1000, 0, 0)), ("D1", EngineCounts(0, 0, 1000))),
    )
    second = TurnFact(
        route="LOCAL", number=2, decode="D1", prompt_tokens=1400, growth=(("D1", EngineCounts(408, 992, 0)),)
    )
    talk = ProbeConversation(model="m", turns=(first, second))
    found = examine(Facts(proxy=PROXY, workers=workers, conversation=talk))
    assert {finding.level for finding in found} == {OK}
    assert exit_code(found) == 0
    for said in ("handoff", "prefix cache", "versions", "connectors", "models", "ways to serve"):
        assert said in {finding.check for finding in found}


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert examine(Facts()) == ()


@pytest.mark.parametrize(("level", "code"), [(OK, 0), (WARN, 0), (SKIP, 0), (FAIL, 1)])
def test_only_a_failure_is_an_error(level: Level, code: int) -> None:
    assert exit_code([Finding(OK, "a", "b"), Finding(level, "a", "b")]) == code


def test_every_check_is_run_once() -> None:
    public = {
        check
        for module in (checks, fleet_checks, conversation, readback)
        for name, check in vars(module).items()
        if getattr(check, "__module__", "") == module.__name__ and not name.startswith("_")
    }
    others = {checks.examine, checks.exit_code, readback.may_read_back}
    assert set(CHECKS) == public - others
    assert len(CHECKS) == len(set(CHECKS))
