"""Tells overload from a burst, and bounds the wait under overload.

A queue that is always there makes every turn wait and serves not one more (Nichols, Jacobson: "Controlling Queue
Delay", ACM Queue 10(5), 2012). A burst is served by waiting. So nothing is bounded until the queue has stood for a
while and more turns keep arriving than leave. Clients that wait for their answers before they ask again never do that.
"""

from __future__ import annotations

import math

from .arrival_rate import RateMeter

STANDING_S = 1.5  # a burst that is worked off in this time is none of ours
EXCESS = 1.25  # arrivals over departures
CHANCE = 4.0  # turns per second that may come by chance beyond that
SHARE = 0.5  # of the time that a turn takes: so long it may wait, if that is more than the limit


class Overload:
    """It need not be told who comes and leaves while no turn waits: it judges only what came since the queue stands.

    limit_s: how long a turn may wait under overload, at least; 0: nothing is bounded.
    """

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self._arrivals = RateMeter(STANDING_S, now_s)
        self._departures = RateMeter(STANDING_S, now_s)
        self._standing_since_s = math.inf

    def arrived(self, now_s: float) -> None:
        """Also a turn that is refused."""
        self._arrivals.count(now_s)

    def departed(self, now_s: float) -> None:
        self._departures.count(now_s)

    def queue_is(self, waiting: int, now_s: float) -> None:
        if not waiting:
            self._standing_since_s = math.inf
        elif self._standing_since_s == math.inf:
            self._standing_since_s = now_s

    def rate_rps(self, now_s: float) -> float:
        return self._departures.rate_rps(now_s)

    def wait_limit_s(self, inside: int, now_s: float) -> float:
        """The longest wait that is worth while now; infinite without overload. inside: turns in the fleet."""
        if not self._limit_s or now_s - self._standing_since_s < STANDING_S:
            return math.inf
        departing_rps = self.rate_rps(now_s)
        if not departing_rps or self._arrivals.rate_rps(now_s) <= EXCESS * departing_rps + CHANCE:
            return math.inf
        return max(self._limit_s, SHARE * inside / departing_rps)  # Little: a turn takes inside / rate
