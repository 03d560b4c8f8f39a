"""How well predictions hold: the errors of the newest turns, by profile and by decision table."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from .corrections import Figure

TURNS = 200  # whose median is judged
STALE = 0.30
"""An error from which on a profile or a table does not say how this fleet is. It does again below `SOUND`."""
SOUND = 0.25
KEPT = 16  # profiles and tables
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
        error = max(-_MOST, min(_MOST, error))
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
    """Bounded: what was compared longest ago is forgotten."""

    def __init__(self) -> None:
        self._errors: OrderedDict[Subject, Errors] = OrderedDict()
        self._stale: set[Subject] = set()

    def note(self, subject: Subject, error: float) -> None:
        """error: relative; one with a sign is judged by its median's size."""
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
        for subject, errors in self._errors.items():
            yield ErrorRow(subject, list(errors))

    def adopt(self, rows: Iterable[ErrorRow]) -> None:
        """What another process has seen; what this one has is in it."""
        for row in rows:
            for error in row.errors[-TURNS:]:
                self.note(row.subject, error)

    def _judge(self, subject: Subject, errors: Errors) -> None:
        if len(errors) == TURNS and abs(errors.median) > STALE:
            self._stale.add(subject)
        elif abs(errors.median) <= SOUND:
            self._stale.discard(subject)


class ErrorRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """As one process tells another; the oldest first."""

    subject: Subject
    errors: list[float]
