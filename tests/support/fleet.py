"""A fleet behind the real proxy, one of whose D can die and come back."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from ppd.proxy.fleet.worker import Role
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.engine.engine import SimEngine
from ppd.servers.sim.launch import running_engine


class Mortal:
    """A D that can be killed and started again at the same address."""

    def __init__(self, fleet: Any, stack: AsyncExitStack) -> None:
        self._fleet = fleet
        self._outer = stack
        self._inner = AsyncExitStack()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        stack.push_async_callback(self.kill)

    async def start(self) -> SimEngine:
        config = replace(SimConfig(role=Role.DECODE, time_scale=0.2, shutdown_s=0.1), port=self._port)
        return await self._inner.enter_async_context(running_engine(config))

    async def kill(self) -> None:
        await self._inner.aclose()

    def state(self) -> str:
        return str(self._fleet.states().get("D2", "absent"))


@asynccontextmanager
async def mortal_fleet(start_fleet: Any) -> AsyncIterator[tuple[Any, Mortal]]:
    """1P_2D, of which D2 can die."""
    async with start_fleet("P1 D1", engine={"time_scale": 0.2}) as fleet, AsyncExitStack() as stack:
        mortal = Mortal(fleet, stack)
        engine = await mortal.start()
        status, _ = await fleet.admin("POST", "/workers", {"worker": f"D={engine.address}"})
        assert status == 201
        await fleet.until(lambda: mortal.state() == "up")
        yield fleet, mortal
