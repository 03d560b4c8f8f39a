"""A P of NIXL's push that begins anew under its engine's id: D takes it for the one that is gone, and waits for it."""

from __future__ import annotations

import asyncio

from ppd.proxy.config import Mode
from ppd.servers.fleet.ports import free_ports
from tests.support.fleet import Fleet

TEXT = "Some words, so that there are blocks to move. " * 4


async def test_such_a_pair_splits_no_turn_until_d_begins_anew_too() -> None:
    [port] = free_ports(1)
    told = f",connector=nixl_push,engine_id=one,side_channel_port={port}"
    async with Fleet.of(mode=Mode.ALWAYS_SPLIT) as fleet, asyncio.timeout(60):
        await fleet.add("P1", options=told, connector="nixl_push", engine_id="one", side_channel_port=port)
        await fleet.add("D1", options=",connector=nixl_push", connector="nixl_push")
        assert await routes(fleet, "a", "b") == ["SPLIT", "SPLIT"]
        strangers = fleet.proxy.state.health.strangers
        await begin_anew(fleet, "P1")
        await fleet.until(lambda: bool(strangers.pairs))
        assert await routes(fleet, "c", "d") == ["LOCAL", "LOCAL"]
        await begin_anew(fleet, "D1")
        await fleet.until(lambda: not strangers.pairs)
        assert await routes(fleet, "e", "f") == ["SPLIT", "SPLIT"]
        assert fleet.engines["D1"].counters.external_kv_tokens > 0


async def begin_anew(fleet: Fleet, name: str) -> None:
    await fleet.kill(name)
    await fleet.until(lambda: fleet.state(name) == "down")
    await fleet.start_again(name)
    await fleet.until(lambda: fleet.state(name) == "up")


async def routes(fleet: Fleet, *names: str) -> list[str | None]:
    """Of new conversations, one after the other."""
    turns = [await fleet.chat([{"role": "user", "content": f"{name} {TEXT}"}]) for name in names]
    assert [turn.status for turn in turns] == [200] * len(turns)
    return [turn.route for turn in turns]
