"""The program that measures both legs at once: which rows it has, and that each failure closes the other leg."""

from __future__ import annotations

import random

import pytest

from benchmarks.turns.both_legs import LONGEST_S, measure, table


@pytest.mark.slow
async def test_every_turn_is_answered_and_every_failure_closes_the_other_leg() -> None:
    found = await measure(turns=4, seed=1)
    assert [len(times) for times in found.values()] == [4] * 10
    closed = {name: times for name, times in found.items() if "is closed" in name}
    assert [name.split(",")[0] for name in closed] == [
        "P fails (500)",
        "P fails (reset)",
        "D fails (500)",
        "D fails (reset)",
    ]
    assert all(took_s > 0 for times in closed.values() for took_s in times), "the failure comes first"
    told = random.Random(1)
    drawn = [max(told.uniform(0, LONGEST_S), told.uniform(0, LONGEST_S)) for _ in range(4)]
    both = found["both, through the proxy"]
    assert all(took_s > 0.99 * waits_s for took_s, waits_s in zip(both, drawn, strict=True)), "each waits for the other"
    assert list(table(found))[1].startswith("| P alone | ")
