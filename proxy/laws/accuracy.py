"""How well predictions hold: the errors of the newest turns, by profile and by decision table."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from .corrections import Figure, bounded

TURNS = 200  # whose median is judged
STALE = 0.30
"""An error from which on a profile or a table does not say how this fleet is. It does again below `SOUND`."""
SOUND = 0.25
KEPT = 16  # profiles and tables
MOST_NOTED = 64  # errors; to learn so many takes 100 us
_MOST = 1e6


class Basis(StrEnum):
    """What a time was expected by."""

    PROFILE = "profile"
    TABLE = "table"


Subject = tuple[Basis, str, Figure]
"""The basis, its name, and the figure."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    basis: Basis
    name: str
    figure: Figure
    turns: int  # at most TURNS
    median_error: float
    stale: bool


class Errors:
    """The newest `most`, and their median."""

    __slots__ = ("_newest", "_sorted")

    def __init__(self, most: int, errors: Iterable[float] = ()) -> None:
        self._newest: deque[float] = deque(maxlen=most)
        self._sorted: list[float] = []
        for error in errors:
            self.add(error)

    def add(self, error: float) -> None:
        if math.isnan(error):
            return
        error = bounded(error, -_MOST, _MOST)
        if len(self._newest) == self._newest.maxlen:
            del self._sorted[bisect_left(self._sorted, self._newest[0])]
        self._newest.append(error)
        insort(self._sorted, error)

    def __len__(self) -> int:
        return len(self._newest)

    def __iter__(self) -> Iterator[float]:
        return iter(self._newest)

    @property
    def median(self) -> float:
        half, errors = len(self._sorted) // 2, self._sorted
        if not errors:
            return 0.0
        return errors[half] if len(errors) % 2 else (errors[half - 1] + errors[half]) / 2


class Accuracy:
    """Bounded: what was compared longest ago is forgotten. As in `Forecasts`, turns only note what they have seen."""

    def __init__(self) -> None:
        self._noted: list[tuple[Subject, float]] = []
        self._errors: OrderedDict[Subject, Errors] = OrderedDict()
        self._stale: set[Subject] = set()

    def note(self, subject: Subject, error: float) -> None:
        """error: relative; one with a sign is judged by its median's size."""
        self._noted.append((subject, error))
        if len(self._noted) >= MOST_NOTED:
            self._learn_noted()

    def _learn_noted(self) -> None:
        noted, self._noted = self._noted, []
        for subject, error in noted:
            self._learn(subject, error)

    def _learn(self, subject: Subject, error: float) -> None:
        errors = self._errors.get(subject)
        if errors is None:
            errors = self._errors[subject] = Errors(TURNS)
        errors.add(error)
        self._errors.move_to_end(subject)
        if len(self._errors) > KEPT:
            gone, _ = self._errors.popitem(last=False)
            self._stale.discard(gone)
        self._judge(subject, errors)

    def judged(self) -> Iterator[Judged]:
        self._learn_noted()
        for (basis, name, figure), errors in self._errors.items():
            yield Judged(
                basis=basis,
                name=name,
                figure=figure,
                turns=len(errors),
                median_error=abs(errors.median),
                stale=(basis, name, figure) in self._stale,
            )

    def rows(self) -> Iterator[ErrorRow]:
        self._learn_noted()
        for subject, errors in self._errors.items():
            yield ErrorRow(subject, list(errors))

    def adopt(self, rows: Iterable[ErrorRow]) -> None:
        """What another process has seen; what this one has is in it."""
        for row in rows:
            for error in row.errors[-TURNS:]:
                self.note(row.subject, error)

    def _judge(self, subject: Subject, errors: Errors) -> None:
        off = abs(errors.median)
        if off <= SOUND:
            self._stale.discard(subject)
        elif off > STALE and len(errors) == TURNS:
            self._stale.add(subject)


class ErrorRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """As one process tells another; the oldest first."""

    subject: Subject
    errors: list[float]
