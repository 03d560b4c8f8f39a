"""What the records say: in each cell the best other mode, the subject beside it, and both over all cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ppd.offline.goodput.modes import OF_PAIRS, ORACLE
from ppd.proxy.config import Mode

from .cells import Cell
from .records import CellRecord


@dataclass(frozen=True, slots=True)
class Standing:
    """One mode's goodput in one cell, in sessions a second."""

    mode: str
    mean: float
    low: float  # over the seeds
    high: float

    @property
    def spread(self) -> float:
        """Between the seeds, relative to the mean."""
        return (self.high - self.low) / self.mean if self.mean else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of a subject in one cell. `ratio`: to what it stands beside; None: that does not meet the SLO."""

    cell: Cell
    other: Standing | None
    subject: Standing | None  # None: not measured here

    @property
    def ratio(self) -> float | None:
        if self.subject is None or self.other is None or not self.other.mean:
            return None
        return self.subject.mean / self.other.mean


def standings(found: Mapping[str, CellRecord], question: str) -> list[Standing]:
    """The best first."""
    known = [
        Standing(mode, fmean(rates), min(rates), max(rates))
        for mode, one in found.items()
        if (rates := one.goodput.get(question))
    ]
    return sorted(known, key=lambda one: (-one.mean, one.mode))


def is_alone(subject: str, cells: Iterable[Cell], found: Mapping[str, Mapping[str, CellRecord]]) -> bool:
    """Whether nothing but the subject is recorded there: then no mode of these cells says what its goodput is worth."""
    return {mode for cell in cells for mode in found.get(cell.name, {})} == {subject}


def compared(
    cells: Iterable[Cell],
    found: Mapping[str, Mapping[str, CellRecord]],
    question: str,
    subject: str,
    other: str | None = None,
) -> list[Comparison]:
    """other: beside this mode alone, where it was measured; None: beside the best of the others, the oracle aside."""
    made = []
    for cell in cells:
        known = standings(found.get(cell.name, {}), question)
        own = next((one for one in known if one.mode == subject), None)
        if other is None:
            others = [one for one in known if one.mode not in (subject, ORACLE)]
        else:
            others = [one for one in known if one.mode == other] or _in_place(known, other, cell)
        if others or (known and other is None):
            made.append(Comparison(cell, others[0] if others else None, own))
    return made


def _in_place(known: Sequence[Standing], mode: str, cell: Cell) -> list[Standing]:
    """On replicas only, a rule for pairs is that of `replica`. A mode that places sessions has its own there."""
    if cell.topology.decodes or mode not in OF_PAIRS:
        return []
    return [one for one in known if one.mode == Mode.REPLICA]


@dataclass(frozen=True, slots=True)
class Ratios:
    """Over cells. `without`: cells in which no other mode meets the SLO, so that there is no ratio."""

    cells: int
    geometric_mean: float
    least: float
    worst: Cell
    without: int


def ratios(comparisons: Sequence[Comparison]) -> Ratios | None:
    """None where no cell has both."""
    judged = [(one.ratio, one.cell) for one in comparisons if one.ratio is not None]
    if not judged:
        return None
    least, worst = min(judged)
    logarithms = [math.log(ratio) if ratio else -math.inf for ratio, _ in judged]
    without = sum(one.subject is not None and one.ratio is None for one in comparisons)
    return Ratios(len(judged), math.exp(fmean(logarithms)), least, worst, without)
