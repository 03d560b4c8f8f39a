"""Whether a quantity grows: a line through its samples, with how far its slope can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ppd.offline.experiment.statistics import CONFIDENCE

BINS = 12


@dataclass(frozen=True, slots=True)
class Slope:
    """In the samples' unit per unit of time; `low` to `high` is the 95 % interval."""

    value: float
    low: float
    high: float


def slope(times: Sequence[float], values: Sequence[float]) -> Slope | None:
    """By least squares over the means of twelve equal spans of time; None where there are too few samples.

    An allocator's steps make neighbouring samples alike, and an interval from all of them too narrow: means of long
    spans are nearly independent.
    """
    if len(times) < 2 * BINS:
        return None
    spans = zip(np.array_split(np.asarray(times), BINS), np.array_split(np.asarray(values), BINS), strict=True)
    x, y = zip(*((float(time.mean()), float(value.mean())) for time, value in spans), strict=True)
    line = stats.linregress(x, y)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, BINS - 2)) * float(line.stderr)
    return Slope(float(line.slope), float(line.slope) - half, float(line.slope) + half)
