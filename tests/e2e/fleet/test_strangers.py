"""A P of NIXL's push that begins anew under its engine's id: D takes it for the one that is gone, and waits for it."""

from __future__ import annotations

import asyncio

from ppd.proxy.config import Mode
from ppd.servers.fleet.ports import free_ports
from tests.support.fleet import Fleet
from tests.support.proxy import ProxyClient, running_proxy

TEXT = "Some words, so that there are blocks to move. " * 4


async def test_such_a_pair_splits_no_turn_until_d_begins_anew_too() -> None:
    async with Fleet.of(mode=Mode.ALWAYS_SPLIT) as fleet, asyncio.timeout(60):
        await add_p(fleet)
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


async def test_a_proxy_that_begins_after_such_a_p_has_a_canary_try_the_pair_first() -> None:
    """Else its first turns would wait until their time is up; and those that are no stream would fail."""
    async with Fleet.of(mode=Mode.ALWAYS_SPLIT) as fleet, asyncio.timeout(60):
        told = await add_p(fleet)
        await fleet.add("D1", options=",connector=nixl_push", connector="nixl_push")
        fleet.engines["D1"].started_at -= 60.0
        assert await routes(fleet, "a") == ["SPLIT"]
        await begin_anew(fleet, "P1")
        p, d = (fleet.engines[name].address for name in ("P1", "D1"))
        workers = (f"P={p}{told}", f"D={d},connector=nixl_push")
        async with running_proxy(
            workers=workers, mode=Mode.ALWAYS_SPLIT, probe_interval_s=0.2, canary_interval_s=30.0
        ) as running:
            later = ProxyClient(*running)
            await later.until(lambda: list(later.states().values()) == ["up"] * 2)
            assert later.proxy.state.health.strangers.unproven == {(p, d)}
            assert await routes(later, "b", "c") == ["LOCAL", "LOCAL"]
            await begin_anew(fleet, "D1")
            await later.until(lambda: not later.proxy.state.health.strangers.unproven)
            await later.until(lambda: list(later.states().values()) == ["up"] * 2)
            assert "SPLIT" in await routes(later, *"defgh"), "the first may still meet the end of the D that is gone"


async def test_one_that_began_first_is_proven_by_its_first_canary() -> None:
    async with Fleet.of(mode=Mode.ALWAYS_SPLIT, canary_interval_s=30.0) as fleet, asyncio.timeout(60):
        d = await fleet.start("D1", connector="nixl_push")
        d.started_at -= 60.0
        await fleet.join("D1", d, d.address, ",connector=nixl_push")
        await add_p(fleet)
        strangers = fleet.proxy.state.health.strangers
        await fleet.until(lambda: not strangers.unproven)
        assert await routes(fleet, "a") == ["SPLIT"]
        assert [len(engine.received) for engine in fleet.engines.values()] == [2, 2], "the canary's and the turn's"


async def add_p(fleet: Fleet) -> str:
    """Under an id that it keeps. What a proxy is told of it."""
    [port] = free_ports(1)
    told = f",connector=nixl_push,engine_id=one,side_channel_port={port}"
    await fleet.add("P1", options=told, connector="nixl_push", engine_id="one", side_channel_port=port)
    return told


async def begin_anew(fleet: Fleet, name: str) -> None:
    await fleet.kill(name)
    await fleet.until(lambda: fleet.state(name) == "down")
    await fleet.start_again(name)
    await fleet.until(lambda: fleet.state(name) == "up")


async def routes(fleet: ProxyClient, *names: str) -> list[str | None]:
    """Of new conversations, one after the other."""
    turns = [await fleet.chat([{"role": "user", "content": f"{name} {TEXT}"}]) for name in names]
    assert [turn.status for turn in turns] == [200] * len(turns)
    return [turn.route for turn in turns]
