"""How a figure of follow-up turns changes with load or with the number of turns, for arms that did the same work.

Arms are compared on the same workloads only: where one arm has no evidence, the point counts for none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ...experiment.cells import MeasuredCell, is_evidence
from ...experiment.run import Workload
from ...experiment.statistics import Estimate
from .arms import Arm

Which = Callable[[MeasuredCell], Estimate | None]


@dataclass(frozen=True, slots=True)
class CoursePoint:
    at: float  # QPS, or turns
    mean: float  # of the cells' means
    half_width: float | None  # of its 95 % interval, from the cells' own; None where a cell has none
    cells: int


@dataclass(frozen=True, slots=True)
class Course:
    arm: Arm
    steps: tuple[CoursePoint, ...]


@dataclass(frozen=True, slots=True)
class Courses:
    """The courses of arms that are drawn together."""

    courses: tuple[Course, ...]
    workloads: int  # that count, of those swept
    swept: int
    varies: bool  # no workload has evidence at every step, so steps are over different workloads


def by_load(cells: Iterable[MeasuredCell], arms: Sequence[Arm], which: Which) -> Courses:
    chosen = [cell for cell in cells if Arm.of(cell) in arms]
    return _courses(chosen, arms, which, lambda cell: cell.qps, lambda cell: cell.workload)


def by_turns(cells: Iterable[MeasuredCell], arms: Sequence[Arm], which: Which) -> Courses:
    chosen = [cell for cell in cells if Arm.of(cell) in arms]
    return _courses(
        chosen, arms, which, lambda cell: cell.workload.turns, lambda cell: (_without_turns(cell.workload), cell.qps)
    )


def _without_turns(workload: Workload) -> Workload:
    return msgspec.structs.replace(workload, turns=2)


def _courses(
    cells: Sequence[MeasuredCell],
    arms: Sequence[Arm],
    which: Which,
    place: Callable[[MeasuredCell], float],
    work: Callable[[MeasuredCell], object],
) -> Courses:
    found: dict[tuple[object, float], dict[Arm, Estimate]] = {}
    for cell in cells:
        estimate = which(cell)
        if is_evidence(cell) and estimate is not None:
            found.setdefault((work(cell), place(cell)), {})[Arm.of(cell)] = estimate
    whole = {key for key, by_arm in found.items() if len(by_arm) == len(arms)}
    places = sorted({at for _, at in whole})
    everywhere = {one for one, _ in whole if all((one, at) in whole for at in places)}
    used = {key for key in whole if key[0] in everywhere} if everywhere else whole
    return Courses(
        tuple(
            Course(arm, tuple(_step(at, [found[key][arm] for key in used if key[1] == at]) for at in places))
            for arm in arms
        ),
        workloads=len({one for one, _ in used}),
        swept=len({work(cell) for cell in cells}),
        varies=not everywhere and bool(whole),
    )


def _step(at: float, estimates: Sequence[Estimate]) -> CoursePoint:
    halves = [estimate.half_width for estimate in estimates]
    known = [half for half in halves if half is not None]
    half = math.hypot(*sorted(known)) / len(known) if len(known) == len(halves) else None
    return CoursePoint(at, sum(sorted(estimate.mean for estimate in estimates)) / len(estimates), half, len(estimates))
