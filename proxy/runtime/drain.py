"""Whether this process is about to end: one switch, set once by a signal, read wherever new work is taken."""

from __future__ import annotations

import asyncio

from ..errors import Overloaded

RETRY_AFTER_S = 5.0


class Drain:
    """Once begun, new turns are refused and those under way go on; there is no way back."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self.is_cut = False  # its limit has come: who leaves now has not left, but was sent away

    @property
    def is_draining(self) -> bool:
        return self._begun.is_set()

    def begin(self) -> None:
        self._begun.set()

    async def wait(self) -> None:
        """Until it has begun."""
        await self._begun.wait()


def draining() -> Overloaded:
    """What is said instead of an answer."""
    return Overloaded("the proxy is about to stop", reason="draining", retry_after_s=RETRY_AFTER_S)
