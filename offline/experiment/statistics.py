"""Figures over samples, each with its uncertainty. Percentiles and intervals are defined only here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Samples = Sequence[float] | NDArray[np.float64]

CONFIDENCE = 0.95
_SLOPE_SPANS = 12


@dataclass(frozen=True, slots=True)
class Estimate:
    """In the sample's own unit. `std` and `half_width` are None where there is only one value."""

    n: int
    mean: float
    p50: float | None  # None: the source did not record it
    p99: float | None
    std: float | None  # with n - 1
    half_width: float | None  # of the mean's 95 % interval

    @property
    def relative_width(self) -> float:
        return math.inf if self.half_width is None or self.mean == 0 else self.half_width / abs(self.mean)


def percentile(values: Samples, share: float) -> float:
    """The value below which `share` (0 to 1) of the sample lies, linear between the two neighbours (R's type 7)."""
    return float(np.quantile(np.asarray(values, dtype=float), share))


def half_width(values: Samples) -> float | None:
    """Half the 95 % interval of the mean of independent values, by Student's t; None for fewer than two."""
    sample = np.asarray(values, dtype=float)
    if sample.size < 2:
        return None
    spread = float(sample.std(ddof=1)) / math.sqrt(sample.size)
    return spread * float(stats.t.ppf((1 + CONFIDENCE) / 2, sample.size - 1))


def estimate(groups: Sequence[Samples]) -> Estimate | None:
    """Figures over all values of all groups; None where there are none.

    groups: one a seed. Requests of one run wait for each other, but the means of groups are independent. So with two
    groups or more the interval is that of the mean of their means; with one group it is over its values, and too
    narrow.
    """
    filled = [np.asarray(group, dtype=float) for group in groups if len(group)]
    if not filled:
        return None
    every = np.concatenate(filled)
    means = [float(group.mean()) for group in filled]
    return Estimate(
        n=int(every.size),
        mean=float(every.mean()),
        p50=percentile(every, 0.5),
        p99=percentile(every, 0.99),
        std=float(every.std(ddof=1)) if every.size > 1 else None,
        half_width=half_width(means if len(means) > 1 else every),
    )


@dataclass(frozen=True, slots=True)
class Slope:
    """In the samples' unit per unit of time; `low` to `high` is the 95 % interval."""

    value: float
    low: float
    high: float


def slope(times: Samples, values: Samples) -> Slope | None:
    """By least squares over the means of twelve equal spans of time; None where there are too few samples.

    Neighbouring samples are alike, because an allocator grows in steps, so an interval over all of them would be too
    narrow. The means of long spans are nearly independent.
    """
    if len(times) < 2 * _SLOPE_SPANS:
        return None
    spans = zip(
        np.array_split(np.asarray(times), _SLOPE_SPANS), np.array_split(np.asarray(values), _SLOPE_SPANS), strict=True
    )
    x, y = zip(*((float(time.mean()), float(value.mean())) for time, value in spans), strict=True)
    line = stats.linregress(x, y)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, _SLOPE_SPANS - 2)) * float(line.stderr)
    return Slope(float(line.slope), float(line.slope) - half, float(line.slope) + half)
