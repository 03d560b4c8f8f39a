"""Counts of positive values in bins of equal ratio: what was seen lately counts for more."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate

_HALVED = 4000.0  # counts: then all count by half


class LogHistogram:
    """Smaller values count in the first bin, larger ones in the last."""

    __slots__ = ("_least", "_per_doubling", "counts", "total")

    def __init__(self, least: float, most: float, per_doubling: int) -> None:
        self._least, self._per_doubling = least, per_doubling
        self.counts = [0.0] * (math.ceil(math.log2(most / least) * per_doubling) + 1)
        self.total = 0.0

    def add(self, value: float, count: float = 1.0) -> None:
        self.counts[self.bin(value)] += count
        self.total += count
        if self.total > _HALVED:
            self.counts = [one / 2 for one in self.counts]
            self.total /= 2

    def bin(self, value: float) -> int:
        if not value > self._least:
            return 0
        number, last = int(math.log2(value / self._least) * self._per_doubling), len(self.counts) - 1
        return number if number < last else last

    def begin(self, number: float) -> float:
        """Where a bin begins; between two of them for a fraction."""
        return self._least * math.exp2(number / self._per_doubling)

    def quantile(self, share: float) -> float:
        wanted, below = share * self.total, list(accumulate(self.counts))
        number = bisect_left(below, wanted) if wanted else bisect_right(below, 0.0)  # the first that is not empty
        if number == len(below):
            return self.begin(number)
        before = below[number - 1] if number else 0.0
        return self.begin(number + (wanted - before) / self.counts[number])
