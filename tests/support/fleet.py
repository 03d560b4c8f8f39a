"""Fleets of tests: engines that run, and the real proxy before them, which has found each of them healthy."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import aiohttp

from ppd.proxy.assembly import Proxy
from ppd.proxy.config import Mode
from ppd.proxy.fleet.ledger import LegWork
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role, WorkerId
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.core.counters import Trap
from ppd.servers.sim.engine.engine import SimEngine
from ppd.servers.sim.launch import running_engine
from tests.support.clock import LeapingTime
from tests.support.proxy import ProxyClient, running_proxy


async def start_engine(
    stack: AsyncExitStack, name: str, *, now: Callable[[], float] = time.monotonic, **changes: Any
) -> SimEngine:
    """A simulated engine, whose role is its name's first letter, on a real socket; it ends with the stack."""
    config = replace(SimConfig(role=Role(name[0]), keep_requests=1000), **changes)
    return await stack.enter_async_context(running_engine(config, now=now))


def kept_port(stack: AsyncExitStack) -> int:
    """A free port that stays this test's until the stack ends, also while nobody listens there: else the system could
    give it to a connection, or to another test's engine, before one that was killed is started again."""
    keeper = stack.enter_context(socket.socket())
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    return int(keeper.getsockname()[1])


def has_work(view: WorkerView) -> bool:
    """Whether anything of a turn is booked there, in any of the ledger's figures."""
    queued = (view.queued_prefill_tokens, view.prefills, view.queued_prefill_s)
    return any((view.inflight, view.decoding, view.context_tokens, view.reserved_tokens, *queued))


CONNECTOR = {"P": "", "D": "", "R": ",connector=nixl", "E": ""}
"""What says that a static worker has NIXL, as all engines of tests have."""


@dataclass
class Fleet(ProxyClient):
    """A proxy in this event loop, and simulated engines by name (P1, D1, ...). The proxy ends before the engines."""

    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    engines: dict[str, SimEngine] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic  # the engines'
    _lives: dict[str, AsyncExitStack] = field(default_factory=dict)
    started: list[tuple[str, SimEngine]] = field(default_factory=list)

    settings: ClassVar[Mapping[str, Any]] = {"mode": Mode.ALWAYS_LOCAL, "probe_interval_s": 0.2}
    engine_settings: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    @asynccontextmanager
    async def of(
        cls, names: str = "", *, engine: Mapping[str, Any] | None = None, **settings: Any
    ) -> AsyncIterator[Self]:
        """`async with Fleet.of("P1 D1 D2 R1", mode=...) as fleet`; settings of the engines as `engine={...}`."""
        async with AsyncExitStack() as stack, running_proxy(**{**cls.settings, **settings}) as running:
            fleet = cls(*running, stack=stack)
            for name in names.split():
                await fleet.add(name, **(engine or {}))
            yield fleet
            if found := fleet.misuses():
                raise AssertionError(f"used as it must not be: {found}")

    async def add(self, name: str, *, options: str = "", **changes: Any) -> SimEngine:
        """One more engine, known to the proxy as a static worker and found healthy."""
        engine = await self.start(name, **changes)
        await self.join(name, engine, engine.address, event_options(engine) + options)
        return engine

    async def start(self, name: str, **changes: Any) -> SimEngine:
        """An engine that the proxy is not told of."""
        life = self._lives[name] = await self.stack.enter_async_context(AsyncExitStack())
        settings = {**self.engine_settings, **changes}
        if "host" not in settings:
            settings.setdefault("port", kept_port(self.stack))
        engine = await start_engine(life, name, now=self.clock, **settings)
        self.started.append((name, engine))
        return engine

    async def join(self, name: str, engine: SimEngine, address: str, options: str = "") -> None:
        """address: where the proxy reaches it."""
        self.engines[name] = engine
        connector = "" if "connector=" in options else CONNECTOR[name[0]]
        worker = f"{name[0]}={address}{connector}{options}"
        status, _ = await self.admin("POST", "/workers", {"worker": worker})
        assert status == 201
        await self.until(lambda: self._state_at(address) == "up")

    async def settle(self) -> None:
        """The proxy has noted who came, which it does each second: from then on they answer for what they do."""
        await LeapingTime.of(asyncio.get_running_loop()).leap_over(1.1)

    async def kill(self, name: str) -> None:
        await self._lives[name].aclose()

    async def start_again(self, name: str) -> SimEngine:
        """Another process, as it were, at the address of one that was killed."""
        dead, life = self.engines[name], self._lives[name]
        config = replace(dead.config, port=dead.listener.port)
        engine = self.engines[name] = await life.enter_async_context(running_engine(config, now=self.clock))
        self.started.append((name, engine))
        return engine

    def misuses(self) -> list[tuple[str, dict[Trap, int]]]:
        """What engines have counted that would have killed a real one, or made its answer wrong; of the dead too.

        A case that means to do so clears the counter.
        """
        return [(name, dict(engine.counters.traps)) for name, engine in self.started if engine.counters.traps]

    def state(self, name: str) -> str:
        return self._state_at(self.engines[name].address)

    def _state_at(self, address: str) -> str:
        return next((view.state for view in self.proxy.state.registry.views() if view.id == address), "absent")

    def idle(self) -> bool:
        """Nothing runs, nothing is reserved, nothing is pinned."""
        views = self.proxy.state.registry.views()
        busy = any(map(has_work, views))
        pinned = any(engine.pinned for engine in self.engines.values())
        running = any(list(engine.scheduler.sequences) for engine in self.engines.values())
        return not (busy or pinned or running or self.proxy.state.handoffs.outstanding(self.proxy.state.now()))


@contextmanager
def crowded(proxy: Proxy, worker_id: WorkerId) -> Iterator[None]:
    """The proxy's books say that one stream more would be too slow there."""
    registry, work = proxy.state.registry, LegWork(context_tokens=1_800_000)
    use = registry.begin(worker_id, work, 0.0)
    assert use is not None, "the worker is there"
    try:
        yield
    finally:
        use.end(work)
        registry.use_changed(worker_id, use, legs=True)


def event_options(engine: SimEngine) -> str:
    """Of a worker: where it publishes KV events, if it does."""
    if engine.events is None:
        return ""
    replay = engine.events.replay_endpoint
    return f",events={engine.events.endpoint}" + (f",replay={replay}" if replay else "")


def static_workers(addresses: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """The proxy's setting `workers`. addresses: each with its worker's name or role."""
    return tuple(f"{name[0]}={address}{CONNECTOR[name[0]]}" for name, address in addresses)


@asynccontextmanager
async def proxy_before(
    addresses: Iterable[tuple[str, str]], *, limit_s: float = 60, **settings: Any
) -> AsyncIterator[tuple[Proxy, str, aiohttp.ClientSession]]:
    """As `running_proxy`, with static workers, which it has found healthy. addresses: as of `static_workers`."""
    workers = static_workers(addresses)
    async with running_proxy(workers=workers, **settings) as running:
        client = ProxyClient(*running)
        await client.until(lambda: list(client.states().values()) == ["up"] * len(workers), limit_s)
        yield running
