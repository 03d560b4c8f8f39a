"""The chats that reading_cost.py reads are what it says, and are found by their frames."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.small.proxy_here import bench
from benchmarks.turns.reading_cost import CALLS, agents, bodies, claudes, measure, plain
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
