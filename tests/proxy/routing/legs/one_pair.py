"""A proxy's dispatcher with one P and one D, which answer when the test says so."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from ppd.proxy.assembly import Proxy
from ppd.proxy.connectors import CONNECTORS, usual_engine
from ppd.proxy.errors import LegError
from ppd.proxy.failures import Leg
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.ledger import LegEstimates
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.routing.attempt import Attempt, OpenAnswer
from ppd.proxy.routing.legs.dispatch import Dispatcher
from tests.support.attempts import decision, running
from tests.support.requests import parse

USAGE = {"prompt_tokens": 90, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 64}}
WHOLE = {"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "length"}], "usage": USAGE}
TEXT = {"choices": [{"index": 0, "delta": {"content": "hi"}}]}
D_USAGE = {"choices": [], "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 90}}}
SOON_S = 5.0  # a limit, so that a test that fails ends


def http(body: bytes, status: int = 200, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} Any\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def event(data: object) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


COORDINATES = {"engine_id": "e", "ctx_info_endpoint": "tcp://10.0.0.5:9000"}
GOOD_P = http(msgspec.json.encode(WHOLE))
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"  # until the connection ends
GOOD_D = STREAM + event(TEXT)


class Engine:
    """A worker that answers its one request when the test says so, and notes when the proxy hangs up."""

    def __init__(self) -> None:
        self.asked, self.hung_up = asyncio.Event(), asyncio.Event()
        self.body: dict[str, Any] = {}
        self.address = ""
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Server | None = None

    async def start(self, stack: AsyncExitStack) -> None:
        listening = self._listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        stack.callback(self.end)
        stack.callback(listening.close)
        self.address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"

    def refuse(self) -> None:
        assert self._listening is not None
        self._listening.close()

    def say(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            self.body = msgspec.json.decode(await reader.readexactly(size))
            self.asked.set()
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        self.hung_up.set()


class Lab:
    """A proxy with one P and one D, and an attempt over them."""

    def __init__(self, proxy: Proxy, connector: str) -> None:
        self.proxy, self._connector = proxy, connector
        self.p, self.d = Engine(), Engine()

    async def start(self, stack: AsyncExitStack) -> None:
        for engine in (self.p, self.d):
            await engine.start(stack)
        registry, made = self.proxy.state.registry, list[WorkerView]()
        for role, engine in ((Role.PREFILL, self.p), (Role.DECODE, self.d)):
            worker = Worker(
                role=role,
                address=engine.address,
                models=("m",),
                connector=self._connector,
                engine=usual_engine(self._connector),
                coordinates=COORDINATES,
            )
            registry.add_static(worker, 0.0)
            registry.probed(worker.id, worker, None, 0.0)
            view = registry.view(worker.id)
            assert view is not None
            made.append(view)
        self.attempt: Attempt = running(decision(Leg.DECODE, *made))
        self.attempt.request = parse(stream=True, stream_options={"include_usage": True})
        estimates = LegEstimates(prompt_tokens=100, new_tokens=1, new_on_prefill_tokens=100)
        self.attempt.booking = LegBooking(registry, made[1].id, made[0].id, estimates)
        proxy = self.proxy
        dispatcher = Dispatcher(proxy.settings.config, proxy.upstream, proxy.handoff_release, proxy.state, proxy.bodies)
        self.turn: asyncio.Future[OpenAnswer] = asyncio.ensure_future(dispatcher.open(self.attempt))
        async with asyncio.timeout(SOON_S):
            await self.p.asked.wait()
            if CONNECTORS[self._connector].order.is_joint:
                await self.d.asked.wait()

    async def answer(self) -> OpenAnswer:
        async with asyncio.timeout(SOON_S):
            return await self.turn

    async def fails(self) -> LegError:
        with pytest.raises(LegError) as caught:
            await self.answer()
        return caught.value

    async def until_hung_up(self, *engines: Engine) -> None:
        async with asyncio.timeout(SOON_S):
            for engine in engines:
                await engine.hung_up.wait()

    def timed_legs(self) -> dict[str, int]:
        """By kind, how many `ppd_leg_seconds` has counted."""
        (family,) = self.proxy.state.metrics.legs.collect()
        counts = (sample for sample in family.samples if sample.name.endswith("_count"))
        return {sample.labels["leg"]: int(sample.value) for sample in counts}

    def is_all_given_back(self) -> bool:
        held = [(view.inflight, view.queued_prefill_tokens) for view in self.proxy.state.registry.views()]
        legs = self.attempt.receipt.legs
        return held == [(0, 0), (0, 0)] and len(legs) == 2 and all(leg.ended_s is not None for leg in legs)
