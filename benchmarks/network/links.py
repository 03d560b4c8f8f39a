"""A network of fault links, one before each worker. The engines' side channels do not pass through them."""

from __future__ import annotations

from contextlib import AsyncExitStack

from .fault_link import Conditions, FaultLink

HOST = "127.0.0.1"


class Links:
    name = "fault link"

    def __init__(self, stack: AsyncExitStack, seed: int) -> None:
        self._stack = stack
        self._seed = seed
        self._links: dict[str, FaultLink] = {}

    async def open(self) -> None:
        pass

    async def place(self, worker: str) -> tuple[str, tuple[str, ...]]:
        return HOST, ()

    async def connect(self, worker: str, port: int) -> str:
        link = FaultLink(HOST, port, seed=self._seed + len(self._links))
        self._links[worker] = await self._stack.enter_async_context(link)
        return link.address

    async def apply(self, conditions: Conditions) -> None:
        for link in self._links.values():
            link.conditions = conditions

    async def cut_off(self, worker: str) -> None:
        await self._links[worker].partition()

    async def heal(self, worker: str) -> None:
        self._links[worker].heal()

    async def reset(self) -> None:
        for link in self._links.values():
            link.reset()
