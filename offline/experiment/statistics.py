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
