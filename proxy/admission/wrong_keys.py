"""Wrong keys cost time: the answer to each is withheld, the longer the more of them an address has sent lately.

A right key is never delayed, whatever else comes from its address: many clients may share one. So this slows down who
guesses, or repeats a revoked key without end, on each connection; it does not lock an address out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

FREE = 4  # wrong keys of one address that are answered at once
FIRST_S = 0.1  # the first delay; doubled each time
LONGEST_S = 5.0
FORGET_S = 60.0  # without a wrong key
ADDRESSES = 10_000  # that are remembered, the latest ones
WITHHELD_LIMIT = 1000  # answers withheld at once; further ones go out at once


class WrongKeys:
    """now: a monotonic clock in seconds. An address is a key of `address_key`, so a host cannot pick another."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.withheld = 0
        self._now = now
        self._seen: OrderedDict[str, tuple[int, float]] = OrderedDict()  # how many, and when the last one came

    def __len__(self) -> int:
        return len(self._seen)

    def withhold(self, address: str) -> float:
        """Counts a wrong key; for how many seconds its answer waits. Unless that is 0, `release` must follow."""
        count, last_s = self._seen.pop(address, (0, self._now()))
        count = 1 if self._now() - last_s > FORGET_S else count + 1
        self._seen[address] = (count, self._now())
        if len(self._seen) > ADDRESSES:
            self._seen.popitem(last=False)
        if count <= FREE or self.withheld >= WITHHELD_LIMIT:
            return 0.0
        self.withheld += 1
        return min(LONGEST_S, FIRST_S * 2.0 ** min(count - FREE - 1, 20))

    def release(self) -> None:
        self.withheld -= 1
