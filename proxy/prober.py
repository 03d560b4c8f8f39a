"""Asks the workers that have no agent: static ones for health and load, pinging engines for their models."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from .config import ProxyConfig
from .probes import probe
from .registry import Registry
from .upstream import Upstream
from .views import WorkerView
from .workers import Source, WorkerId

log = logging.getLogger(__name__)


class Prober:
    """Probes every such worker each interval, each by itself, so that one that hangs delays nobody."""

    def __init__(self, config: ProxyConfig, registry: Registry, upstream: Upstream, now: Callable[[], float]) -> None:
        self._interval_s = config.probe_interval_s
        self._key = config.worker_api_key
        self._registry = registry
        self._upstream = upstream
        self._now = now
        self._nudged = asyncio.Event()
        self._probing: dict[WorkerId, asyncio.Task[None]] = {}

    def nudge(self) -> None:
        """Look now: a worker was added."""
        self._nudged.set()

    async def run(self) -> None:
        try:
            while True:
                self._nudged.clear()
                self._look_around()
                pause_s = min(self._interval_s, 1.0) if self._anyone_new() else self._interval_s
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._nudged.wait(), pause_s)
        finally:
            for task in self._probing.values():
                task.cancel()

    def _look_around(self) -> None:
        for view in self._registry.views():
            if view.worker.source is not Source.AGENT and view.id not in self._probing:
                task = asyncio.create_task(self._probe(view))
                self._probing[view.id] = task
                task.add_done_callback(partial(self._probed, view.id))

    def _probed(self, worker_id: WorkerId, task: asyncio.Task[None]) -> None:
        del self._probing[worker_id]
        if not task.cancelled() and task.exception() is not None:
            log.error("the probe of a worker failed", exc_info=task.exception())

    def _anyone_new(self) -> bool:
        """A static worker that is not up yet may be starting: look more often."""
        return any(not view.up for view in self._registry.views())

    async def _probe(self, view: WorkerView) -> None:
        status = await probe(self._upstream.session, f"http://{view.worker.address}", api_key=self._key)
        if not status.healthy:
            self._registry.probe_failed(view.id)
            return
        found = replace(
            view.worker,
            models=status.models,
            engine_version=status.version,
            incarnation=status.metrics.incarnation,
        )
        load = status.metrics.load if status.scraped else None
        self._registry.probed(view.id, found, load, self._now())
