"""A turn calls no more Python than it did: what it costs where time cannot be measured."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import pytest

from benchmarks.turns import calls, served_calls
from benchmarks.turns.calls import TurnWork

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("count", "limits"),
    [(calls.count, calls.LIMITS), (served_calls.count, served_calls.LIMITS)],
    ids=["turn", "served"],
)
async def test_turns_call_no_more_functions_than_before(
    count: Callable[[], Awaitable[Mapping[str, TurnWork]]], limits: Mapping[str, int]
) -> None:
    found = await count()
    number = {route: work.calls.total() for route, work in found.items()}
    assert all(work.instructions.total() > 10 * work.calls.total() for work in found.values())
    assert number.keys() == limits.keys()
    assert {route: times for route, times in number.items() if not 0.8 * limits[route] < times <= limits[route]} == {}
