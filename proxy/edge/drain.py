"""Whether this process is about to end: one switch, set once by a signal, read wherever new work is taken."""

from __future__ import annotations

import asyncio


class Drain:
    """Once begun, new turns are refused and those under way go on; there is no way back."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        return self._begun.is_set()

    def begin(self) -> None:
        self._begun.set()

    async def wait(self) -> None:
        """Until it has begun."""
        await self._begun.wait()
