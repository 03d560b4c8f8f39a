"""The chats that reading_cost.py reads are what it says, and are found by their frames."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.small.proxy_here import bench
from benchmarks.turns import reading_cost
from benchmarks.turns.reading_cost import (
    CALLS,
    agents,
    bodies,
    claudes,
    conversations,
    measure,
    measure_growing,
    plain,
)
from ppd.proxy import plane
from ppd.proxy.admission.keys import Client
from ppd.proxy.openai.request import Endpoint


async def test_each_is_read_as_often_as_asked() -> None:
    rows = await measure(2)
    assert [(name, endpoint) for name, endpoint, *_ in rows] == [(name, endpoint) for name, endpoint, _ in bodies()]
    for name, endpoint, size, units, times_us in rows:
        calls = int(name.split()[0]) if name.endswith("calls") else 0
        has_instructions = endpoint is Endpoint.RESPONSES
        assert units == 2 + 20 + has_instructions + 2 * calls if calls else units > 2
        assert size > 1000 and len(times_us) == 2 and min(times_us) > 0, endpoint


def test_plain_chats_are_as_long_as_they_say() -> None:
    for size in (2_000, 130_000, 600_000):
        assert size < len(plain(size)) < size * 1.5
    assert len(msgspec.json.decode(agents(3))["messages"]) == len(msgspec.json.decode(claudes(3))["messages"]) == 7


async def test_conversations_grow_by_a_turn_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_cost, "MOST_TURNS", 5)
    conversed = {(name, endpoint): turns for name, endpoint, turns in conversations()}
    for (name, endpoint), turns in conversed.items():
        member = "input" if endpoint is Endpoint.RESPONSES else "messages"
        lengths = [len(msgspec.json.decode(body)[member]) for body in turns]
        step = 3 if endpoint is Endpoint.RESPONSES else 2
        assert lengths == [*range(1, step * (5 if name.startswith("plain") else 6), step)]
    rows = await measure_growing(1)
    assert [(name, endpoint) for name, endpoint, *_ in rows] == [*conversed]
    for name, endpoint, sizes, us in rows:
        assert sizes == [len(body) for body in conversed[name, endpoint]]
        assert all(len(each) == len(sizes) and min(each) > 0 for each in us.values())


@pytest.mark.skipif(not plane.IS_BUILT, reason="compiled code finds the frames")
async def test_chats_are_found_by_their_frames() -> None:
    proxy = bench(0).proxy
    try:
        for _, endpoint, body in bodies():
            for _ in range(2):
                await proxy.bodies.turn(endpoint, {}, Client(name="", tenant="t"), body)
    finally:
        proxy.listener.close()
    assert {endpoint: len(frames) for endpoint, frames in proxy.bodies._frames.items()} == {
        Endpoint.CHAT: 2,  # without tools, and with them
        Endpoint.MESSAGES: 1,
        Endpoint.RESPONSES: len(CALLS),  # each with instructions of its own
    }
