"""Turns over engines that want both legs at once, as SGLang's do: through the whole proxy, with faults and retries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ppd.proxy.config import Mode
from ppd.proxy.failures import Cause, Leg
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import PairId, WorkerId
from ppd.proxy.telemetry.receipts import Receipt
from tests.support.fleet import Fleet, has_work
from tests.support.proxy import Turn

USAGE = {"prompt_tokens": 90, "completion_tokens": 1, "total_tokens": 91}
NO_ROOM = {"error": {"message": "Disaggregated request received without bootstrap room id", "code": 400}}


class Rooms:
    """Engines with one bootstrap service: a leg is answered once the other one has come, and a room is used once."""

    def __init__(self, fleet: Fleet, stack: AsyncExitStack) -> None:
        self.legs: list[tuple[str, int]] = []  # who got which room
        self.failing: dict[str, int] = {}  # the status that an engine answers with, by its name
        # By its name, for what an engine waits: P with its answer, D with its end.
        self.held: dict[str, asyncio.Event] = {}
        self.hanging: set[str] = set()
        self._fleet, self._stack = fleet, stack
        self._came: dict[tuple[str, int], asyncio.Event] = {}

    @classmethod
    @asynccontextmanager
    async def of(cls, names: str, **settings: Any) -> AsyncIterator[Rooms]:
        async with Fleet.of(**settings) as fleet, AsyncExitStack() as stack:
            made = cls(fleet, stack)
            for name in names.split():
                await made.add(name)
            yield made

    async def add(self, name: str) -> None:
        async def serve(request: web.Request) -> web.StreamResponse:
            return await self._answer(name, request, await request.json())

        async def plain(request: web.Request) -> web.Response:
            return web.Response(text='{"data": [{"id": "sim"}]}' if request.path == "/v1/models" else "")

        app = web.Application()
        app.router.add_post("/v1/chat/completions", serve)
        app.router.add_get("/{path:.*}", plain)
        server = await self._stack.enter_async_context(TestServer(app))
        address, fleet = f"127.0.0.1:{server.port}", self._fleet
        worker = f"{name[0]}={address},engine=sglang" + (",bootstrap_port=9001" if name[0] == "P" else "")
        assert (await fleet.admin("POST", "/workers", {"worker": worker}))[0] == 201
        await fleet.until(lambda: any(v.id == address and v.up for v in fleet.proxy.state.registry.views()))

    async def _answer(self, name: str, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        room = body.get("bootstrap_room")
        if room is None or body.get("bootstrap_port") != 9001:
            return web.json_response(NO_ROOM, status=400)
        if any(leg == (name, room) for leg in self.legs):
            return web.json_response({"error": {"message": "used twice"}}, status=500)
        self.legs.append((name, room))
        if name in self.hanging:
            await asyncio.Event().wait()
        if name in self.failing:
            return web.json_response({"error": {"message": "no", "code": 500}}, status=self.failing[name])
        self._event(name[0], room).set()
        await self._event("D" if name[0] == "P" else "P", room).wait()
        if name in self.held:
            if body.get("stream"):
                return await self._streamed(name, request)
            await self.held[name].wait()
            if name in self.failing:
                return web.json_response({"error": {"message": "no", "code": 500}}, status=self.failing[name])
        message = {"role": "assistant", "content": f"by {name}"}
        choice = {"index": 0, "message": message, "finish_reason": "length" if name[0] == "P" else "stop"}
        return web.json_response({"id": "x", "object": "chat.completion", "choices": [choice], "usage": USAGE})

    async def _streamed(self, name: str, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        first = {"choices": [{"index": 0, "delta": {"content": f"by {name}"}}]}
        await answer.write(b"data: %s\n\n" % json.dumps(first).encode())
        await self.held[name].wait()
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": USAGE}
        await answer.write(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(last).encode())
        return answer

    def _event(self, role: str, room: int) -> asyncio.Event:
        return self._came.setdefault((role, room), asyncio.Event())

    def receipts(self) -> list[Receipt]:
        return self._fleet.proxy.state.receipts.newest(100)

    def open_breakers(self) -> set[WorkerId | PairId]:
        health = self._fleet.proxy.state.health
        return set(health.breakers.states(self._fleet.proxy.state.now()))

    async def idle(self) -> None:
        await self._fleet.until(lambda: not any(map(has_work, self._fleet.proxy.state.registry.views())))

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    def view(self, name: str) -> WorkerView:
        return next(view for view in self._fleet.proxy.state.registry.views() if view.name == name)

    async def ask(self, text: str = "hi") -> Turn:
        return await self._fleet.chat([{"role": "user", "content": text}])


async def test_each_turn_has_a_room_of_its_own_on_both_engines() -> None:
    async with Rooms.of("P1 D1", mode=Mode.ALWAYS_LOCAL) as rooms:
        for text in ("one", "two"):
            turn = await rooms.ask(text)
            assert (turn.status, turn.text) == (200, "by D1")
        assert len({room for _, room in rooms.legs}) == 2
        assert sorted(name for name, _ in rooms.legs) == ["D1", "D1", "P1", "P1"]
        await rooms.idle()


async def test_where_every_p_fails_the_client_gets_one_error_and_nothing_is_left_open() -> None:
    async with Rooms.of("P1 P2 D1", mode=Mode.ALWAYS_SPLIT, retry_burst=10) as rooms:
        rooms.failing |= {"P1": 500, "P2": 500}
        assert (await rooms.ask()).status == 502
        await rooms.idle()


@pytest.mark.parametrize("ends", ["well", "badly", "not at all"])
async def test_of_p_and_its_pair_nothing_is_believed_before_ps_leg_has_ended(ends: str) -> None:
    """Whatever D answers meanwhile."""
    async with Rooms.of("P1 D1", mode=Mode.ALWAYS_SPLIT, breaker_open_s=0.01, probe_interval_s=60.0) as rooms:
        fleet, health = rooms.fleet, rooms.fleet.proxy.state.health
        p, d = (rooms.view(name).id for name in ("P1", "D1"))
        health.breakers.failed(p, now_s := fleet.proxy.state.now(), began_s=now_s, at_once=True)
        await fleet.until(lambda: health.breakers.states(fleet.proxy.state.now()) == {p: "half_open"})
        rooms.held = {"P1": asyncio.Event(), "D1": asyncio.Event()}
        body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as answer:
            await answer.content.readline()  # D has begun

            def states() -> Mapping[Any, str]:
                return health.breakers.states(fleet.proxy.state.now())

            assert states() == {p: "half_open"}
            assert p in health.breakers.blocked(fleet.proxy.state.now()), "the turn is its probe"
            if ends == "badly":
                rooms.failing["P1"] = 500
            if ends != "not at all":
                rooms.held["P1"].set()
                await fleet.until(lambda: rooms.view("P1").inflight == 0)
                await fleet.until(lambda: states() != {p: "half_open"} or ends == "badly")
            rooms.held["D1"].set()
            assert b"[DONE]" in await answer.read()
        rooms.held["P1"].set()
        await rooms.idle()
        openings = [circuit.openings for key, circuit in health.breakers.circuits.items() if key == p]
        assert openings == {"well": [0], "badly": [2], "not at all": [1]}[ends]
        assert (health.moved_s((p, d)) > 0) is (ends == "well")
        if ends == "not at all":
            assert p not in health.breakers.blocked(fleet.proxy.state.now()), "another turn may probe it"


async def test_d_is_asked_before_p_which_waits_for_it_and_the_receipt_has_p_first() -> None:
    async with Rooms.of("P1 D1", mode=Mode.ALWAYS_SPLIT) as rooms:
        for number in range(20):
            assert (await rooms.ask(f"turn {number}")).status == 200
        assert [name for name, _ in rooms.legs] == ["D1", "P1"] * 20
        receipts = rooms.receipts()
        assert [[leg.kind for leg in receipt.legs] for receipt in receipts] == [[Leg.PREFILL, Leg.DECODE]] * 20


async def test_a_p_that_is_late_for_a_d_that_hangs_is_not_to_blame() -> None:
    late = {"prefill_timeout_s": 0.3, "answer_timeout_s": 0.3, "breaker_failures": 1, "retry_burst": 10, "attempts": 3}
    async with Rooms.of("P1 P2 D1 D2", mode=Mode.ALWAYS_SPLIT, **late) as rooms:
        rooms.hanging = {"D1"}
        for text in ("one", "two", "three"):
            assert (await rooms.ask(text)).text == "by D2"
        assert any(leg.error is Cause.TIMEOUT for receipt in rooms.receipts() for leg in receipt.legs)
        assert all(isinstance(key, tuple) for key in rooms.open_breakers())
