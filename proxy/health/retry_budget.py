"""A budget for retries: when many turns fail, trying each again would double the load on what is left of the fleet."""

from __future__ import annotations

PARTS = 1000  # of a token: shares add up exactly, as in gRPC's retry throttling


class RetryBudget:
    """Tokens for retries. Each turn deposits `share` of one, to a thousandth; a retry takes a whole one.

    So retries are at most `share` of all turns, and `burst` more after a quiet time. After Finagle's RetryBudget
    (https://finagle.github.io/blog/2016/02/08/retry-budgets), which limits by a share of traffic and not by counting
    failures: a fleet that fails everything is not asked again and again.
    """

    def __init__(self, share: float, burst: int) -> None:
        self._share = round(share * PARTS)
        self._burst = burst * PARTS
        self._parts = self._burst

    @property
    def tokens(self) -> float:
        return self._parts / PARTS

    def deposit(self) -> None:
        """A turn arrived."""
        self._parts = min(self._burst, self._parts + self._share)

    def take(self) -> bool:
        """Whether one more retry may be made; if so it is paid for."""
        if self._parts < PARTS:
            return False
        self._parts -= PARTS
        return True
