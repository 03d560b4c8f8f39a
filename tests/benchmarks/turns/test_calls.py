"""A turn calls no more Python than it did: what it costs where time cannot be measured."""

from __future__ import annotations

import pytest

from benchmarks.turns.calls import LIMITS, count

pytestmark = pytest.mark.slow


async def test_turns_call_no_more_functions_than_before() -> None:
    found = await count()
    calls = {route: work.calls.total() for route, work in found.items()}
    assert all(work.instructions.total() > 10 * work.calls.total() for work in found.values())
    assert calls.keys() == LIMITS.keys()
    assert {route: number for route, number in calls.items() if not 0.8 * LIMITS[route] < number <= LIMITS[route]} == {}
