"""What hand-overs are released with: a proxy's parts, a P that is only a name, and Ds that are asked to take its KV."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ppd.proxy.assembly import Proxy
from ppd.proxy.connectors.leg import Handoff
from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Leg, Phase
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.leg_moves import LegOrder, Legs, LegsEvent
from ppd.proxy.routing.attempt import Attempt, OpenAnswer
from ppd.proxy.telemetry.receipts import LegRecord
from ppd.proxy.upstream.call import Call
from tests.support.attempts import decision, running

Opening = Callable[[Attempt], Awaitable[OpenAnswer]]


class Lab:
    """A proxy's parts without its server, a P that is only a name, and Ds that write down what they are asked."""

    def __init__(self, proxy: Proxy, stack: AsyncExitStack) -> None:
        self.proxy = proxy
        self.asked: dict[str, list[dict[str, Any]]] = {}
        self.closed: list[str] = []
        self.at_once = self.most_at_once = 0  # requests that Ds have
        self._stack = stack
        self.p = self.join("P1", "p:1")

    def join(self, name: str, address: str, connector: str = "nixl", **changes: Any) -> WorkerView:
        registry = self.proxy.state.registry
        worker = Worker(
            role=Role(name[0]),
            address=address,
            models=("m",),
            connector=connector,
            has_sidecar=bool(changes.get("has_sidecar")),
            coordinates=changes.get("coordinates", {}),
        )
        registry.add_static(worker, 0.0)
        registry.probed(worker.id, worker, None, 0.0)
        registry.hold_back(worker.id, bool(changes.get("draining")))
        view = registry.view(worker.id)
        assert view is not None
        return view

    async def decode(self, name: str, *, status: int = 200, event: Any = None, **changes: Any) -> WorkerView:
        """event: the first of an answer that does not end, where one is asked for as a stream."""
        asked = self.asked[name] = []

        async def streamed(request: web.Request) -> web.StreamResponse:
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            await answer.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
            try:
                await asyncio.Event().wait()
            finally:
                self.closed.append(name)
            raise AssertionError

        async def answer(request: web.Request) -> web.StreamResponse:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            asked.append(await request.json())
            await asyncio.sleep(0)
            self.at_once -= 1
            if event is not None and asked[-1].get("stream"):
                return await streamed(request)
            return web.json_response({}, status=status)

        app = web.Application()
        app.router.add_post("/{path:.*}", answer)
        server = await self._stack.enter_async_context(TestServer(app, handler_cancellation=True))
        return self.join(name, f"127.0.0.1:{server.port}", **changes)

    def running(self, decode: WorkerView, prefill: WorkerView | None = None) -> Attempt:
        made = running(decision(Leg.DECODE, prefill or self.p, decode), Leg.PREFILL)
        made.legs = Legs(LegOrder.P_THEN_D)
        made.on_close = lambda _: self.closed.append("given back")
        return made

    def announce(self, made: Attempt) -> None:
        """P has answered."""
        tell(made, LegsEvent.HANDED_OVER)
        made.handoff = Handoff({"remote_request_id": "kv"}, 10, None)
        self.proxy.state.handoffs.open(made.attempt_id, self.proxy.state.now())

    def outstanding(self) -> int:
        return self.proxy.state.handoffs.outstanding(self.proxy.state.now())

    async def leave(self, made: Attempt, opening: Opening, *, after_s: float = 0.0) -> None:
        """The client leaves while the attempt is under way; then all is wound up."""
        turn = asyncio.ensure_future(self.proxy.handoff_release.shielded(opening(made), made))  # type: ignore[arg-type]
        await asyncio.sleep(after_s)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        await self.wound_up()

    async def wound_up(self) -> None:
        await self.proxy.handoff_release.close()

    def fates(self) -> dict[str, float]:
        samples = (sample for metric in self.proxy.state.metrics.abandoned.collect() for sample in metric.samples)
        return {sample.labels["fate"]: sample.value for sample in samples if sample.name.endswith("_total")}


def tell(made: Attempt, event: LegsEvent) -> None:
    assert made.legs is not None
    made.legs.take(event)


def unreached(made: Attempt) -> LegError:
    """As its D's leg has failed."""
    decode = made.decision.decode
    made.call, exc = Call(decode.worker), LegError("", worker=decode.id, phase=Phase.CONNECT, cause=Cause.REFUSED)
    made.leg = LegRecord(kind=Leg.DECODE, worker=decode.name, address=decode.id, started_s=0.0)
    made.leg.fail(exc)
    return exc


async def released(lab: Lab, made: Attempt) -> int:
    lab.announce(made)
    unreached(made)
    lab.proxy.handoff_release.release(made)
    await lab.wound_up()
    return lab.outstanding()
