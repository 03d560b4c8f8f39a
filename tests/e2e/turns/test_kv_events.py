"""What engines say of their own caches counts above what the proxy's turns let it believe."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppd.proxy.fleet.worker import WorkerId
from ppd.servers.sim.core.fault_orders import Faults
from ppd.servers.sim.engine.engine import SimEngine
from tests.support.fleet import Fleet
from tests.support.processes import proxy_group
from tests.support.proxy import Chat, ProxyClient

LONG = "A message of some length, so that there are blocks to hold. " * 12
PUBLISHING = {
    "kv_events_endpoint": "tcp://127.0.0.1:*",
    "kv_events_replay_endpoint": "tcp://127.0.0.1:*",
}
BLOCK = 16
SMALL = {"num_blocks": 160, "max_model_len": 160 * BLOCK}


async def add(fleet: Fleet, name: str, *, publishes: bool = True, **settings: Any) -> SimEngine:
    engine = await fleet.add(name, **{**(PUBLISHING if publishes else {}), **settings})
    if publishes:
        await fleet.until(lambda: is_heard(fleet, engine))
    return engine


def is_heard(at: ProxyClient, engine: SimEngine) -> bool:
    """The proxy has read all batches that the engine has published."""
    assert engine.events is not None
    streams = at.proxy.state.engine_caches.streams(WorkerId(engine.address))
    return [(one.expected or 0, one.is_behind) for one in streams] == [(engine.events._sequence, False)]


async def crowd(at: ProxyClient, engine: SimEngine, prompts: int) -> None:
    """Traffic of which the proxy knows nothing, as of another proxy."""
    for number in range(prompts):
        body = {"model": "sim", "messages": [{"role": "user", "content": f"{number} {LONG}"}], "max_tokens": 4}
        async with at.session.post(f"http://{engine.address}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200


async def talk(chat: Chat, turns: int) -> None:
    for number in range(turns):
        assert (await chat.say(f"{number} {LONG}")).status == 200


@pytest.mark.parametrize("publishes", [False, True])
async def test_what_other_traffic_evicts_is_not_claimed(start_fleet: Any, publishes: bool) -> None:
    async with start_fleet("P1") as fleet:
        engine = await add(fleet, "D1", publishes=publishes, **SMALL)
        chat = fleet.conversation()
        await talk(chat, 2)
        await crowd(fleet, engine, 8)
        if publishes:
            await fleet.until(lambda: is_heard(fleet, engine))
        turn = await chat.say("and now?")
        receipt = await fleet.receipt(turn)
        if publishes:
            assert (turn.route, receipt["estimated_cached_tokens"]) == ("SPLIT", 0)
        else:  # so the crowd is large enough to be noticed by events only
            assert turn.route == "LOCAL"
            assert receipt["cached_tokens"] < BLOCK < receipt["estimated_cached_tokens"]


async def test_what_a_worker_holds_by_events_is_what_it_finds(start_fleet: Any) -> None:
    async with start_fleet() as fleet:
        engines = [await add(fleet, name) for name in ("P1", "D1", "D2")]
        chats = [fleet.conversation() for _ in range(4)]
        for _ in range(4):
            for number, chat in enumerate(chats):
                for engine in engines:
                    await fleet.until(lambda engine=engine: is_heard(fleet, engine))
                turn = await chat.say(f"{number} {LONG}")
                receipt = await fleet.receipt(turn)
                if len(chat.messages) > 2:
                    assert (turn.route, receipt["cached_evidence"]) == ("LOCAL", "kv_events")
                    assert abs(receipt["estimated_cached_tokens"] - receipt["cached_tokens"]) <= BLOCK
        assert await fleet.metric('ppd_workers_on_kv_events{role="D"}') == 2
        assert await fleet.metric('ppd_kv_events_total{kind="stored",role="P"}') > 0


async def test_an_engine_that_starts_over_holds_nothing(start_fleet: Any) -> None:
    async with start_fleet("P1") as fleet:
        engine = await add(fleet, "D1")
        chat = fleet.conversation()
        await talk(chat, 2)
        engine.faults = Faults(restart_events=True)
        await crowd(fleet, engine, 1)
        await fleet.until(lambda: is_heard(fleet, engine))
        assert await fleet.metric('ppd_kv_event_gaps_total{result="restart"}') == 1
        turn = await chat.say("and now?")
        assert (turn.route, (await fleet.receipt(turn))["estimated_cached_tokens"]) == ("SPLIT", 0)


async def test_a_gap_that_stays_open_leaves_what_turns_told(start_fleet: Any) -> None:
    async with start_fleet("P1") as fleet:
        engine = await add(fleet, "D1", kv_events_replay_endpoint="")
        chat = fleet.conversation()
        await talk(chat, 2)
        engine.faults = Faults(lose_events=1)
        await crowd(fleet, engine, 2)
        await fleet.until(lambda: is_heard(fleet, engine))
        assert await fleet.metric('ppd_kv_event_gaps_total{result="open"}') == 1
        turn = await chat.say("and now?")
        assert (turn.route, (await fleet.receipt(turn))["cached_evidence"]) == ("LOCAL", "own_turns")


async def test_where_an_engine_publishes_is_learned_from_it(start_fleet: Any) -> None:
    async with start_fleet("P1") as fleet:
        engine = await fleet.start("D1", **PUBLISHING)
        await fleet.join("D1", engine, engine.address)
        await fleet.until(lambda: is_heard(fleet, engine))
        chat = fleet.conversation()
        await talk(chat, 1)
        await fleet.until(lambda: is_heard(fleet, engine))
        turn = await chat.say("and now?")
        assert (turn.route, (await fleet.receipt(turn))["cached_evidence"]) == ("LOCAL", "kv_events")


@pytest.mark.parametrize("publishes", [False, True])
async def test_engines_with_events_get_the_proxys_name_of_a_session(start_fleet: Any, publishes: bool) -> None:
    async with start_fleet() as fleet:
        for name in ("P1", "D1"):
            await add(fleet, name, publishes=publishes)
        chat = fleet.conversation(X_Session_Id="a client's")
        for text in ("one", "two"):
            assert (await chat.say(f"{text} {LONG}", session_id="a client's too")).status == 200
        legs = [leg for engine in fleet.engines.values() for leg in engine.received]
        named = {(leg.headers.get("X-Session-Id"), json.loads(leg.body)["session_id"]) for leg in legs}
        assert len(legs) == 3
        if publishes:
            ((header, member),) = named
            assert header == member
            assert header.startswith("ppd-")
        else:
            assert named == {("a client's", "a client's too")}


async def test_every_process_knows_what_engines_say() -> None:
    async with proxy_group("P1 D1", engine={**PUBLISHING, **SMALL}) as group:
        chat, engine = group.chat(), group.engines["D1"]
        for number in range(2):
            await chat.at(group.proxies[number], f"{number} {LONG}")
        for evicts in (False, True):
            if evicts:
                await crowd(group.proxies[0], engine, 8)
            await group.until(lambda: all(is_heard(one, engine) for one in group.proxies.values()))
            history = group.proxies[0].proxy.state.sessions.all()[0].history
            held = [
                one.proxy.state.engine_caches.held(WorkerId(engine.address), history) for one in group.proxies.values()
            ]
            assert held[0] == held[1]
            assert bool(held[0]) is not evicts
