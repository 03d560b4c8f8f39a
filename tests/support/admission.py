"""An admission in front of counted slots, and its clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from ppd.proxy.admission.gate import Admission
from ppd.proxy.admission.queue import Ticket
from ppd.proxy.errors import Overloaded


async def settle() -> None:
    """Everything that can happen now has happened."""
    for _ in range(40):
        await asyncio.sleep(0)


class Door:
    """An admission in front of workers with so many slots for each need, and what its clients saw."""

    def __init__(
        self, *, inside: int = 1, queue: int = 10, timeout_s: float = 30.0, wait_s: float = 0.0, **slots: int
    ) -> None:
        self.refused: list[str] = []
        self.waited_s: list[float] = []
        self.admission = Admission(
            max_inflight=inside,
            queue_limit=queue,
            queue_timeout_s=timeout_s,
            queue_wait_s=wait_s,
            now=asyncio.get_running_loop().time,
            on_refused=self.refused.append,
            on_waited=self.waited_s.append,
        )
        self.told = (0, 0)  # how many are inside and wait, as other processes of the proxy know it
        self.admission.replicated = self
        self.slots = slots
        self.used: Counter[str] = Counter()
        self.log: list[str] = []
        self.clients: list[Client] = []

    def catch_up(self) -> None: ...

    def changed(self) -> None:
        self.told = self.admission.inside, self.admission.waiting

    def fits(self, needs: str) -> bool:
        return self.used[needs] < self.slots.get(needs, 1000)

    def client(self, name: str, **fields: Any) -> Client:
        client = Client(self, name, **fields)
        self.clients.append(client)
        return client

    async def close(self) -> None:
        """Everybody leaves, and nothing is left."""
        self.admission.close_down()
        for client in self.clients:
            client.orders.put_nowait(None)
        await asyncio.gather(*(client.task for client in self.clients), return_exceptions=True)
        await asyncio.sleep(1000.0)  # no timer is left to do harm
        assert (self.admission.inside, self.admission.waiting) == (0, 0)
        assert not self.admission._futures
        assert not self.admission._admitted
        assert not self.used.total()


class Client:
    """A turn: gets in, takes a slot, and does as it is told."""

    def __init__(self, door: Door, name: str, *, needs: str = "m", **fields: Any) -> None:
        self.name = name
        self.door = door
        self.needs = needs
        self.orders: asyncio.Queue[float | None] = asyncio.Queue()
        self.is_inside = False
        self.is_moved = False
        self.refusal: Overloaded | None = None
        self.ticket = Ticket(
            tenant=fields.pop("tenant", name[0]),
            arrived_s=asyncio.get_running_loop().time(),
            needs=needs,
            fits=lambda: door.fits(needs),
            **fields,
        )
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            permit = await self.door.admission.enter(self.ticket)
            try:
                while (pause_s := await self._at_work()) is not None:
                    not_before_s = asyncio.get_running_loop().time() + pause_s
                    await permit.wait_again(not_before_s, is_moved=self.is_moved)
            finally:
                permit.release()
                permit.release()
        except Overloaded as exc:
            self.refusal = exc
            self.door.log.append(f"{self.name}: {exc.reason}")

    async def _at_work(self) -> float | None:
        """For how long to go back into the queue; None: it is over."""
        self.door.used[self.needs] += 1
        self.is_inside = True
        self.door.log.append(self.name)
        try:
            return await self.orders.get()
        finally:
            self.is_inside = False
            self.door.used[self.needs] -= 1

    def leave(self) -> None:
        self.orders.put_nowait(None)

    def wait_again(self, pause_s: float, *, is_moved: bool = False) -> None:
        self.is_moved = is_moved
        self.orders.put_nowait(pause_s)


def ticket(*, tenant: str = "t", needs: str = "m", priority: int = 0) -> Ticket:
    return Ticket(tenant=tenant, priority=priority, arrived_s=1000.0, needs=needs, fits=lambda: True)
