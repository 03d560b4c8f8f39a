"""Sidecars that run in this event loop, and fleets whose D have one each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ppd.proxy.config import ProxyConfig
from ppd.proxy.downstream.serve import listen
from ppd.servers.sidecar.allow_list import AllowList
from ppd.servers.sidecar.failed_legs import FailurePolicy, OnFailure
from ppd.servers.sidecar.sidecar import FIXED, Sidecar, SidecarOptions, assemble, serve
from ppd.servers.sim.engine.engine import SimEngine
from tests.support import proxy
from tests.support.fleet import Fleet

LOCALHOST = "127.0.0.0/8"
ALIKE = ("connect_timeout_s", "prefill_timeout_s")  # are the proxy's in a fleet's sidecars too


@dataclass(frozen=True, slots=True)
class RunningSidecar:
    sidecar: Sidecar
    address: str  # host:port
    stop: asyncio.Event
    serving: asyncio.Task[None]


@asynccontextmanager
async def running_sidecar(
    engine: str,
    *,
    settings: Mapping[str, Any] | None = None,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    **options: Any,
) -> AsyncIterator[RunningSidecar]:
    """On a free port before this engine, host:port. settings: of the config; options: of the sidecar."""
    plane = proxy.DEFAULTS["data_plane"]
    config = ProxyConfig(**{"port": 0, "data_plane": plane, "shutdown_timeout_s": 1.0, **FIXED, **(settings or {})})
    lists = {"allow_list": AllowList(LOCALHOST), "encoder_list": AllowList(LOCALHOST, "encoder")}
    options = {"engine": engine, **lists, **options}
    sidecar = assemble(SidecarOptions(config=config, **options), pause=pause)
    listening, stop = listen(config), asyncio.Event()
    serving = asyncio.create_task(serve(sidecar, listening, stop))
    try:
        yield RunningSidecar(sidecar, f"127.0.0.1:{listening.getsockname()[1]}", stop, serving)
    finally:
        stop.set()
        await serving


@dataclass
class SidecarFleet(Fleet):
    """A proxy that knows each D by its sidecar; `engines` are those behind."""

    sidecars: dict[str, RunningSidecar] = field(default_factory=dict)

    sidecar_options: ClassVar[Mapping[str, Any]] = {}  # of `running_sidecar`

    async def join(self, name: str, engine: SimEngine, address: str, options: str = "") -> None:
        if name[0] == "D":
            life = self._lives.setdefault(f"{name}'s sidecar", AsyncExitStack())
            await self.stack.enter_async_context(life)
            limits = {key: getattr(self.proxy.settings.config, key) for key in ALIKE}
            options_here = {"settings": limits, **self.sidecar_options}
            made = await life.enter_async_context(running_sidecar(engine.address, **options_here))
            self.sidecars[name] = made
            address, options = made.address, f"{options},sidecar=true"
        await super().join(name, engine, address, options)

    def state(self, name: str) -> str:
        return self._state_at(self.sidecars[name].address) if name in self.sidecars else super().state(name)

    def idle(self) -> bool:
        states = [made.sidecar.state for made in self.sidecars.values()]
        return super().idle() and not any(state.handoffs.outstanding(state.now()) for state in states)


class StrictFleet(SidecarFleet):
    """Its sidecars do nothing about a P that fails: the proxy does."""

    sidecar_options: ClassVar[Mapping[str, Any]] = {"policy": FailurePolicy(OnFailure.ERROR)}
