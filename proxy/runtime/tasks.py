"""The proxy's background tasks, restarted when they fail, and the drain that ends a proxy.

A drain is a switch that a signal sets once. It is read wherever new work is accepted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from ..errors import Overloaded

log = logging.getLogger(__name__)

RESTART_S = 1.0


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

    def __init__(self) -> None:
        self.is_announced = False  # to load balancers; turns may still be taken
        self._begun = asyncio.Event()
        self.is_cut = False  # the time limit is over: the proxy closes connections, their clients do not

    @property
    def is_draining(self) -> bool:
        return self._begun.is_set()

    def announce(self) -> None:
        self.is_announced = True

    def begin(self) -> None:
        self.announce()
        self._begun.set()

    async def wait(self) -> None:
        await self._begun.wait()


def draining() -> Overloaded:
    return Overloaded("the proxy is about to stop", reason="draining", retry_after_s=RETRY_AFTER_S)
