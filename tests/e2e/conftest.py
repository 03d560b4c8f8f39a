"""A fleet of simulated engines and the real proxy, in one event loop, on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ppd.proxy.config import Mode
from ppd.proxy.fleet.worker import Role
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.engine.engine import SimEngine
from ppd.servers.sim.launch import running_engine
from tests.support.proxy import ProxyClient, running_proxy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e/" in item.nodeid:
            item.add_marker(pytest.mark.e2e)


@dataclass
class Fleet(ProxyClient):
    """The proxy, and engines by name (P1, D1, ...)."""

    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    engines: dict[str, SimEngine] = field(default_factory=dict)

    async def add(self, name: str, **changes: Any) -> SimEngine:
        """One more engine, known to the proxy as a static worker and found healthy."""
        config = replace(SimConfig(role=Role(name[0]), keep_requests=1000), **changes)
        engine = await self.stack.enter_async_context(running_engine(config))
        self.engines[name] = engine
        status, _ = await self.admin("POST", "/workers", {"worker": f"{name[0]}={engine.address}"})
        assert status == 201
        await self.until(lambda: self.state(name) == "up")
        return engine

    def state(self, name: str) -> str:
        address = self.engines[name].address
        return next((view.state for view in self.proxy.state.registry.views() if view.id == address), "absent")

    def idle(self) -> bool:
        """Nothing runs, nothing is reserved, nothing is pinned."""
        views = self.proxy.state.registry.views()
        busy = any(view.inflight or view.queued_prefill_tokens for view in views)
        pinned = any(engine.pinned for engine in self.engines.values())
        running = any(list(engine.scheduler.sequences) for engine in self.engines.values())
        return not (busy or pinned or running or self.proxy.state.ledger.outstanding(self.proxy.state.now()))


@pytest.fixture
def start_fleet() -> Callable[..., Any]:
    """`async with start_fleet("P1 D1 D2 R1", mode=...) as fleet`; engine settings as `engine={...}`."""

    @asynccontextmanager
    async def start(names: str, *, engine: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Fleet]:
        defaults: dict[str, Any] = {"mode": Mode.ALWAYS_LOCAL, "probe_interval_s": 0.2}
        async with (
            AsyncExitStack() as stack,
            running_proxy(**(defaults | settings)) as (proxy, base_url, session),
        ):
            fleet = Fleet(proxy, base_url, session, stack=stack)
            for name in names.split():
                await fleet.add(name, **(engine or {}))
            yield fleet

    return start
