"""`ppd agent`: stands beside one engine, which it launches or attaches to, and tells the proxies about it.

A heartbeat goes out every interval, and at once when something changes. Order of things: starting (nothing is said),
serving, draining (announced on SIGTERM: no new turns, the engine finishes its own), leaving (forget this worker now).
An engine that stops answering is taken back too, and announced again when it answers.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import aiohttp
import zmq
import zmq.asyncio

from ppd.proxy.discovery.heartbeat import VERSION, Heartbeat
from ppd.proxy.fleet.worker import Load, Role
from ppd.proxy.health.probe import EngineStatus, probe

from ..fleet.process import EngineFailed, EngineProcess

log = logging.getLogger(__name__)

PROBE_S = 5.0  # one look at the engine; a busy one may be slow to answer
LOOK_AGAIN_S = 1.0  # where the engine did not answer
MISSES = 3  # looks in a row without an answer until the worker is taken back: a busy engine may miss one
DRAIN_POLL_S = 0.2
START_S = 900.0  # a large model takes minutes to load


class AgentPhase(Enum):
    SERVING = "serving"
    DRAINING = "draining"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class EngineWatch:
    """What the proxies were told of the engine, and how often it has not answered since."""

    announced: bool = False
    missed: int = 0

    def after(self, is_healthy: bool) -> tuple[EngineWatch, AgentPhase | None]:
        """The next state, and what to say after a look; None: nothing."""
        if is_healthy:
            return EngineWatch(announced=True), AgentPhase.SERVING
        if not self.announced:
            return EngineWatch(), None
        if self.missed + 1 >= MISSES:
            return EngineWatch(), AgentPhase.LEAVING
        return EngineWatch(announced=True, missed=self.missed + 1), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What does not change while the agent runs."""

    role: Role
    address: str  # host:port at which the proxy reaches the engine
    engine: str = "vllm"
    connector: str = "nixl"
    coordinates: dict[str, str]
    launch_id: str  # stands in for the incarnation where the engine does not tell when it started


def is_idle(role: Role, load: Load) -> bool:
    """Nothing runs or waits. P also holds nothing: blocks in use beside no request are handoffs for D to pull."""
    return load.running + load.waiting == 0 and (role is not Role.PREFILL or load.kv_usage == 0)


def beat(identity: Identity, status: EngineStatus, phase: AgentPhase) -> Heartbeat:
    """The message for what was last seen of the engine."""
    load = status.metrics.load
    return Heartbeat(
        version=VERSION,
        role=identity.role,
        http_address=identity.address,
        models=list(status.models),
        engine=identity.engine,
        engine_version=status.version,
        connector=identity.connector,
        coordinates=identity.coordinates,
        incarnation=status.metrics.incarnation or identity.launch_id,
        running=load.running,
        waiting=load.waiting,
        kv_usage=load.kv_usage,
        kv_capacity_tokens=load.kv_capacity_tokens,
        draining=phase is AgentPhase.DRAINING,
        leaving=phase is AgentPhase.LEAVING,
    )


class Announcer:
    """DEALER sockets to every proxy. Sending never waits, and a proxy that was away gets the last message only."""

    def __init__(self, proxies: Sequence[str], curve: tuple[bytes, bytes, bytes] | None = None) -> None:
        """`curve`: the agent's public and secret key, and the proxy's public one."""
        self._context = zmq.asyncio.Context()
        self._sockets = {address: self._connect(address, curve) for address in proxies}

    def _connect(self, address: str, curve: tuple[bytes, bytes, bytes] | None) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.CONFLATE, 1)
        socket.setsockopt(zmq.LINGER, 500)  # ms; the last word should still go out
        if curve is not None:
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = curve
        socket.connect(f"tcp://{address}")
        return socket

    async def say(self, message: Heartbeat) -> None:
        payload = message.encode()
        for address, socket in self._sockets.items():
            try:
                # A proxy that refuses this agent's key takes nothing: waiting for it would silence the others too.
                await socket.send(payload, flags=zmq.DONTWAIT)
            except zmq.Again:
                log.warning("proxy %s takes no heartbeats: it refuses this agent's key, or none is there", address)

    def close(self) -> None:
        self._context.destroy(linger=500)


