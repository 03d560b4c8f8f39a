"""Which mode is best at each point, by objective: the paper's table 2."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ...experiment.cells import MeasuredCell, is_evidence
from ...experiment.statistics import Estimate
from .arms import Arm, by_point


@dataclass(frozen=True, slots=True)
class Objective:
    name: str
    estimate: Callable[[MeasuredCell], Estimate | None]
    figure: Callable[[MeasuredCell], float | None]
    is_higher_better: bool = False

    def cost(self, cell: MeasuredCell) -> float:
        """Lower is better; infinite where the cell has no figure."""
        value = self.figure(cell)
        if value is None:
            return math.inf
        return -value if self.is_higher_better else value


@dataclass(frozen=True, slots=True)
class Wins:
    """Over the points where at least one arm is evidence."""

    objective: str
    points: int
    by_mode: Mapping[str, float]  # points won; a tie counts in equal parts for the modes that share it
    ties: int  # points that two modes or more share
    uncontested: int  # points where a single mode is evidence
    clear: int | None  # points where the winner's 95 % interval is apart from every other mode's; None: no intervals

    def share(self, mode: str) -> float:
        return self.by_mode.get(mode, 0.0) / self.points


def _mean(estimate: Callable[[MeasuredCell], Estimate | None]) -> Callable[[MeasuredCell], float | None]:
    return lambda cell: None if (found := estimate(cell)) is None else found.mean


def _later_ttft(cell: MeasuredCell) -> Estimate | None:
    return cell.later_ttft_s


def _later_tpot(cell: MeasuredCell) -> Estimate | None:
    return cell.later_tpot_s


TTFT = Objective("TTFT", _later_ttft, _mean(_later_ttft))
TPOT = Objective("TPOT", _later_tpot, _mean(_later_tpot))
TOKENS = Objective("tokens/s", lambda _: None, lambda cell: cell.tokens_per_s, is_higher_better=True)
OBJECTIVES = (TTFT, TPOT, TOKENS)


def wins(
    cells: Iterable[MeasuredCell], objective: Objective, is_eligible: Callable[[MeasuredCell], bool] = is_evidence
) -> Wins | None:
    won: Counter[str] = Counter()
    ties = uncontested = clear = points = 0
    has_interval = False
    for competitors in _contests(cells, objective, is_eligible):
        points += 1
        best = _best(competitors, objective)
        modes = {arm.mode for arm in best}
        for mode in modes:
            won[mode] += 1 / len(modes)  # type: ignore[assignment]
        ties += len(modes) > 1
        others = [cell for arm, cell in competitors.items() if arm.mode not in modes]
        uncontested += not others and len(modes) == 1
        has_interval |= any(_half_width(cell, objective) is not None for cell in competitors.values())
        clear += len(modes) == 1 and bool(others) and _is_clear(competitors[best[0]], others, objective)
    if not points:
        return None
    return Wins(objective.name, points, dict(won), ties, uncontested, clear if has_interval else None)


def disagreement(cells: Iterable[MeasuredCell], one: Objective, other: Objective) -> tuple[int, int]:
    """(points whose best arms differ between two objectives, points)."""
    differ = points = 0
    for competitors in _contests(cells, one, is_evidence):
        points += 1
        differ += not set(_best(competitors, one)) & set(_best(competitors, other))
    return differ, points


def _contests(
    cells: Iterable[MeasuredCell], objective: Objective, is_eligible: Callable[[MeasuredCell], bool]
) -> Iterable[dict[Arm, MeasuredCell]]:
    for competitors in by_point(cells).values():
        able = {a: c for a, c in competitors.items() if is_eligible(c) and math.isfinite(objective.cost(c))}
        if able:
            yield able


def _best(competitors: Mapping[Arm, MeasuredCell], objective: Objective) -> list[Arm]:
    least = min(objective.cost(cell) for cell in competitors.values())
    best = [arm for arm, cell in competitors.items() if math.isclose(objective.cost(cell), least, rel_tol=1e-9)]
    return sorted(best, key=lambda arm: arm.rank)


def _half_width(cell: MeasuredCell, objective: Objective) -> float | None:
    found = objective.estimate(cell)
    return None if found is None else found.half_width


def _is_clear(winner: MeasuredCell, others: Iterable[MeasuredCell], objective: Objective) -> bool:
    half = _half_width(winner, objective)
    if half is None:
        return False
    for other in others:
        other_half = _half_width(other, objective)
        if other_half is None or objective.cost(winner) + half >= objective.cost(other) - other_half:
            return False
    return True
