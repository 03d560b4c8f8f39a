"""The proxy's background tasks: owned, named, and restarted when they fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

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
