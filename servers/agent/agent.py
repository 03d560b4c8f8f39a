"""`ppd agent`: launches one engine, or attaches to one, and announces it to the proxies by heartbeats.

A heartbeat is sent every interval, and at once on a change. The phases: starting (nothing is sent); serving; draining
(on SIGTERM: no new turns, the engine finishes those it has); leaving (proxies remove the worker at once). An engine
that stops answering is announced as leaving, and as serving again when it answers.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import aiohttp

from ppd.proxy.connectors.nixl import Nixl
from ppd.proxy.connectors.queries import query_of
from ppd.proxy.discovery.heartbeat import VERSION, Heartbeat
from ppd.proxy.fleet.engine_metrics import metrics_path
from ppd.proxy.fleet.worker import NO_EVENTS, EventSource, Load, Role, Worker
from ppd.proxy.health.probe import EngineStatus, probe

from ..fleet.process import EngineFailed, EngineProcess
from .announcer import Announcer
from .silence import EngineSilence, Silence

log = logging.getLogger(__name__)

PROBE_S = 5.0  # time-out of a probe; a busy engine may be slow to answer
RETRY_S = 1.0  # until the next probe of an engine that did not answer
MISSES = 3  # failed probes in a row until the worker is withdrawn: a busy engine may miss one
DRAIN_POLL_S = 0.2
START_S = 900.0  # a large model takes minutes to load


class AgentPhase(Enum):
    SERVING = "serving"
    DRAINING = "draining"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class EngineWatch:
    """Whether the engine is announced, and how many probes in a row have failed since."""

    announced: bool = False
    missed: int = 0

    def after(self, is_healthy: bool) -> tuple[EngineWatch, AgentPhase | None]:
        """The next state after a probe, and the phase to announce; None: nothing."""
        if is_healthy:
            return EngineWatch(announced=True), AgentPhase.SERVING
        if not self.announced:
            return EngineWatch(), None
        if self.missed + 1 >= MISSES:
            return EngineWatch(), AgentPhase.LEAVING
        return EngineWatch(announced=True, missed=self.missed + 1), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The part of a heartbeat that does not change while the agent runs."""

    role: Role
    address: str  # host:port at which the proxy reaches the engine
    engine: str = "vllm"
    connector: str = "nixl"
    coordinates: dict[str, str]
    kv_events: EventSource = NO_EVENTS
    x: float | None = None
    profile: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    has_sidecar: bool = False  # at `address`
    launch_id: str  # the incarnation, if the engine does not report its start time


def is_idle(role: Role, connector: str, load: Load) -> bool:
    """Nothing runs or waits. Who hands over must also hold no blocks: without requests, others are yet to pull them."""
    hands_over = role is Role.PREFILL or connector == Nixl.name
    return load.running + load.waiting == 0 and (not hands_over or load.kv_usage == 0)


def heartbeat_of(identity: Identity, status: EngineStatus, phase: AgentPhase) -> Heartbeat:
    load = status.metrics.load
    return Heartbeat(
        version=VERSION,
        role=identity.role,
        http_address=identity.address,
        models=list(status.models),
        aliases=status.aliases,
        engine=identity.engine,
        engine_version=status.version,
        connector=identity.connector,
        coordinates={**identity.coordinates, **status.coordinates},
        kv_events=identity.kv_events,
        x=identity.x,
        profile=identity.profile,
        labels=identity.labels,
        sidecar=identity.has_sidecar,
        incarnation=status.metrics.incarnation or identity.launch_id,
        running=load.running,
        waiting=load.waiting,
        kv_usage=load.kv_usage,
        kv_capacity_tokens=load.kv_capacity_tokens,
        draining=phase is AgentPhase.DRAINING,
        leaving=phase is AgentPhase.LEAVING,
    )


def completed(status: EngineStatus, last: EngineStatus, *, was_away: bool) -> EngineStatus:
    """A busy engine may be late with some answers: its last ones are better than none, if it has not begun anew.

    was_away: it has missed a probe since `last`.
    """
    found = status.metrics.incarnation
    is_same = found == last.metrics.incarnation if found else not was_away
    if not status.coordinates and is_same:
        status = replace(status, coordinates=last.coordinates)
    if not status.scraped and last.healthy:
        models = status if status.models else last
        status = replace(status, metrics=last.metrics, models=models.models, aliases=models.aliases)
    return status


