"""What a cell changes of the usual setting, by name: the network, the room for KV, what fails, what the proxy knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from msgspec.structs import replace as replace_struct

from ppd.offline.simulation.playback import Loss, Playback
from ppd.offline.simulation.routing import ProxySetup
from ppd.offline.simulation.setup import Setup
from ppd.proxy.errors import ConfigError
from ppd.proxy.laws.profile_file import ProfileFile
from ppd.proxy.laws.targets import MOST
from ppd.proxy.laws.targets import USUAL as USUAL_TARGETS
from ppd.servers.fleet.topology import Topology

USUAL = "usual"
PREFILLS_ANSWER = "prefills-answer"
LONG_PREFILLS = "capped"
LONG_PREFILLS_ANSWER = "capped-answer"
CONTEXT_COST = "context-46ns"
POOLED = "pooled"


@dataclass(frozen=True, slots=True)
class CellSetting:
    """All that a run needs beside trace and mode."""

    topology: Topology
    setup: Setup
    proxy: ProxySetup
    playback: Playback
    idle: ProfileFile | None = None  # the idle engine that targets are measured by; None: the setup's


Variant = Callable[[CellSetting], CellSetting]


def _link(gigabytes_per_s: float) -> Variant:
    def changed(setting: CellSetting) -> CellSetting:
        costs = replace(setting.setup.profile.costs, transfer_bytes_per_s=gigabytes_per_s * 1e9)
        return _with_profile(setting, costs=costs)

    return changed


def _capacity(tokens: int) -> Variant:
    return lambda setting: _with_profile(setting, kv_capacity_tokens=tokens)


def _context_cost(seconds_a_token: float) -> Variant:
    def changed(setting: CellSetting) -> CellSetting:
        return _with_profile(setting, costs=replace(setting.setup.profile.costs, context_token_s=seconds_a_token))

    return changed


def _long_prefills(tokens: int) -> Variant:
    def changed(setting: CellSetting) -> CellSetting:
        return _with_profile(setting, costs=replace(setting.setup.profile.costs, long_prefill_tokens=tokens))

    return changed


def _with_profile(setting: CellSetting, **changes: Any) -> CellSetting:
    profile = replace_struct(setting.setup.profile, **changes)
    return replace(setting, setup=replace(setting.setup, profile=profile))


def _proxy(**changes: Any) -> Variant:
    return lambda setting: replace(setting, proxy=replace(setting.proxy, **changes))


def _rules(**changes: Any) -> Variant:
    def changed(setting: CellSetting) -> CellSetting:
        rules = replace_struct(setting.proxy.rules, **changes)
        return replace(setting, proxy=replace(setting.proxy, rules=rules))

    return changed


def _worker_lost(setting: CellSetting) -> CellSetting:
    """A minute into the window, for a minute."""
    lost = Loss(at_s=60.0, worker="D1" if setting.topology.decodes else "R1", back_after_s=60.0)
    return replace(setting, playback=replace(setting.playback, losses=(lost,)))


def _pooled(setting: CellSetting) -> CellSetting:
    """One engine that is as fast as all of the fleet, with the KV of all D or R: there is nothing to place."""
    fleet, profile = setting.topology, setting.setup.profile
    times = {one.name: getattr(profile.costs, one.name) for one in fields(profile.costs) if one.name.endswith("_s")}
    del times["transfer_bytes_per_s"]
    pooled = _with_profile(
        setting,
        costs=replace(profile.costs, **{name: time_s / fleet.workers for name, time_s in times.items()}),
        kv_capacity_tokens=profile.kv_capacity_tokens * (fleet.decodes + fleet.replicas),
        max_num_seqs=profile.max_num_seqs * fleet.workers,
    )
    return replace(pooled, topology=Topology.parse("1R"), idle=profile)


VARIANTS: Mapping[str, Variant] = {
    USUAL: lambda setting: setting,
    **{f"link-{speed}": _link(speed) for speed in (10, 25, 50, 100, 200, 400)},  # GB/s
    CONTEXT_COST: _context_cost(45.7e-9),  # as bare steps of an H100 have it: docs/laws.md
    "kv-0.5": _capacity(200_000),
    "kv-0.35": _capacity(140_000),
    **{f"events-{delay_s:g}s": _proxy(kv_events_delay_s=delay_s) for delay_s in (0.1, 1.0, 10.0)},
    "worker-lost": _worker_lost,
    "laws-x2": _proxy(laws_factor=2.0),
    "laws-x0.5": _proxy(laws_factor=0.5),
    "estimates-0.7": _proxy(estimates_factor=0.7),
    "estimates-1.3": _proxy(estimates_factor=1.3),
    "queues": _proxy(queues=True),
    "no-ledger": _proxy(ledger=False),
    "no-elsewhere": _proxy(residency_elsewhere=False),
    "no-returns": _proxy(returns=False),
    "no-tpot": _proxy(slo=replace_struct(USUAL_TARGETS, tpot_s=MOST["tpot"])),  # of which the proxy knows
    "first-split": _proxy(first_turns_split=True),
    "moves-kv": _rules(moves_kv=True),
    PREFILLS_ANSWER: _rules(prefills_answer=True),
    LONG_PREFILLS: _long_prefills(2048),  # of a prompt in a step, beside other requests
    LONG_PREFILLS_ANSWER: lambda setting: _rules(prefills_answer=True)(_long_prefills(2048)(setting)),
    POOLED: _pooled,
    "reads-back": _proxy(reads_back=True),
    "fetches-kv": _rules(fetches_kv=True),  # as no stock engine does without proof of the prefix
}


def varied(name: str, setting: CellSetting) -> CellSetting:
    """ConfigError for a name that is none of these."""
    if name not in VARIANTS:
        raise ConfigError(f"variant = {name!r}: must be {', '.join(VARIANTS)}", param="variant")
    return VARIANTS[name](setting)
