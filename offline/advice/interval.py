"""A rate or a ratio of rates, by several draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ..experiment.statistics import half_width


@dataclass(frozen=True, slots=True)
class Interval:
    """95 %; no bounds where one value is known, or some are 0."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Of the geometric mean; of the plain one where a value is 0."""
        if not all(values):
            return cls(fmean(values))
        logs = [math.log(value) for value in values]
        width, middle = half_width(logs), fmean(logs)
        if width is None:
            return cls(math.exp(middle))
        return cls(math.exp(middle), math.exp(middle - width), math.exp(middle + width))

    def text(self) -> str:
        if self.low is None or self.high is None:
            return rounded(self.value)
        return f"{rounded(self.value)} ({rounded(self.low)} to {rounded(self.high)})"


def rounded(value: float, digits: int = 3) -> str:
    """To so many digits, or to a whole number where that has more."""
    return f"{value:.{digits}g}" if value < 10**digits - 0.5 else f"{value:,.0f}"
