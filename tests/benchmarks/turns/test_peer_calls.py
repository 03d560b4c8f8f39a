"""Another process is told of a turn with no more Python than it was, and in no more packets."""

from __future__ import annotations

import pytest

from benchmarks.turns.peer_calls import LIMITS, count, parts

pytestmark = pytest.mark.slow


async def test_no_more_functions_are_called_than_before_and_no_more_packets_sent() -> None:
    found = await count()
    calls = {part: work.calls.total() for part, work in parts(found).items()}
    assert calls.keys() == LIMITS.keys()
    assert {part: number for part, number in calls.items() if not 0.8 * LIMITS[part] < number <= LIMITS[part]} == {}
    assert {route: len(turn.packets) for route, turn in found.items()} == {"SPLIT": 2, "LOCAL": 2}