class Agent:
    """Announces one engine. `process` is None for an engine that the agent did not launch."""

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
        self._query = query_of(
            Worker(
                role=identity.role,
                address=identity.address,
                connector=identity.connector,
                coordinates=identity.coordinates,
            )
        )
        self._interval_s = interval_s
        self._drain_timeout_s = drain_timeout_s
        self._api_key = api_key
        self._watch = EngineWatch()
        self._announced_phase: AgentPhase | None = None
        self._modelless = Silence(0.0, time.monotonic())
        self._last = EngineStatus(healthy=False)  # the last probe that was answered

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set, then drains; EngineFailed if a launched engine ends by itself."""
        try:
            if self._process is not None:
                await self._process.start()
            async with aiohttp.ClientSession() as session, self._watching(session, stop):
                if self._process is not None:
                    await self._race(self._process.wait_healthy(self._base_url, timeout_s=START_S), stop)
                await self._serve(session, stop)
                await self._drain(session)
        finally:
            if self._process is not None:
                await self._process.stop()

    @asynccontextmanager
    async def _watching(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> AsyncIterator[None]:
        """Warns of an engine and of proxies that do not answer; of the engine until it is told to stop."""
        hint = "" if self._process is None else f"; its log is {self._process.log_path}"
        engine = EngineSilence(self._base_url, hint).watch(session)
        watching = [asyncio.create_task(self._race(engine, stop)), asyncio.create_task(self._announcer.watch())]
        try:
            yield
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _serve(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        while not stop.is_set():
            status = await self._probe(session)
            if status.healthy and not status.models and self._modelless.is_due(time.monotonic()):
                log.warning(
                    "engine %s lists no models: it must be an engine's port, and --api-key its key", self._base_url
                )
            self._watch, phase = self._watch.after(status.healthy)
            if phase is not None:
                await self._announce(phase)
            # An engine that does not answer is probed more often.
            pause_s = self._interval_s if status.healthy else min(RETRY_S, self._interval_s)
            if await self._ended_within(pause_s, stop):
                await self._announce(AgentPhase.LEAVING)
                assert self._process is not None, "only a launched engine's end is noticed"
                raise EngineFailed(f"the engine ended with {self._process.returncode}; {self._process.last_words()}")

    async def _drain(self, session: aiohttp.ClientSession) -> None:
        """Announces draining until the engine is idle or the time is over, then leaving.

        Two probes in a row must find it idle: a turn that was sent before the proxy knew of the draining may come yet.
        """
        if not self._watch.announced:
            return
        deadline = asyncio.get_running_loop().time() + self._drain_timeout_s
        idle_probes = 0
        while True:
            await self._announce(AgentPhase.DRAINING)
            status = await self._probe(session)
            idle_probes = (
                idle_probes + 1 if is_idle(self._identity.role, self._identity.connector, status.metrics.load) else 0
            )
            if not status.healthy or idle_probes == 2 or asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(DRAIN_POLL_S)
        await self._announce(AgentPhase.LEAVING)

    async def _probe(self, session: aiohttp.ClientSession) -> EngineStatus:
        status = await probe(
            session,
            self._base_url,
            api_key=self._api_key,
            timeout_s=PROBE_S,
            query=self._query,
            metrics_path=metrics_path(self._identity.engine),
        )
        if status.healthy:
            self._last = status = completed(status, self._last, was_away=self._watch.missed > 0)
        return status

    async def _announce(self, phase: AgentPhase) -> None:
        if phase is not self._announced_phase:
            log.info("%s %s: %s", self._identity.role, self._identity.address, phase.value)
            self._announced_phase = phase
        await self._announcer.send(heartbeat_of(self._identity, self._last, phase))

    async def _ended_within(self, pause_s: float, stop: asyncio.Event) -> bool:
        """Waits for the pause, `stop` or the launched engine's end; True for the last."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait())]
        if self._process is not None:
            waits.append(asyncio.ensure_future(self._process.wait()))
        done, pending = await asyncio.wait(waits, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        return len(waits) > 1 and waits[1] in done

    async def _race(self, work: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
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
    """SIGTERM or SIGINT starts draining; a second one ends it."""
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
