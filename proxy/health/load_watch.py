"""Asks workers that are full for their load, so that their places follow what the engine can take within moments.

Probes and heartbeats come every few seconds, in which an overloaded worker would get hundreds of turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..config import ProxyConfig
from ..errors import PPDError
from ..fleet.engine_metrics import metrics_path, parse_metrics
from ..fleet.places import UNKNOWN
from ..fleet.registry import Registry
from ..fleet.view import WorkerView
from ..fleet.worker import WorkerId
from ..upstream.call import Call, Timeouts
from ..upstream.client import Upstream

INTERVAL_S = 0.25
LIMIT_S = 2.0  # for one answer
ASKED_AT_ONCE = 64
REPORT_LIMIT_BYTES = 1024 * 1024  # read here, four times a second: vLLM's are a few hundred KiB


class LoadWatch:
    def __init__(self, config: ProxyConfig, registry: Registry, upstream: Upstream, now: Callable[[], float]) -> None:
        self._limit = config.max_worker_inflight
        self._registry = registry
        self._upstream = upstream
        self._now = now
        self._asking: dict[WorkerId, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            while True:
                self.look_around()
                await asyncio.sleep(INTERVAL_S)
        finally:
            for task in self._asking.values():
                task.cancel()

    def look_around(self) -> None:
        for view in self._registry.views():
            learns = view.up and view.places != UNKNOWN and view.is_full(self._limit)
            if learns and view.id not in self._asking and len(self._asking) < ASKED_AT_ONCE:
                self._asking[view.id] = asyncio.create_task(self._ask(view))

    async def _ask(self, view: WorkerView) -> None:
        timeouts, path = Timeouts(LIMIT_S, LIMIT_S, LIMIT_S), metrics_path(view.worker.engine)
        try:
            async with (
                asyncio.timeout(LIMIT_S),
                self._upstream.answer(Call(view.worker), path, method="GET", timeouts=timeouts) as answer,
            ):
                text = await answer.body(REPORT_LIMIT_BYTES)
        except (PPDError, TimeoutError):
            return  # whether it is well is for probes and breakers to say
        finally:
            del self._asking[view.id]
        if answer.status == 200:
            self._registry.loaded(view.id, parse_metrics(text.decode("utf-8", "replace")).load, self._now())
