"""A bad network between the proxy and its workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.network.fault_link import Conditions, FaultLink, Way
from ppd.proxy.config import Mode
from tests.support.fleet import has_work

LONG = "A message of some length, so that there are blocks to move. " * 20
HASTY = {"connect_timeout_s": 1.0, "prefill_timeout_s": 2.0, "first_event_timeout_s": 2.0, "idle_timeout_s": 2.0}
# Answers that are not streamed wait for answer_timeout_s, whatever the network does.
STREAMED = {"stream": True, "temperature": 0, "model": "sim"}


async def add_far(fleet: Any, names: str, conditions: Conditions | None = None, **changes: Any) -> dict[str, FaultLink]:
    """Engines that the proxy knows by the addresses of their links; side channels are near."""
    links = {}
    for seed, name in enumerate(names.split()):
        engine = await fleet.start(name, **changes)
        host, _, port = engine.address.partition(":")
        link = await fleet.stack.enter_async_context(FaultLink(host, int(port), conditions=conditions, seed=seed))
        engine.address = link.address
        links[name] = link
        await fleet.join(name, engine, link.address)
    return links


def at_rest(fleet: Any) -> bool:
    """`idle`, but for handoffs whose D was cut off: they wait for the end of their leases."""
    busy = any(map(has_work, fleet.proxy.state.registry.views()))
    return not busy and not any(engine.scheduler.sequences for engine in fleet.engines.values())


def events(body: str) -> list[Any]:
    lines = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def text_of(body: str) -> str:
    chunks = [event for event in events(body) if event != "[DONE]"]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


async def stream(fleet: Any, messages: list[Any], **fields: Any) -> tuple[Mapping[str, str], str]:
    body = {**STREAMED, "messages": messages, "max_tokens": 24, **fields}
    async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return answer.headers, await answer.text()


async def streamed_talk(fleet: Any, opening: str, turns: int) -> list[Any]:
    messages: list[Any] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{opening} {turn} {LONG}"})
        _, body = await stream(fleet, messages)
        assert events(body)[-1] == "[DONE]"
        messages.append({"role": "assistant", "content": text_of(body)})
    return messages


@pytest.mark.parametrize(
    "conditions",
    [
        Conditions(latency_s=0.005),
        Conditions(latency_s=0.01, jitter_s=0.02),
        Conditions(loss=0.05, retransmission_s=0.02),
        Conditions(latency_s=0.001, bandwidth_bps=2e5),
    ],
    ids=["latency", "jitter", "loss", "bandwidth"],
)
@pytest.mark.parametrize("mode", [Mode.ALWAYS_LOCAL, Mode.ALWAYS_SPLIT])
async def test_a_slow_network_changes_no_text(start_fleet: Any, mode: Mode, conditions: Conditions) -> None:
    async with start_fleet("R1", mode=Mode.REPLICA) as near, start_fleet("", mode=mode) as fleet:
        await add_far(fleet, "P1 D1 D2", conditions)
        openings = [f"talk {n}" for n in range(4)]
        far = await asyncio.gather(*(streamed_talk(fleet, opening, 3) for opening in openings))
        assert far == await asyncio.gather(*(streamed_talk(near, opening, 3) for opening in openings))
        await fleet.until(fleet.idle)
        assert not any(engine.counters.traps for engine in fleet.engines.values())


@pytest.mark.parametrize("ways", [(), (Way.BACK,)], ids=["both", "back"])
async def test_a_partition_in_the_middle_of_a_stream_ends_it_with_an_error(
    start_fleet: Any, ways: tuple[Way, ...]
) -> None:
    async with start_fleet("", **HASTY) as fleet:
        links = await add_far(fleet, "D1", time_scale=1.0)
        body = {**STREAMED, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20_000, "ignore_eos": True}
        async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            begun = (await answer.content.readline()).decode()
            await links["D1"].partition(*ways)
            async with asyncio.timeout(60):
                rest = events(begun + await answer.text())
        assert "error" in rest[-1]
        assert all("choices" in event for event in rest[:-1])
        links["D1"].heal()
        await fleet.until(fleet.idle)
        assert fleet.engines["D1"].counters.finished == {"abort": 1}


@pytest.mark.parametrize("accepts", [True, False], ids=["silent", "no-syn"])
@pytest.mark.parametrize("name", ["P1", "D1"])
async def test_a_partition_before_the_answer_is_another_workers_turn(
    start_fleet: Any, name: str, accepts: bool
) -> None:
    async with start_fleet("", probe_interval_s=60, **HASTY) as fleet:
        links = await add_far(fleet, "P1 P2 D1 D2")
        await streamed_talk(fleet, "before", 1)  # so that connections are in the pool
        await links[name].partition(accepts=accepts)
        for n in range(6):
            headers, body = await stream(fleet, [{"role": "user", "content": f"{n} {LONG}"}])
            assert events(body)[-1] == "[DONE]"
            assert headers["X-PPD-Prefill" if name == "P1" else "X-PPD-Decode"] != name
        links[name].heal()
        await fleet.until(lambda: at_rest(fleet))


async def test_a_session_whose_d_is_cut_off_goes_on_elsewhere_and_its_text_is_right(start_fleet: Any) -> None:
    async with start_fleet("R1", mode=Mode.REPLICA) as near, start_fleet("", **HASTY) as fleet:
        links = await add_far(fleet, "P1 D1 D2")
        messages = await streamed_talk(fleet, "talk", 2)
        used = next(name for name in ("D1", "D2") if fleet.engines[name].received)
        await links[used].partition()
        messages.append({"role": "user", "content": "and on"})
        headers, body = await stream(fleet, messages)
        assert headers["X-PPD-Decode"] != used
        assert text_of(body) == text_of((await stream(near, messages))[1])


async def test_a_worker_that_was_cut_off_comes_back_by_itself(start_fleet: Any) -> None:
    async with start_fleet("", warm_up_s=0.2, breaker_open_s=0.2, **HASTY) as fleet:
        links = await add_far(fleet, "D1 D2")
        await links["D1"].partition()
        await fleet.until(lambda: fleet.state("D1") != "up")
        links["D1"].heal()
        await fleet.until(lambda: fleet.state("D1") == "up")
        before = len(fleet.engines["D1"].received)
        served_by: list[str] = []
        async with asyncio.timeout(60):
            while "D1" not in served_by:
                headers, _ = await stream(fleet, [{"role": "user", "content": f"{len(served_by)} {LONG}"}])
                served_by.append(headers["X-PPD-Decode"])
        assert len(fleet.engines["D1"].received) > before


async def test_connections_that_were_reset_in_the_pool_cost_no_turn(start_fleet: Any) -> None:
    async with start_fleet("", **HASTY) as fleet:
        links = await add_far(fleet, "P1 D1")
        chat = fleet.conversation()
        for _ in range(5):
            turn = await chat.say(LONG)
            assert turn.status == 200
            for link in links.values():
                link.reset()


async def test_a_storm_of_resets_costs_streams_but_makes_no_text_wrong(start_fleet: Any) -> None:
    async with start_fleet("R1", mode=Mode.REPLICA) as near, start_fleet("", breaker_open_s=0.1, **HASTY) as fleet:
        links = await add_far(fleet, "P1 D1 D2", time_scale=0.2)

        async def storm() -> None:
            while True:
                await asyncio.sleep(0.2)
                for link in links.values():
                    link.reset()

        async def ask(number: int) -> bool:
            """Whether the answer was whole."""
            messages = [{"role": "user", "content": f"{number} {LONG}"}]
            body = {**STREAMED, "max_tokens": 100, "messages": messages}
            async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as answer:
                if answer.status != 200:
                    return False
                *heard, last = events(await answer.text())
            assert last == "[DONE]" or "error" in last
            said = "".join(choice["delta"].get("content", "") for event in heard for choice in event["choices"])
            right = text_of((await stream(near, messages, max_tokens=100))[1])
            assert said == right if last == "[DONE]" else right.startswith(said)
            return bool(last == "[DONE]")

        storming = asyncio.create_task(storm())
        whole = [await ask(number) for number in range(15)]
        storming.cancel()
        assert not all(whole)
        async with asyncio.timeout(60):
            while not await ask(99):
                await asyncio.sleep(0.05)
        await fleet.until(lambda: at_rest(fleet))


async def test_a_decode_leg_that_breaks_off_after_its_pull_is_not_sent_again_with_its_handoff(start_fleet: Any) -> None:
    async with start_fleet("", mode=Mode.ALWAYS_SPLIT) as fleet:
        links = await add_far(fleet, "P1 D1", time_scale=0.2)
        p, d = fleet.engines["P1"], fleet.engines["D1"]
        assert (await fleet.conversation().say("so that a connection is kept")).status == 200
        asking = asyncio.create_task(fleet.conversation().say(LONG, max_tokens=400, ignore_eos=True))
        await fleet.until(lambda: p.counters.handoffs == 2 and p.pinned == 0 and d.scheduler.running == 1)
        links["D1"].reset()
        assert (await asking).status == 502, "there is no other D"
        assert not p.counters.traps
