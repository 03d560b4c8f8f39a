"""Fakes and factories that several test files share."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# The same examples everywhere and no clock: a slow machine must not fail a test, nor a lucky one pass it.
settings.register_profile("project", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
