"""More turns than there is room for: who waits, who is served next, who is turned away, and that nothing is left."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ppd.proxy.admission.queue import Ticket
from ppd.proxy.config import Mode
from ppd.proxy.fleet.worker import Role
from ppd.servers.sim.core.fault_orders import FaultKind, Faults, Order
from tests.support.credentials import bearer, client, write_keys
from tests.support.proxy import Turn

SLOW = {"time_scale": 1.0}
ONE = {"mode": Mode.REPLICA, "max_worker_inflight": 1}
HELLO = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
GAUGES = (
    "ppd_inflight_turns",
    "ppd_queued_turns",
    "ppd_handoffs_outstanding",
    *(f'ppd_{name}{{role="{role}"}}' for name in ("inflight_legs", "queued_prefill_tokens") for role in "PDR"),
)


@asynccontextmanager
async def occupied(fleet: Any, **headers: str) -> AsyncIterator[None]:
    """A turn that lasts holds a place; at the end its client leaves."""
    body = {"model": "sim", "messages": [{"role": "user", "content": "hold"}], "stream": True, "ignore_eos": True}
    async with fleet.session.post(
        f"{fleet.base_url}/v1/chat/completions", json={**body, "max_tokens": 20_000}, headers=headers
    ) as response:
        assert response.status == 200
        await response.content.readany()
        yield
        response.close()


async def queued(fleet: Any, text: str, headers: dict[str, str] | None = None, **body: Any) -> asyncio.Task[Turn]:
    """A turn that waits by now."""
    receipts = fleet.proxy.state.receipts
    known = len(receipts.newest(100))
    task = asyncio.create_task(fleet.chat([{"role": "user", "content": text}], headers, **{"max_tokens": 2, **body}))
    await fleet.until(lambda: len(receipts.newest(100)) > known)
    return task


def asked(fleet: Any, name: str = "R1") -> list[str]:
    """What the engine was asked, in order."""
    return [json.loads(one.body)["messages"][0]["content"] for one in fleet.engines[name].received]


async def at_rest(fleet: Any) -> bool:
    await fleet.until(fleet.idle)
    return [await fleet.metric(name) for name in GAUGES] == [0.0] * len(GAUGES)


def refusal(turn: Turn) -> tuple[int, str, str]:
    assert int(turn.headers["Retry-After"]) >= 1
    assert turn.body["error"]["code"] == turn.headers["X-PPD-Refused"]
    return turn.status, turn.headers["X-PPD-Refused"], turn.body["error"]["type"]


@pytest.mark.parametrize("names", ["R1", "P1 D1", "P1 D1 D2"])
async def test_turns_wait_for_their_place_and_are_all_answered(start_fleet: Any, names: str) -> None:
    async with start_fleet(names, engine={"time_scale": 0.1}, max_worker_inflight=1) as fleet:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                views = fleet.proxy.state.registry.views()
                most = max(most, *(view.inflight for view in views if view.role is not Role.PREFILL))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        turns = await asyncio.gather(*(fleet.conversation().say(f"{n} says hello") for n in range(12)))
        watching.cancel()
        assert {turn.status for turn in turns} == {200}
        assert most == 1
        assert await fleet.metric("ppd_queue_wait_seconds_count") >= 9
        assert await at_rest(fleet)


@pytest.mark.parametrize("names", ["R1", "P1 D1"])
@pytest.mark.parametrize("streams", [True, False])
async def test_who_is_woken_by_a_permit_finds_the_workers_place_free_too(
    start_fleet: Any, names: str, streams: bool
) -> None:
    async with start_fleet(names) as fleet:
        admission, seen = fleet.proxy.state.admission, set[tuple[int, int]]()

        def look() -> bool:
            seen.add((admission.inside, sum(view.inflight for view in fleet.proxy.state.registry.views())))
            return False

        waiting = asyncio.create_task(admission.enter(Ticket(tenant="", arrived_s=fleet.proxy.state.now(), fits=look)))
        url, body = f"{fleet.base_url}/v1/chat/completions", {**HELLO, "stream": streams}
        async with fleet.session.post(url, json=body) as response:
            assert await response.read()
        await fleet.until(lambda: (0, 0) in seen)
        waiting.cancel()
        assert not [counts for counts in seen if counts[0] == 0 < counts[1]]


@pytest.mark.parametrize(
    ("names", "bound"), [("R1", {"max_worker_inflight": 1}), ("R1 R2", {"max_inflight": 1})], ids=["worker", "total"]
)
async def test_a_full_queue_refuses_the_next_and_keeps_those_that_wait(
    start_fleet: Any, names: str, bound: dict[str, int]
) -> None:
    async with start_fleet(names, engine=SLOW, mode=Mode.REPLICA, queue_limit=2, **bound) as fleet:
        async with occupied(fleet):
            waiting = [await queued(fleet, text) for text in ("one", "two")]
            assert refusal(await fleet.conversation().say("three")) == (503, "queue_full", "overloaded_error")
            assert await fleet.metric('ppd_refused_total{reason="queue_full"}') == 1
            assert await fleet.metric("ppd_queued_turns") == 2
            assert await fleet.metric("ppd_inflight_turns") == 1
        assert [turn.status for turn in await asyncio.gather(*waiting)] == [200, 200]
        assert await at_rest(fleet)


async def test_who_waits_too_long_is_told_when_to_come_back(start_fleet: Any) -> None:
    async with start_fleet("R1", engine=SLOW, queue_timeout_s=0.1, **ONE) as fleet:
        async with occupied(fleet):
            turn = await fleet.conversation().say("in vain")
            assert refusal(turn) == (503, "queue_timeout", "overloaded_error")
            assert (await fleet.receipt(turn))["outcome"] == "failed"
        assert asked(fleet) == ["hold"]
        assert (await fleet.conversation().say("at last")).status == 200
        assert await at_rest(fleet)


async def test_pass_through_waits_and_is_refused_as_turns_are(start_fleet: Any) -> None:
    async with start_fleet("R1", engine=SLOW, queue_timeout_s=0.1, **ONE) as fleet:
        body = {"model": "sim", "input": "x"}
        async with occupied(fleet):
            assert refusal(await fleet.post("/v1/embeddings", body))[:2] == (503, "queue_timeout")
        await fleet.until(fleet.idle)
        assert (await fleet.post("/v1/embeddings", body)).status == 200
        assert await at_rest(fleet)


async def test_better_classes_are_served_first_and_a_key_bounds_what_may_be_asked(
    start_fleet: Any, tmp_path: Path
) -> None:
    clients = (client("late", priority=5), client("usual"), client("soon", priority=-5))
    keys = write_keys(tmp_path / "keys.toml", *clients)
    async with start_fleet("R1", engine=SLOW, keys_file=keys, **ONE) as fleet:
        async with occupied(fleet, **bearer("usual")):
            waiting = [
                await queued(fleet, "later", bearer("late")),
                await queued(fleet, "vain", bearer("late"), priority=0),
                await queued(fleet, "modest", bearer("usual"), priority=9),
                await queued(fleet, "usual", bearer("usual")),
                await queued(fleet, "soon", bearer("soon")),
            ]
        await asyncio.gather(*waiting)
        assert asked(fleet) == ["hold", "soon", "usual", "later", "vain", "modest"]
        told = [json.loads(one.body).get("priority") for one in fleet.engines["R1"].received]
        assert told == [None, None, None, None, 5, 9], "an engine sees no better class than the key's"


async def test_a_tenants_flood_does_not_starve_another(start_fleet: Any, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", client("flood"), client("calm"))
    async with start_fleet("R1", engine={"time_scale": 0.5}, queue_limit=10, keys_file=keys, **ONE) as fleet:
        async with occupied(fleet, **bearer("flood")):
            floods = [await queued(fleet, f"flood {n}", bearer("flood")) for n in range(10)]
            calm = [await queued(fleet, f"calm {n}", bearer("calm")) for n in range(2)]
        await asyncio.gather(*calm)
        order = asked(fleet)
        assert order.index("calm 0") <= 2
        assert order.index("calm 1") <= 4
        turns = await asyncio.gather(*floods)
        # The queue was full: the flood's own youngest made room for the calm ones.
        assert sorted(turn.status for turn in turns) == [200] * 8 + [503] * 2
        assert [turn.status for turn in turns[8:]] == [503, 503]
        assert {turn.headers["X-PPD-Refused"] for turn in turns[8:]} == {"queue_full"}
        assert await at_rest(fleet)


async def test_a_client_that_leaves_the_queue_leaves_nothing_there(start_fleet: Any) -> None:
    async with start_fleet("R1", engine=SLOW, **ONE) as fleet:
        async with occupied(fleet):
            leaving = await queued(fleet, "gone")
            staying = await queued(fleet, "stays")
            leaving.cancel()
            await fleet.until(lambda: fleet.proxy.state.admission.waiting == 1)
            newest = (await fleet.admin("GET", "/requests"))[1]["newest"]
            assert [one["outcome"] for one in newest] == ["running", "cancelled", "running"]
        assert (await staying).status == 200
        assert asked(fleet) == ["hold", "stays"]
        assert await at_rest(fleet)


async def test_a_drain_answers_all_that_wait_and_lets_those_inside_end(start_fleet: Any) -> None:
    async with start_fleet("R1", engine=SLOW, **ONE) as fleet:
        inside = asyncio.create_task(fleet.conversation().say("inside"))
        await fleet.until(lambda: fleet.proxy.state.admission.inside == 1)
        waiting = [await queued(fleet, text) for text in ("one", "two")]
        fleet.proxy.drain.begin()
        refusals = {refusal(turn) for turn in await asyncio.gather(*waiting)}
        assert refusals == {(503, "draining", "overloaded_error")}
        assert refusal(await fleet.conversation().say("late"))[:2] == (503, "draining")
        assert (await inside).status == 200
        assert await at_rest(fleet)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("names", ["R1", "P1 D1"])
async def test_a_turn_waits_for_overloaded_workers_and_succeeds_when_they_recover(
    start_fleet: Any, names: str, status: int
) -> None:
    async with start_fleet(names) as fleet:
        name = names.rsplit(maxsplit=1)[-1]
        overload = Order(FaultKind.ERROR, status=status, retry_after_s=1)
        fleet.engines[name].faults = Faults([overload])
        turn = await fleet.conversation().say("hello there, I can wait")
        assert turn.status == 200
        assert len(fleet.engines[name].received) == 2, "asked again once, when it had said"
        assert not fleet.proxy.state.health.breakers.states(fleet.proxy.state.now())
        if names == "R1":  # with a P, the hand-over that D refused lies there until its lease ends
            assert await at_rest(fleet)


async def test_overload_longer_than_anybody_may_wait_is_the_clients_to_know(start_fleet: Any) -> None:
    async with start_fleet("R1 R2", mode=Mode.REPLICA, queue_timeout_s=5.0) as fleet:
        for name, seconds in (("R1", 40), ("R2", 30)):
            fleet.engines[name].faults = Faults([Order(FaultKind.ERROR, status=429, retry_after_s=seconds, times=100)])
        turn = await fleet.conversation().say("hello")
        assert refusal(turn) == (429, "workers_overloaded", "overloaded_error"), "as all of them say"
        assert 39 <= int(turn.headers["Retry-After"]) <= 40, "when the last of them is back"
        assert [len(engine.received) for engine in fleet.engines.values()] == [1, 1]
        assert await at_rest(fleet)


async def test_a_worker_that_is_overloaded_is_spared_while_another_serves(
    start_fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with start_fleet("R1 R2", mode=Mode.REPLICA) as fleet:
        await fleet.until(lambda: caplog.text.count(": up") == 2)  # workers that come are not held to what was before
        fleet.engines["R1"].faults = Faults([Order(FaultKind.ERROR, status=503, retry_after_s=60, times=100)])
        turns = [await fleet.conversation().say(f"{n} says hello") for n in range(12)]
        assert {turn.status for turn in turns} == {200}
        assert len(fleet.engines["R1"].received) == 1
        assert not fleet.proxy.state.health.breakers.states(fleet.proxy.state.now())


async def test_prompts_of_a_list_share_one_place_without_locking_up(start_fleet: Any) -> None:
    async with start_fleet("R1", engine={"time_scale": 0.1}, max_inflight=1, mode=Mode.REPLICA) as fleet:
        body = {"model": "sim", "prompt": [f"{n} times" for n in range(12)], "max_tokens": 2}
        turns = await asyncio.gather(*(fleet.post("/v1/completions", {**body, "stream": n > 3}) for n in range(4)))
        assert [len(turn.body["choices"]) for turn in turns] == [12] * 4
        assert await at_rest(fleet)
