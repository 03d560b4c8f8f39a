"""The proxy's background tasks, restarted when they fail, their share of the loop, and the drain that ends a proxy.

A drain is a switch that a signal sets once. It is read wherever new work is accepted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from ..errors import Overloaded

log = logging.getLogger(__name__)

RESTART_S = 1.0
SLICE_S = 0.002  # of reading at once
PAUSE_SHARE = 4.0  # the pause after it is so many times as long: a flood gets a fifth of the loop


class Background:
    """Tasks that run as long as the app; one that raises is logged and started again."""

    def __init__(self, restart_s: float = RESTART_S) -> None:
        self._restart_s = restart_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks.append(asyncio.create_task(_kept_up(name, work, self._restart_s), name=name))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Throttle:
    """Tasks that read what others send take turns, in slices with pauses: together they get a fifth of the loop.

    By processor time. A slice in which this process stood still would be followed by a pause four times as long, and
    meanwhile workers would count as silent, and engines be believed to hold what they did.
    """

    def __init__(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._turn = asyncio.Lock()
        self._sleep = sleep

    @asynccontextmanager
    async def slice(self) -> AsyncIterator[float]:
        """Until when to read."""
        async with self._turn:
            began_s = time.thread_time()
            yield time.perf_counter() + SLICE_S
            await self._sleep(PAUSE_SHARE * (time.thread_time() - began_s))


async def _kept_up(name: str, work: Callable[[], Coroutine[Any, Any, None]], restart_s: float) -> None:
    while True:
        try:
            await work()
        except Exception:
            log.exception("background task %s failed and is started again", name)
        else:
            return
        await asyncio.sleep(restart_s)


RETRY_AFTER_S = 5.0


class Drain:
    """Once begun, new turns are refused and those under way go on; it never ends."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.is_announced = False  # to load balancers; turns may still be taken
        self.is_draining = False
        self._now = now
        self._begun = asyncio.Event()
        self._begun_s = -math.inf
        self.is_cut = False  # the time limit is over: the proxy closes connections, their clients do not

    def announce(self) -> None:
        self.is_announced = True

    def begin(self) -> None:
        self._begun_s = self._now()
        self.is_draining = True
        self._begun.set()

    def left_s(self, limit_s: float) -> float:
        """Of what a drain may take; 0 where none has begun."""
        return max(0.0, self._begun_s + limit_s - self._now())

    async def wait(self) -> None:
        await self._begun.wait()


def draining() -> Overloaded:
    return Overloaded("the proxy is about to stop", reason="draining", retry_after_s=RETRY_AFTER_S)
