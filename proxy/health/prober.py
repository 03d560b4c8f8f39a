"""Probes the workers that have no agent: static ones for health and load, engines that ping for their models."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import aiohttp

from ..config import ProxyConfig
from ..fleet.registry import Registry
from ..fleet.view import WorkerView
from ..fleet.worker import Source, WorkerId
from ..runtime.tls import Tls
from ..upstream.client import Upstream
from .probe import EngineStatus, probe

log = logging.getLogger(__name__)

MISSES = 3  # probes in a row without an answer: then a worker is down, and its legs are ended


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
        self._misses = Counter[WorkerId]()

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
                self._look_around()
                pause_s = min(self._interval_s, 1.0) if self._anyone_in_doubt() else self._interval_s
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._nudged.wait(), pause_s)
        finally:
            for task in self._probing.values():
                task.cancel()

    def _look_around(self) -> None:
        views = self._registry.views()
        for gone in self._misses.keys() - {view.id for view in views}:
            del self._misses[gone]  # one that comes back starts at 0
        for view in views:
            if view.worker.source is not Source.AGENT and view.id not in self._probing:
                task = asyncio.create_task(self._probe(view))
                self._probing[view.id] = task
                task.add_done_callback(partial(self._probed, view.id))

    def _probed(self, worker_id: WorkerId, task: asyncio.Task[None]) -> None:
        del self._probing[worker_id]
        if not task.cancelled() and task.exception() is not None:
            log.error("the probe of a worker failed", exc_info=task.exception())

    def _anyone_in_doubt(self) -> bool:
        """A worker that is not up may be starting, one that missed a probe may be gone: both are probed more often."""
        return bool(self._misses) or any(not view.up for view in self._registry.views())

    def doubt(self, view: WorkerView) -> None:
        """Ends the worker's legs if probes find it dead: its agent fell silent, or it does not react to a leg."""
        if view.id not in self._probing:
            task = asyncio.create_task(self._hang_up_if_dead(view))
            self._probing[view.id] = task
            task.add_done_callback(partial(self._probed, view.id))

    async def _hang_up_if_dead(self, view: WorkerView) -> None:
        for _ in range(MISSES):
            asked_s = asyncio.get_running_loop().time()
            if (await self._ask(view)).healthy:
                self._upstream.heard(view.id, asked_s)
                return
        self._upstream.hang_up(view.id)

    async def _ask(self, view: WorkerView) -> EngineStatus:
        if self._session is None:
            self._session = self._make_session()
        return await probe(self._session, view.worker.base_url, api_key=self._key, tls=self._tls.context)

    async def _probe(self, view: WorkerView) -> None:
        status = await self._ask(view)
        if not status.healthy:
            self._misses[view.id] += 1
            # A single slow answer does not take a worker down: it may be the only one of its role.
            if status.refused or self._misses[view.id] >= MISSES:
                self._registry.probe_failed(view.id)
            if self._misses[view.id] == MISSES:
                self._upstream.hang_up(view.id)
            return
        del self._misses[view.id]
        found = replace(
            view.worker,
            models=status.models,
            engine_version=status.version,
            incarnation=status.metrics.incarnation,
        )
        load = status.metrics.load if status.scraped else None
        self._registry.probed(view.id, found, load, self._now())
