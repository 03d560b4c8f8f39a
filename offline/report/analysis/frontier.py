"""Tokens/s against p99 TTFT, and the arms that no other arm beats in both: the paper's figures 1 and 8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...experiment.cells import MeasuredCell, is_evidence
from ...experiment.run import Workload
from ...experiment.statistics import Estimate
from .arms import Arm

Which = Callable[[MeasuredCell], Estimate | None]


@dataclass(frozen=True, slots=True)
class ArmPosition:
    """Means over the workloads of a panel."""

    arm: Arm
    tokens_per_s: float
    p99_ttft_s: float


@dataclass(frozen=True, slots=True)
class FrontierPanel:
    """The arms under one load, on the workloads of one class."""

    workloads: int
    places: tuple[ArmPosition, ...]
    absent: tuple[Arm, ...]  # without evidence on some of the workloads: their means would be over other work

    @property
    def frontier(self) -> tuple[ArmPosition, ...]:
        return tuple(sorted(pareto(self.places), key=lambda place: place.tokens_per_s))


def frontier_panel(cells: Iterable[MeasuredCell], which: Which) -> FrontierPanel:
    """`cells`: of one load and one class of workloads."""
    by_arm: dict[Arm, dict[Workload, MeasuredCell]] = {}
    workloads: set[Workload] = set()
    for cell in cells:
        by_arm.setdefault(Arm.of(cell), {})[cell.workload] = cell
        workloads.add(cell.workload)
    places, absent = [], []
    for arm in sorted(by_arm, key=lambda arm: arm.rank):
        place = _place(arm, by_arm[arm].values(), which) if len(by_arm[arm]) == len(workloads) else None
        if place is None:
            absent.append(arm)
        else:
            places.append(place)
    return FrontierPanel(len(workloads), tuple(places), tuple(absent))


def pareto(places: Sequence[ArmPosition]) -> list[ArmPosition]:
    """Positions that no other beats: none is as good in both figures and better in one."""
    return [place for place in places if not any(_beats(other, place) for other in places)]


def _beats(one: ArmPosition, other: ArmPosition) -> bool:
    at_least = one.tokens_per_s >= other.tokens_per_s and one.p99_ttft_s <= other.p99_ttft_s
    return at_least and (one.tokens_per_s, one.p99_ttft_s) != (other.tokens_per_s, other.p99_ttft_s)


def _place(arm: Arm, cells: Iterable[MeasuredCell], which: Which) -> ArmPosition | None:
    rates, tails = [], []
    for cell in cells:
        estimate = which(cell)
        if not is_evidence(cell) or estimate is None or estimate.p99 is None or cell.tokens_per_s is None:
            return None
        rates.append(cell.tokens_per_s)
        tails.append(estimate.p99)
    return ArmPosition(arm, sum(rates) / len(rates), sum(tails) / len(tails))