class Agent:
    """Announces one engine. `process` is None where it was attached to."""

    def __init__(
        self,
        identity: Identity,
        announcer: Announcer,
        process: EngineProcess | None,
        *,
        base_url: str,
        interval_s: float,
        drain_timeout_s: float,
        api_key: str = "",
    ) -> None:
        self._identity = identity
        self._announcer = announcer
        self._process = process
        self._base_url = base_url
        self._interval_s = interval_s
        self._drain_timeout_s = drain_timeout_s
        self._api_key = api_key
        self._watch = EngineWatch()
        self._said: AgentPhase | None = None
        self._last = EngineStatus(healthy=False)  # the last look that was answered

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set, then drains; EngineFailed if a launched engine ends by itself."""
        try:
            async with aiohttp.ClientSession() as session:
                if self._process is not None:
                    await self._process.start()
                    await self._race(self._process.wait_healthy(self._base_url, timeout_s=START_S), stop)
                await self._serve(session, stop)
                await self._drain(session)
        finally:
            if self._process is not None:
                await self._process.stop()

    async def _serve(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        while not stop.is_set():
            status = await self._look(session)
            self._watch, phase = self._watch.after(status.healthy)
            if phase is not None:
                await self._say(phase)
            # An engine that is not there yet, or not any more, is looked for more often.
            pause_s = self._interval_s if status.healthy else min(LOOK_AGAIN_S, self._interval_s)
            if await self._ended_within(pause_s, stop):
                await self._say(AgentPhase.LEAVING)
                assert self._process is not None, "only a launched engine is seen to end"
                raise EngineFailed(f"the engine ended with {self._process.returncode}:\n{self._process.log_tail()}")

    async def _drain(self, session: aiohttp.ClientSession) -> None:
        """No new turns; wait until the engine's own are done, up to the limit; then say goodbye.

        Idle means idle twice in a row: a turn that the proxy sent before it heard of the draining may be on its way.
        """
        if not self._watch.announced:
            return
        deadline = asyncio.get_running_loop().time() + self._drain_timeout_s
        idle_looks = 0
        while True:
            await self._say(AgentPhase.DRAINING)
            status = await self._look(session)
            idle_looks = idle_looks + 1 if is_idle(self._identity.role, status.metrics.load) else 0
            if not status.healthy or idle_looks == 2 or asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(DRAIN_POLL_S)
        await self._say(AgentPhase.LEAVING)

    async def _look(self, session: aiohttp.ClientSession) -> EngineStatus:
        status = await probe(session, self._base_url, api_key=self._api_key, timeout_s=PROBE_S)
        if status.healthy and not status.scraped and self._last.healthy:
            # A busy engine may be late with its metrics: what it said last is nearer the truth than nothing.
            status = replace(status, metrics=self._last.metrics, models=status.models or self._last.models)
        if status.healthy:
            self._last = status
        return status

    async def _say(self, phase: AgentPhase) -> None:
        if phase is not self._said:
            log.info("%s %s: %s", self._identity.role, self._identity.address, phase.value)
            self._said = phase
        await self._announcer.say(beat(self._identity, self._last, phase))

    async def _ended_within(self, pause_s: float, stop: asyncio.Event) -> bool:
        """Waits for the pause or `stop`; True at once if the launched engine ended."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait())]
        if self._process is not None:
            waits.append(asyncio.ensure_future(self._process.wait()))
        done, pending = await asyncio.wait(waits, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        return len(waits) > 1 and waits[1] in done

    async def _race(self, work: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
        """The work, cut short by `stop`."""
        doing = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
        finally:
            for task in (doing, stopping):
                task.cancel()
            await asyncio.gather(doing, stopping, return_exceptions=True)


async def run_until_signal(agent: Agent) -> None:
    """SIGTERM or SIGINT drains; a second one ends the wait."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    running = asyncio.current_task()
    assert running is not None, "called in a task"

    def signalled() -> None:
        if stop.is_set():
            running.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    await agent.run(stop)
