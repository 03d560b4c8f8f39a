"""Workers that fail, leave or hang, and clients that do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
import pytest

from ppd.proxy.config import Mode, StageOrder
from ppd.servers.sim.core.fault_orders import Faults
from tests.servers.sidecar.sidecars import StrictFleet
from tests.support.fleet import Fleet

LONG = "A message of some length, so that there are blocks to move. " * 20


@pytest.fixture(params=[*StageOrder, "sidecars"])
def start_fleet(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Whichever worker of a SPLIT is chosen first; and by way of D's sidecars."""
    if request.param == "sidecars":
        return partial(StrictFleet.of, order=StageOrder.DECODE_FIRST)
    return partial(Fleet.of, order=request.param)


async def test_a_failing_p_is_replaced_by_another(start_fleet: Any) -> None:
    async with start_fleet("P1 P2 D1") as fleet:
        for name in ("P1", "P2"):
            fleet.engines[name].faults = Faults(refuse=1, refuse_status=500)
        fleet.engines["P2"].faults = Faults()
        fleet.engines["P1"].faults = Faults(refuse=100, refuse_status=500)
        turns = [await fleet.conversation().say(f"{n} {LONG}") for n in range(16)]
        assert {turn.status for turn in turns} == {200}
        assert {turn.headers["X-PPD-Prefill"] for turn in turns} == {"P2"}
        asked = len(fleet.engines["P1"].received)
        assert asked, "it was asked first at least once"
        assert await fleet.metric('ppd_leg_failures_total{cause="5xx",leg="prefill",phase="headers"}') == asked
        await fleet.until(fleet.idle)


@pytest.mark.parametrize(("names", "route"), [("P1 D1", "LOCAL"), ("P1 D1 R1", "REPLICA")])
async def test_with_every_p_failing_another_route_answers(start_fleet: Any, names: str, route: str) -> None:
    async with start_fleet(names) as fleet:
        fleet.engines["P1"].faults = Faults(refuse=100, refuse_status=500)
        turn = await fleet.conversation().say(LONG)
        assert (turn.status, turn.route, turn.reason) == (200, route, "no_prefill_worker")


async def test_a_failing_d_is_replaced_and_its_handoff_is_not_used_again(start_fleet: Any) -> None:
    async with start_fleet("P1 D1 D2") as fleet:
        fleet.engines["D1"].faults = Faults(refuse=100, refuse_status=503)
        turns = [await fleet.conversation().say(f"{n} {LONG}") for n in range(16)]
        assert {turn.status for turn in turns} == {200}
        assert {turn.headers["X-PPD-Decode"] for turn in turns} == {"D2"}
        refused = [json.loads(r.body)["kv_transfer_params"]["remote_request_id"] for r in fleet.engines["D1"].received]
        used = [json.loads(r.body)["kv_transfer_params"]["remote_request_id"] for r in fleet.engines["D2"].received]
        assert refused and not set(refused) & set(used)
        assert not any(engine.counters.traps for engine in fleet.engines.values())


@pytest.mark.parametrize("fault", [Faults(cut=1, cut_after_events=0), Faults(garbage=1)], ids=["cut", "garbage"])
async def test_an_answer_that_is_none_is_no_answer(start_fleet: Any, fault: Faults) -> None:
    async with start_fleet("P1 D1") as fleet:
        fleet.engines["P1"].faults = fault
        turn = await fleet.conversation().say(LONG)
        assert turn.status == 200
        assert turn.text


