"""Encoders that fail, are gone, drain, or whose client leaves: no turn fails for it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ppd.proxy.config import Mode
from ppd.servers.sim.core.fault_orders import FaultKind, Faults, Order
from tests.e2e.encoders.test_encoders import ALWAYS, asks, decisions, legs, picture, talk
from tests.support.credentials import bearer, client, write_keys
from tests.support.fleet import Fleet
from tests.support.scripted_workers import odd_worker

FAULTS: dict[str, dict[str, Any]] = {
    "an error": {"kind": "error", "phase": "request", "status": 500},
    "no JSON": {"kind": "body", "phase": "request", "body": "?"},
    "a reset": {"kind": "reset", "phase": "request", "times": 2},  # over an old connection it is sent again
    "its death": {"kind": "kill", "phase": "request"},
    "its slowness": {"kind": "slow", "phase": "head", "delay_s": 60},
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failing_encoder_is_no_error(fault: str) -> None:
    async with Fleet.of("R1") as alone:
        expected = await talk(alone, picture(1), picture(2))
    settings = {**ALWAYS, "encoder_timeout_s": 0.3 if "slow" in fault else 10.0}
    async with Fleet.of("E1 P1 D1", engine={"allow_faults": True}, mode=Mode.ALWAYS_SPLIT, **settings) as fleet:
        order = {"orders": [{"times": 1, **FAULTS[fault]}]}
        async with fleet.session.post(f"http://{fleet.engines['E1'].address}/faults", json=order) as ordered:
            assert ordered.status == 200, await ordered.text()
        assert await talk(fleet, picture(1), picture(2)) == expected
        assert fleet.engines["P1"].counters.encoded_items >= 1
        assert await fleet.metric('ppd_encoder_items_total{decision="failed"}') >= 1


async def test_a_turn_that_is_tried_twice_counts_its_items_once() -> None:
    async with Fleet.of("E1 R1 R2", **ALWAYS) as fleet:
        fleet.engines["R1"].faults = fleet.engines["R2"].faults = Faults(refuse=1, refuse_status=500)
        turn = await fleet.chat([{"role": "user", "content": asks(picture(1))}])
        record = (await fleet.receipt(turn))["encoder"]
        assert (turn.status, record["items"], len(record["legs"])) == (200, ["image: encoded"], 2)
        assert await fleet.metric('ppd_encoder_items_total{decision="encoded"}') == 1


async def test_an_encoder_that_is_gone_or_drains_is_not_asked_until_it_is_back() -> None:
    async with Fleet.of("E1 R1", **ALWAYS) as fleet:
        say = [{"role": "user", "content": asks(picture(1))}]
        await fleet.admin("PATCH", "/workers/E1", {"draining": True})
        assert await decisions(fleet, await fleet.chat(say)) == ["image: absent"]
        await fleet.admin("PATCH", "/workers/E1", {"draining": False})
        assert await decisions(fleet, await fleet.chat(say)) == ["image: encoded"]
        await fleet.kill("E1")
        (failed,) = await decisions(fleet, await fleet.chat(say))
        assert failed in ("image: failed", "image: absent")
        assert await decisions(fleet, await fleet.chat(say)) == ["image: absent"]  # its breaker is open, or it is down
        await fleet.start_again("E1")
        await fleet.until(lambda: fleet.state("E1") == "up")
        async with asyncio.timeout(60):
            while await decisions(fleet, await fleet.chat(say)) != ["image: encoded"]:
                await asyncio.sleep(0.05)


async def test_an_encoder_that_fails_again_and_again_is_not_asked_until_its_breaker_lets_a_turn_try_it() -> None:
    async with Fleet.of("E1 R1", breaker_failures=2, breaker_open_s=2.0, **ALWAYS) as fleet:
        say = [{"role": "user", "content": asks(picture(1))}]
        fleet.engines["E1"].faults = Faults(refuse=2, refuse_status=500)
        told = [await decisions(fleet, await fleet.chat(say)) for _ in range(3)]
        assert told == [["image: failed"], ["image: failed"], ["image: absent"]]
        assert len(legs(fleet.engines["E1"])) == 2, "the third was not asked"
        async with asyncio.timeout(30):
            while await decisions(fleet, await fleet.chat(say)) != ["image: encoded"]:
                await asyncio.sleep(0.05)
        assert len(legs(fleet.engines["E1"])) == 3, "the first that asked has closed it"
        assert await decisions(fleet, await fleet.chat(say)) == ["image: encoded"]


async def test_a_client_that_leaves_ends_the_encoders_legs_and_has_used_them(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", client("one", tokens_per_minute=10_000))
    async with Fleet.of("R1", keys_file=keys, **ALWAYS) as fleet:
        engine = await fleet.add("E1", time_scale=1.0, encoder_item_s=60.0)
        body = {"model": "sim", "messages": [{"role": "user", "content": asks(picture(1))}]}
        asking = asyncio.create_task(fleet.post("/v1/chat/completions", body, bearer("one")))
        await fleet.until(lambda: engine.encoder.running == 1)
        asking.cancel()
        await fleet.until(lambda: engine.encoder.running == 0)
        await fleet.until(fleet.idle)
        assert not fleet.engines["R1"].received
        (receipt,) = fleet.proxy.state.receipts.newest(1)
        assert (receipt.outcome, receipt.legs) == ("cancelled", [])
        assert receipt.encoder is not None and receipt.encoder.items == []
        assert [(leg.worker, leg.ended_s is not None) for leg in receipt.encoder.legs] == [("E1", True)]
        ((_, _, full_s),) = fleet.proxy.state.rate_limits.debts()
        assert full_s > fleet.proxy.state.now(), "its key has paid for the prompt"


async def test_an_image_that_kills_an_encoder_kills_one_other_worker_at_most() -> None:
    """Its prompt has then ended two, however many are left."""
    settings = {"breaker_open_s": 60.0, "queue_timeout_s": 5.0, "engine": {"allow_faults": True}, **ALWAYS}
    async with Fleet.of("E1 E2 R1 R2", **settings) as fleet:
        for engine in fleet.engines.values():
            engine.faults = Faults([Order(FaultKind.KILL)])
        say = [{"role": "user", "content": asks(picture(1))}]
        codes = [(turn.status, turn.body["error"]["code"]) for turn in [await fleet.chat(say) for _ in range(2)]]
        assert codes == [(502, "workers_lost"), (503, "poisoned_prompt")]
        assert sorted(name[0] for name, engine in fleet.engines.items() if engine.is_dead) == ["E", "R"]


async def test_encoders_that_die_are_no_reason_to_refuse_what_a_worker_answers() -> None:
    async with Fleet.of("E1 E2 R1", engine={"allow_faults": True}, **ALWAYS) as fleet:
        for name in ("E1", "E2"):
            fleet.engines[name].faults = Faults([Order(FaultKind.KILL)])
        turn = await fleet.chat([{"role": "user", "content": [*asks(picture(1)), *asks(picture(2))]}])
        assert (turn.status, await decisions(fleet, turn)) == (200, ["image: failed", "image: failed"])
        assert [fleet.engines[name].is_dead for name in ("E1", "E2", "R1")] == [True, True, False]
        assert len(fleet.proxy.state.poisoned.suspects) == 0


SENSITIVE: dict[str, Any] = {"breaker_failures": 1, "mode": Mode.REPLICA, **ALWAYS}
ANSWER = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}


async def fetches(request: web.Request) -> web.Response:
    """As vLLM, which answers 500 to a URL that it cannot fetch, and at last to one that does not answer."""
    body = await request.text()
    if "silent.invalid" in body:
        await asyncio.sleep(60)
    return web.json_response(ANSWER, status=500 if ".invalid" in body else 200)


async def breaks(request: web.Request) -> web.Response:
    return web.json_response({}, status=500)


def avoided(fleet: Fleet) -> int:
    """Workers whose breakers are not closed."""
    state = fleet.proxy.state
    return len(state.health.breakers.states(state.now()))


@pytest.mark.parametrize("host", ["gone", "silent"])
async def test_a_url_that_no_engine_can_fetch_is_held_against_none(host: str) -> None:
    """Three of them would have put the fleet out of use for all."""
    waits: dict[str, Any] = {"encoder_timeout_s": 0.2, "answer_timeout_s": 0.4} if host == "silent" else {}
    async with (
        Fleet.of("", breaker_failures=1, mode=Mode.REPLICA, **waits, **ALWAYS) as fleet,
        AsyncExitStack() as stack,
    ):
        for role in ("E", "R", "R"):
            await stack.enter_async_context(odd_worker(fleet, fetches, role))
        turn = await fleet.chat([{"role": "user", "content": asks(f"http://{host}.invalid/a.png")}])
        assert (turn.status >= 500, await decisions(fleet, turn)) == (True, ["image: failed"])
        assert avoided(fleet) == 0
        turn = await fleet.chat([{"role": "user", "content": asks("http://there/a.png")}])
        assert (turn.status, await decisions(fleet, turn)) == (200, ["image: encoded"])


async def test_a_worker_that_cannot_fetch_what_another_can_is_avoided() -> None:
    """So is an encoder."""
    async with Fleet.of("", **SENSITIVE) as fleet, AsyncExitStack() as stack:
        for role, handler in (("E", breaks), ("R", breaks), ("R", fetches)):
            await stack.enter_async_context(odd_worker(fleet, handler, role))
        for _ in range(3):  # whichever R comes first
            turn = await fleet.chat([{"role": "user", "content": asks("http://there/a.png")}])
            assert turn.status == 200
        assert avoided(fleet) == 2


async def test_what_fails_with_the_data_at_hand_is_held_against_its_worker() -> None:
    async with Fleet.of("", **SENSITIVE) as fleet, AsyncExitStack() as stack:
        for role in ("E", "R"):
            await stack.enter_async_context(odd_worker(fleet, breaks, role))
        turn = await fleet.chat([{"role": "user", "content": asks(picture(1))}])
        assert (turn.status, avoided(fleet)) == (502, 2)
