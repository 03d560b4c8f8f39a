"""The retry budget: when many turns fail, retrying each would double the load on what is left of the fleet."""

from __future__ import annotations

PARTS = 1000  # of a token, so that shares add up exactly; as in gRPC's retry throttling


class RetryBudget:
    """Each turn deposits `share` of a token, rounded to a thousandth; a retry takes a whole one.

    So retries are at most `share` of all turns, and `burst` more after a quiet time. It follows Finagle's RetryBudget
    (https://finagle.github.io/blog/2016/02/08/retry-budgets): a share of the traffic bounds retries even where
    everything fails.
    """

    def __init__(self, share: float, burst: int) -> None:
        self._share = round(share * PARTS)
        self._burst = burst * PARTS
        self._parts = self._burst

    @property
    def tokens(self) -> float:
        return self._parts / PARTS

    def deposit(self) -> None:
        """Once for each turn that arrives."""
        self._parts = min(self._burst, self._parts + self._share)

    def take(self) -> bool:
        """Whether one more retry may be made; if so, takes its token."""
        if self._parts < PARTS:
            return False
        self._parts -= PARTS
        return True
