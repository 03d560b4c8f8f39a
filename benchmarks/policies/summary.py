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
    rates: tuple[float, ...]  # of each seed

    @property
    def mean(self) -> float:
        return fmean(self.rates)

    @property
    def low(self) -> float:
        return min(self.rates)

    @property
    def high(self) -> float:
        return max(self.rates)

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

    @property
    def seed_range(self) -> tuple[float, float]:
        """Of the ratio, where there is one: the least and the most of any seed. A seed plays both the same sessions."""
        assert self.subject is not None, "the caller saw a ratio"
        assert self.other is not None, "the caller saw a ratio"
        pairs = zip(self.subject.rates, self.other.rates, strict=False)
        ratios = [own / other for own, other in pairs if other]
        return min(ratios), max(ratios)


def standings(found: Mapping[str, CellRecord], question: str) -> list[Standing]:
    """The best first."""
    known = [Standing(mode, rates) for mode, one in found.items() if (rates := one.goodput.get(question))]
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


def standing(found: Mapping[str, Mapping[str, CellRecord]], cell: Cell, mode: str, question: str) -> Standing | None:
    """None: not measured."""
    return next((one for one in standings(found.get(cell.name, {}), question) if one.mode == mode), None)


def changes(
    cells: Iterable[Cell],
    found: Mapping[str, Mapping[str, CellRecord]],
    questions: Iterable[str],
    subject: str,
) -> dict[str, list[Comparison]]:
    """By question, of the subject in each cell's variant beside itself in the usual one, where there is a ratio."""
    changed = [cell for cell in cells if cell != cell.usual]
    made = {
        question: [
            Comparison(cell, *(standing(found, one, subject, question) for one in (cell.usual, cell)))
            for cell in changed
        ]
        for question in questions
    }
    judged = {question: [one for one in known if one.ratio is not None] for question, known in made.items()}
    return {question: known for question, known in judged.items() if known}


@dataclass(frozen=True, slots=True)
class Ratios:
    """Over cells. `without`: cells in which no other mode meets the SLO, so that there is no ratio."""

    cells: int
    geometric_mean: float
    least: float
    worst: Cell
    most: float
    best: Cell
    without: int


def ratios(comparisons: Sequence[Comparison]) -> Ratios | None:
    """None where no cell has both."""
    judged = [(one.ratio, one.cell) for one in comparisons if one.ratio is not None]
    if not judged:
        return None
    (least, worst), (most, best) = min(judged), max(judged)
    logarithms = [math.log(ratio) if ratio else -math.inf for ratio, _ in judged]
    without = sum(one.subject is not None and one.ratio is None for one in comparisons)
    return Ratios(len(judged), math.exp(fmean(logarithms)), least, worst, most, best, without)
