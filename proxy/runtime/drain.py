"""Draining: a switch that a signal sets once, read wherever new work is accepted."""

from __future__ import annotations

import asyncio

from ..errors import Overloaded

RETRY_AFTER_S = 5.0


class Drain:
    """Once begun, new turns are refused and those under way go on; it never ends."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self.is_cut = False  # the time limit is over: the proxy closes connections, their clients do not

    @property
    def is_draining(self) -> bool:
        return self._begun.is_set()

    def begin(self) -> None:
        self._begun.set()

    async def wait(self) -> None:
        await self._begun.wait()


def draining() -> Overloaded:
    return Overloaded("the proxy is about to stop", reason="draining", retry_after_s=RETRY_AFTER_S)
