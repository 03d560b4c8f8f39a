"""A proxy in this process: with its port, before workers that run already, or without any socket."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from ppd.proxy.admission.keys import Client
from ppd.proxy.assembly import Proxy, assemble
from ppd.proxy.config import ProxyConfig
from ppd.proxy.downstream.serve import listen, serve
from ppd.proxy.fleet.worker import Load
from ppd.proxy.openai.request import Endpoint, ReadingRules, Request, parse_request
from ppd.proxy.peers.channels import Member
from ppd.proxy.routing.attempt import TurnContext
from ppd.proxy.routing.legs.dispatch import Dispatcher
from ppd.proxy.routing.legs.handoff_release import HandoffRelease
from ppd.proxy.routing.router import Router
from ppd.proxy.settings import Settings
from ppd.proxy.telemetry.receipts import Receipt


@asynccontextmanager
async def serving(config: ProxyConfig) -> AsyncIterator[str]:
    """The base URL, once all workers of the config are up."""
    proxy, listening, stop = assemble(Settings(config)), listen(config), asyncio.Event()
    task = asyncio.create_task(serve(proxy, listening, stop))
    try:
        while not task.done() and sum(view.up for view in proxy.state.registry.views()) < len(config.workers):
            await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        stop.set()
        await task


# -- without sockets: a worker's answer comes from memory

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
WORKERS = tuple(f"{role}=10.0.{net}.{n}:8000,model={MODEL}" for net, role in enumerate("PD") for n in range(1, 5))
# As vLLM's `cache_config_info` has it of an H100 with this model: num_gpu_blocks x block_size. An engine that reports
# none is never believed to evict, which costs less than books that are full.
LOAD = Load(kv_capacity_tokens=25_000 * 16)
REPLY = "The answer is forty-two, as far as anybody can tell; shall I go on? "
CONTEXT = TurnContext(Client(name="", tenant=""), {"content-type": "application/json"})


class StageStopwatch:
    """Microseconds that one turn spends in each stage."""

    def start(self) -> None:
        self.spent_us: defaultdict[str, float] = defaultdict(float)
        self._since_ns = time.perf_counter_ns()

    def lap(self, stage: str) -> None:
        now_ns = time.perf_counter_ns()
        self.spent_us[stage] += (now_ns - self._since_ns) / 1000
        self._since_ns = time.perf_counter_ns()


PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(64))],
    "remote_engine_id": "0b4d6d5a-8a8e-4d61-9a4e-0f7c1d1f2a3b",
    "remote_request_id": "chatcmpl-6f0d9a5e4c9b4b6e8e9d1c2b3a4f5e6d",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


def _answer(**members: object) -> bytes:
    return msgspec.json.encode(
        {
            "id": "chatcmpl-6f0d9a5e4c9b4b6e8e9d1c2b3a4f5e6d",
            "object": "chat.completion",
            "created": 1_760_000_000,
            "model": MODEL,
            "choices": [{"index": 0, "message": {"role": "assistant", "content": REPLY}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 900, "completion_tokens": 20, "total_tokens": 920},
            **members,
        }
    )


ANSWER, HANDOFF = _answer(), _answer(kv_transfer_params=PARAMS)


class MemoryAnswer:
    """A worker's whole answer, without waiting."""

    status = 200
    content_type = "application/json"
    retry_after_s = 0.0
    is_event_stream = False

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def body(self) -> bytes:
        return self._body

    def at_once(self) -> bytes:
        return self._body

    def relayed(self, _rules: object) -> dict[str, str]:
        return {}

    def close(self) -> None:
        pass


class MemoryUpstream:
    """Stands in for `Upstream`; P's answers hold a handoff."""

    uptime = staticmethod(time.monotonic)

    def __init__(self, watch: StageStopwatch, asked: Callable[[], None]) -> None:
        self._watch = watch
        self._asked = asked
        self.uptime = time.monotonic

    async def ask(
        self, _call: object, _path: str, *, meanwhile: Callable[[], None] | None = None, **_leg: object
    ) -> MemoryAnswer:
        self._watch.lap("legs")
        if meanwhile is None:  # which only the leg that answers the client has
            return MemoryAnswer(HANDOFF)
        meanwhile()
        self._asked()
        return MemoryAnswer(ANSWER)


@dataclass(frozen=True, slots=True)
class TurnBench:
    """One proxy without sockets."""

    proxy: Proxy
    router: Router
    tools: int
    watch: StageStopwatch

    def parse(self, body: bytes) -> Request:
        return parse_request(Endpoint.CHAT, body, {}, ReadingRules(hasher=self.proxy.state.hasher, tenant=""))

    async def turn(self, body: bytes, number: int) -> str:
        """Plays a turn as `app` does; returns its kind and route."""
        self.watch.start()
        request = await self.proxy.bodies.turn(Endpoint.CHAT, {}, CONTEXT.client, body)
        self.watch.lap("parse")
        receipt = Receipt(
            id=f"{number:032x}",
            at="2026-01-01T00:00:00.000+00:00",
            endpoint=Endpoint.CHAT.value,
            model=request.model,
            stream=request.stream,
            session="",
            turn=0,
            kind="",
        )
        (await self.router.answer(request, receipt, CONTEXT)).written()
        self.watch.lap("learn")
        return f"{receipt.kind} {receipt.route}"


class WatchedDispatcher(Dispatcher):
    """Ends the stage `decide` when it is given a decision."""

    watch: StageStopwatch

    async def open(self, running: Any) -> Any:
        self.watch.lap("decide")
        return await super().open(running)


def bench(
    tools: int, member: Member | None = None, asked: Callable[[], None] = lambda: None, **config: Any
) -> TurnBench:
    """member: as in `assemble`. asked: called while a D or R computes an answer."""
    settings, watch = Settings(ProxyConfig(workers=WORKERS, heartbeat_port=0, **config)), StageStopwatch()
    proxy = assemble(settings, member=member)
    state, upstream = proxy.state, cast(Any, MemoryUpstream(watch, asked))
    for worker in settings.static_workers:
        state.registry.add_static(worker, state.now())
        state.registry.probed(worker.id, worker, LOAD, state.now())
    dispatcher = WatchedDispatcher(settings.config, upstream, HandoffRelease(state, upstream), state, proxy.bodies)
    dispatcher.watch = watch
    router = Router(settings.config, state, proxy.chooser, dispatcher, proxy.learner)
    return TurnBench(proxy, router, tools, watch)
