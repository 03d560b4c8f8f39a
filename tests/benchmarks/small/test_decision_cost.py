"""The turns that decision_cost.py times are what it says: first ones over P, later ones found again, on their D."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.small.decision_cost import SIZES, conversation, parts, play
from benchmarks.small.proxy_here import bench


async def row(name: str, tools: int) -> Any:
    stand = bench(tools)
    try:
        return await play(stand, name, 3, 1)
    finally:
        stand.proxy.listener.close()


@pytest.mark.parametrize(
    ("size", "tools", "kinds"),
    [
        ("200 B", 0, {"first SPLIT": 3}),
        ("200 B", 3, {"first SPLIT": 1, "first LOCAL": 2}),  # where the tools are
        ("2 KB", 0, {"next LOCAL": 3}),
        ("2 KB", 3, {"next LOCAL": 3}),
        ("130 KB", 0, {"next LOCAL": 3}),
        ("130 KB", 3, {"next LOCAL": 3}),
    ],
)
def test_every_stage_of_every_turn_is_timed(size: str, tools: int, kinds: dict[str, int]) -> None:
    timed = asyncio.run(row(size, tools))
    assert dict(timed.kinds) == kinds
    assert list(timed.stages_us) == ["parse", "decide", "legs", "learn"]
    assert all(len(times_us) == 3 and min(times_us) > 0 for times_us in timed.stages_us.values())


@pytest.mark.parametrize(("size", "sessions"), [("200 B", 0), ("2 KB", 1)])
def test_a_turn_that_ends_again_and_again_stays_the_turn_of_its_session(size: str, sessions: int) -> None:
    """A first one's is in a table of its own."""
    stand = bench(0)
    try:
        asyncio.run(parts(stand, size, 1))
    finally:
        stand.proxy.listener.close()
    assert len(stand.proxy.state.sessions) == sessions


@pytest.mark.parametrize("size", ["2 KB", "130 KB", "600 KB"])
def test_bodies_are_as_long_as_the_row_says(size: str) -> None:
    wanted = SIZES[size][0]
    earlier, last = conversation(5, *SIZES[size], tools=0)
    assert earlier is not None
    assert len(last) == pytest.approx(wanted, rel=0.1)
    assert len(earlier) < len(last)
