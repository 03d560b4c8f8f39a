"""Time that passes only when a test says so."""

from __future__ import annotations


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
