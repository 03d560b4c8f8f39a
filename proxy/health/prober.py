"""Probes the workers that have no agent: static ones for health and load, engines that ping for their models.

What a worker does for turns outranks what its probes say: one that answers turns is up unless its port is closed. And
no probe ends a stream that runs: a connection to a machine that is gone ends by TCP keepalive, one to an engine that
is stuck by `idle_timeout_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import aiohttp

from ..config import ProxyConfig
from ..connectors.queries import query_of
from ..fleet.engine_metrics import metrics_path
from ..fleet.registry import Registry
from ..fleet.view import WorkerView
from ..fleet.worker import NO_EVENTS, EventSource, Source, WorkerId
from ..runtime.tls import Tls
from ..upstream.client import Upstream
from .event_sources import event_source
from .probe import EngineStatus, probe

log = logging.getLogger(__name__)

BEGUN_AT_ONCE, BEGUN_EVERY_S = 8, 0.005
"""Probes: one takes a millisecond of the loop, and of a thousand workers all would be due in one step of it."""

MISSES = 3  # probes in a row without an answer: then a worker is down, and legs that it has not answered are ended


@dataclass(frozen=True, slots=True)
class _ToldEvents:
    """What an engine has said of its KV events."""

    incarnation: str
    source: EventSource


@dataclass(slots=True)
class _Missed:
    """Failed probes in a row, and in between no answer to a turn."""

    answers: int  # the registry's count for the worker when the first of them failed
    probes: int = 0


class Prober:
    """Probes every such worker each interval, each in a task of its own, so that one that hangs delays no other."""

    def __init__(
        self,
        config: ProxyConfig,
        registry: Registry,
        upstream: Upstream,
        now: Callable[[], float],
        session: Callable[[], aiohttp.ClientSession],
        tls: Tls,
    ) -> None:
        """session: called at the first probe, as it needs a running loop."""
        self._interval_s = config.probe_interval_s
        self._key = config.worker_api_key
        self._registry = registry
        self._upstream = upstream
        self._now = now
        self._make_session = session
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._nudged = asyncio.Event()
        self._probing: dict[WorkerId, asyncio.Task[None]] = {}
        self._missed: dict[WorkerId, _Missed] = {}
        self._asks_events = not config.kv_events_bind  # else engines connect to the proxy
        self._told_events: dict[WorkerId, _ToldEvents] = {}
        self._has_files = True
        self.failing: dict[WorkerId, str] = {}  # workers whose last probe failed, and why

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def nudge(self) -> None:
        """Probes now instead of at the next interval."""
        self._nudged.set()

    async def run(self) -> None:
        try:
            while True:
                self._nudged.clear()
                await self._look_around()
                pause_s = min(self._interval_s, 1.0) if self._anyone_in_doubt() else self._interval_s
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._nudged.wait(), pause_s)
        finally:
            for task in self._probing.values():
                task.cancel()

    async def _look_around(self) -> None:
        views = self._registry.views()
        for gone in self._missed.keys() - {view.id for view in views}:
            del self._missed[gone]  # one that comes back starts at 0
            self.failing.pop(gone, None)
        for gone in self._told_events.keys() - {view.id for view in views}:
            del self._told_events[gone]
        for worker_id, missed in self._missed.items():
            self._compare(worker_id, missed)
        for at, view in enumerate([view for view in views if view.worker.source is not Source.AGENT]):
            if at and at % BEGUN_AT_ONCE == 0:
                await asyncio.sleep(BEGUN_EVERY_S)
            self.ask_again(view)

    def _compare(self, worker_id: WorkerId, missed: _Missed) -> None:
        """A worker that has answered turns since its first miss is well, and its misses count from here."""
        answers = self._registry.answers(worker_id)
        if answers != missed.answers:
            missed.answers, missed.probes = answers, 0
            self._registry.outranked(worker_id, self._now())

    def _probed(self, worker_id: WorkerId, task: asyncio.Task[None]) -> None:
        del self._probing[worker_id]
        if not task.cancelled() and task.exception() is not None:
            log.error("the probe of a worker failed", exc_info=task.exception())

    def _anyone_in_doubt(self) -> bool:
        """A worker that is not up may be starting, one that missed a probe may be gone: both are probed more often."""
        return bool(self._missed) or any(not view.up for view in self._registry.views())

    def ask_again(self, view: WorkerView) -> None:
        """Probes this worker now, where it is probed at all."""
        if view.worker.source is not Source.AGENT and view.id not in self._probing:
            self._start(view, self._probe(view))

    def doubt(self, view: WorkerView) -> None:
        """Ends the worker's legs if probes find it dead: its agent fell silent, or it does not react to a leg."""
        has_turns = view.inflight or self._upstream.waits_for(view.id)  # of others thousands may fall silent at once
        if has_turns and view.id not in self._probing:
            self._start(view, self._hang_up_if_dead(view))

    def _start(self, view: WorkerView, probing: Coroutine[Any, Any, None]) -> None:
        task = self._probing[view.id] = asyncio.create_task(probing)
        task.add_done_callback(partial(self._probed, view.id))

    async def _hang_up_if_dead(self, view: WorkerView) -> None:
        answers, refused = self._upstream.answers(view.id), False
        for _ in range(MISSES):
            asked_s = asyncio.get_running_loop().time()
            status = await self._ask(view)
            if status.unasked:
                return
            if status.healthy:
                self._upstream.heard(view.id, asked_s)
                return
            refused = status.refused
        is_alive = refused or self._upstream.answers(view.id) != answers
        self._upstream.hang_up(view.id, only_handoffs=is_alive)

    async def _ask(self, view: WorkerView) -> EngineStatus:
        if self._session is None:
            self._session = self._make_session()
        key, told = self._key if view.worker.is_trusted else "", self._told_events.get(view.id)
        status = await probe(
            self._session,
            view.worker.base_url,
            api_key=key,
            tls=self._tls.context if view.worker.tls else None,
            asks_events=self._may_tell_events(view) and (told is None or told.incarnation != view.incarnation),
            query=query_of(view.configured or view.worker),
            metrics_path=metrics_path(view.worker.engine),
        )
        if status.unasked and self._has_files:
            log.warning("workers cannot be probed: this process can open no more files")
        self._has_files = not status.unasked
        return status

    def _may_tell_events(self, view: WorkerView) -> bool:
        """Where the config does not say; and where turns are encrypted, what they hold is not heard in the clear."""
        configured = view.configured
        return self._asks_events and configured is not None and configured.kv_events == NO_EVENTS and not configured.tls

    def _events(self, view: WorkerView, status: EngineStatus) -> EventSource:
        if not self._may_tell_events(view):
            return view.worker.kv_events
        if status.event_sources is not None:
            source = event_source(status.event_sources, view.worker.address)
            self._told_events[view.id] = _ToldEvents(status.metrics.incarnation or view.incarnation, source)
            if source.endpoint:
                log.info("worker %s: publishes KV events at %s, as it says", view.id, source.endpoint)
        told = self._told_events.get(view.id)
        return view.worker.kv_events if told is None else told.source

    async def _probe(self, view: WorkerView) -> None:
        status = await self._ask(view)
        if status.unasked:
            return
        if not status.healthy:
            self.failing[view.id] = status.why
            self._miss(view, refused=status.refused)
            return
        self._missed.pop(view.id, None)
        self.failing.pop(view.id, None)
        found = replace(
            view.worker,
            models=status.models,
            aliases=status.aliases,
            engine_version=status.version,
            incarnation=status.metrics.incarnation,
            kv_events=self._events(view, status),
            coordinates=status.coordinates,
        )
        load = status.metrics.load if status.scraped else None
        self._registry.probed(view.id, found, load, self._now())

    def _miss(self, view: WorkerView, *, refused: bool) -> None:
        self._told_events.pop(view.id, None)  # another process may answer next
        missed = self._missed.setdefault(view.id, _Missed(self._registry.answers(view.id)))
        self._compare(view.id, missed)
        missed.probes += 1
        # A single slow answer does not take a worker down: it may be the only one of its role.
        if refused or missed.probes >= MISSES:
            self._registry.probe_failed(view.id, refused=refused)
        if missed.probes == MISSES:
            # Behind a closed port its host is alive, and would have reset the connections of a process that has ended.
            self._upstream.hang_up(view.id, only_handoffs=refused)
