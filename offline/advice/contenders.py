"""The fleets and modes that are compared."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from ppd.proxy.errors import ConfigError
from ppd.proxy.laws.profile_file import ProfileFile
from ppd.proxy.policy.modes import PREDICTING
from ppd.servers.fleet.topology import Topology

from ..goodput.modes import SIMULATED, modes_on

ALL_MODES = SIMULATED
PARTS = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)  # of the workers, that are P in the first fleets


class Contender(NamedTuple):
    topology: str
    mode: str

    @property
    def is_disaggregated(self) -> bool:
        return Topology.parse(self.topology).decodes > 0

    def __str__(self) -> str:
        return f"{self.topology} {self.mode}"


class Setting(NamedTuple):
    """What else a fleet could be started with. The names are the config's keys."""

    long_prefill_tokens: int = 0  # 0: as the profile says
    prefills_answer: bool = False

    def __str__(self) -> str:
        if self.prefills_answer:
            return "prefills_answer = true"
        return f"long_prefill_tokens = {self.long_prefill_tokens}"


LONG_PREFILL_SHARE = 4  # so many long prompts share a step


def settings_for(one: Contender, profile: ProfileFile) -> list[Setting]:
    """That it was not tried with, and that may serve more."""
    costs, found = profile.costs, list[Setting]()
    if not costs.long_prefill_tokens and (cap := costs.max_batched_tokens // LONG_PREFILL_SHARE):
        found.append(Setting(long_prefill_tokens=cap))
    if one.is_disaggregated and one.mode in PREDICTING:
        found.append(Setting(prefills_answer=True))
    return found


def workers_for(gpus: int, gpu_count: int) -> int:
    """ConfigError where they are not enough for one engine."""
    if gpus < gpu_count:
        raise ConfigError(f"gpus = {gpus}: one engine of this profile takes {gpu_count}", param="gpus")
    return gpus // gpu_count


def first_contenders(workers: int, modes: Collection[str]) -> list[Contender]:
    """Those first whose goodput tells most about the others'. Fewer workers than there are can do no more."""
    fleets = [f"{workers}R", *(_pairs(workers, prefills) for prefills in _first_prefills(workers))]
    found = [Contender(fleet, mode) for mode in modes for fleet in fleets if mode in _modes_on(fleet, modes)]
    if not found:
        allowed = ", ".join(modes_on(Topology.parse(fleets[0]), ALL_MODES))
        raise ConfigError(f"mode = {', '.join(modes)}: on one worker it must be one of {allowed}", param="mode")
    return found


def neighbours(best: Iterable[Contender], modes: Collection[str], known: Collection[Contender]) -> list[Contender]:
    """Of the best fleets, those that differ in one or two workers and have not been tried."""
    found = dict[Contender, None]()
    for one in best:
        for fleet in _changed(Topology.parse(one.topology)):
            if one.mode in _modes_on(fleet, modes):
                found[Contender(fleet, one.mode)] = None
    return [one for one in found if one not in known]


def _first_prefills(workers: int) -> list[int]:
    return sorted({min(workers - 1, max(1, round(workers * part))) for part in PARTS}) if workers > 1 else []


def _changed(fleet: Topology) -> Iterator[str]:
    p, d, r = fleet.prefills, fleet.decodes, fleet.replicas
    for prefills, decodes, replicas in ((p + 1, d - 1, r), (p - 1, d + 1, r), (p - 1, d, r + 1), (p, d - 1, r + 1)):
        if prefills >= 1 and decodes >= 1:
            yield _pairs(prefills + decodes, prefills, replicas)
    if not d and r > 2:
        yield _pairs(2, 1, r - 2)


def _pairs(workers: int, prefills: int, replicas: int = 0) -> str:
    return f"{prefills}P_{workers - prefills}D" + (f"_{replicas}R" if replicas else "")


def _modes_on(fleet: str, modes: Collection[str]) -> tuple[str, ...]:
    """On replicas alone every rule for pairs is `replica`; beside D, `replica` would leave these idle."""
    topology = Topology.parse(fleet)
    known = modes_on(topology, tuple(modes))
    return tuple(mode for mode in known if mode != "replica") if topology.decodes else known
