"""A picker calls no more Python of its own than it did: what it costs where time cannot be measured."""

from __future__ import annotations

import pytest

from benchmarks.turns.picker_calls import LIMITS, count

pytestmark = pytest.mark.slow


async def test_a_picker_calls_no_more_functions_of_its_own_than_before() -> None:
    found = await count()
    calls = {route: work.calls.total() for route, work in found.items()}
    assert calls.keys() == LIMITS.keys()
    assert {route: number for route, number in calls.items() if not 0.8 * LIMITS[route] < number <= LIMITS[route]} == {}
