"""What it costs to tell another process of a turn is measured for both routes."""

from __future__ import annotations

import pytest

from benchmarks.turns.peer_cost import measure

pytestmark = pytest.mark.slow


async def test_both_routes_are_timed_in_both_processes() -> None:
    found = await measure(4)
    assert set(found) == {"SPLIT", "LOCAL"}
    assert all(us.told > 0.0 and us.alone > 0.0 for us in found.values())