async def test_a_request_error_of_the_worker_reaches_the_client_unchanged(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", engine={"max_model_len": 64}) as fleet:
        turn = await fleet.conversation().say(LONG)
        assert turn.status == 400
        assert turn.body["error"]["type"] == "BadRequestError"
        assert turn.headers["X-Request-Id"]
        assert len(fleet.engines["P1"].received) == 1
        assert not fleet.engines["D1"].received, "a client's own mistake is not tried elsewhere"


@pytest.mark.parametrize(("status", "seen"), [(503, 503), (429, 429), (500, 502)])
async def test_when_nobody_answers_the_client_hears_of_it(start_fleet: Any, status: int, seen: int) -> None:
    """A worker that is busy is waited for in the queue, one that is broken is not."""
    async with start_fleet("D1", queue_timeout_s=0.5) as fleet:
        fleet.engines["D1"].faults = Faults(refuse=100, refuse_status=status)
        turn = await fleet.conversation().say(LONG)
        assert turn.status == seen
        assert ("Retry-After" in turn.headers) == (seen != 502)
        assert (await fleet.receipt(turn))["outcome"] == "failed"


async def test_no_worker_at_all_is_a_503_in_openais_shape(start_fleet: Any) -> None:
    async with start_fleet("") as fleet:
        turn = await fleet.conversation().say("hi")
        assert turn.status == 503
        assert (turn.headers["X-PPD-Refused"], turn.headers["Retry-After"]) == ("no_worker", "1")
        assert turn.body["error"]["type"] == "service_unavailable_error"


async def test_a_worker_that_does_not_answer_in_time_is_given_up(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", prefill_timeout_s=0.2, connect_timeout_s=0.2) as fleet:
        fleet.engines["P1"].faults = Faults(hang=1)
        turn = await fleet.conversation().say(LONG)
        assert (turn.status, turn.reason) == (200, "no_prefill_worker")


async def test_a_broken_stream_ends_with_an_error_and_no_done(start_fleet: Any) -> None:
    async with start_fleet("D1") as fleet:
        fleet.engines["D1"].faults = Faults(cut=1, cut_after_events=3)
        body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 24, "stream": True}
        async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
            text = await response.text()
        assert '"error"' in text.rstrip().split("\n\n")[-1]
        assert "[DONE]" not in text
        await fleet.until(fleet.idle)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    ("names", "mode"),
    [("P1 D1", Mode.ALWAYS_SPLIT), ("D1", Mode.ALWAYS_LOCAL), ("R1", Mode.REPLICA)],
    ids=["split", "local", "replica"],
)
async def test_a_client_that_leaves_while_d_answers_ends_the_leg(
    start_fleet: Any, names: str, mode: Mode, streams: bool
) -> None:
    async with start_fleet(names, engine={"time_scale": 1.0}, mode=mode) as fleet:
        engine = fleet.engines[names.rsplit(maxsplit=1)[-1]]
        body = {
            "model": "sim",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 20_000,
            "stream": streams,
        }
        asking = asyncio.create_task(fleet.post("/v1/chat/completions", {**body, "ignore_eos": True}))
        await fleet.until(lambda: engine.counters.generation_tokens > 2)
        asking.cancel()
        await fleet.until(fleet.idle)
        assert engine.counters.finished["abort"] == 1


async def test_a_client_that_leaves_during_prefill_ends_that_leg_and_starts_no_other(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", engine={"time_scale": 40.0}) as fleet:
        p = fleet.engines["P1"]
        asking = asyncio.create_task(fleet.conversation().say(LONG))
        await fleet.until(lambda: bool(list(p.scheduler.sequences)))
        asking.cancel()
        await fleet.until(fleet.idle)
        assert p.counters.finished["abort"] == 1
        assert not fleet.engines["D1"].received
        assert (await fleet.admin("GET", "/requests"))[1]["newest"][0]["outcome"] == "cancelled"


async def test_a_cancelled_turn_teaches_nothing(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", engine={"time_scale": 1.0}) as fleet:
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "sim", "messages": messages, "max_tokens": 20_000, "stream": True, "ignore_eos": True}
        async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as response:
            await response.content.readany()
            response.close()
        await fleet.until(fleet.idle)
        assert len(fleet.proxy.state.sessions) == 0


async def test_a_d_that_came_back_without_its_cache_is_not_believed_to_hold_anything(start_fleet: Any) -> None:
    async with start_fleet("P1 D1") as fleet:
        chat = fleet.conversation()
        await chat.say(LONG)
        registry = fleet.proxy.state.registry
        (d,) = [view for view in registry.views() if view.name == "D1"]
        registry.probed(d.id, d.worker.__class__(role=d.role, address=d.worker.address, incarnation="new"), d.load, 0.0)
        turn = await chat.say("and on")
        assert turn.status == 200
        assert (turn.route, turn.reason) == ("SPLIT", "decode_restarted")


async def test_a_killed_p_leaves_conversations_working(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", mode=Mode.ALWAYS_SPLIT) as fleet:
        chat = fleet.conversation()
        assert (await chat.say(LONG)).route == "SPLIT"
        p = next(view for view in fleet.proxy.state.registry.views() if view.name == "P1")
        fleet.engines["P1"].is_dead = True
        turn = await chat.say("and on")
        assert turn.status == 200
        assert turn.route in ("LOCAL", "REPLICA")
        assert p.id


async def test_a_client_gone_before_its_body_is_whole_costs_nothing(start_fleet: Any) -> None:
    async with start_fleet("D1") as fleet:
        port = int(fleet.base_url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.close()
        async with aiohttp.ClientSession() as session, session.get(f"{fleet.base_url}/health") as response:
            assert response.status == 200
        assert not fleet.engines["D1"].received
