"""A fleet of simulated engines and the real proxy, in one event loop, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from ppd.proxy.app import Proxy, assemble
from ppd.proxy.config import Mode, ProxyConfig
from ppd.proxy.serving import listen, serve
from ppd.proxy.settings import Settings
from ppd.proxy.workers import Role
from ppd.servers.sim.config import SimConfig
from ppd.servers.sim.engine import SimEngine
from ppd.servers.sim.running import running_engine

ADMIN_KEY = "operator"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e/" in item.nodeid:
            item.add_marker(pytest.mark.e2e)


@dataclass(slots=True)
class Turn:
    """One answer as a client sees it."""

    status: int
    headers: Mapping[str, str]
    body: Any
    text: str

    @property
    def route(self) -> str:
        return self.headers.get("X-PPD-Route", "")

    @property
    def reason(self) -> str:
        return self.headers.get("X-PPD-Reason", "")


@dataclass(slots=True)
class Chat:
    """A conversation that grows by what is answered."""

    fleet: TestFleet
    messages: list[dict[str, Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    async def say(self, text: str, **body: Any) -> Turn:
        self.messages.append({"role": "user", "content": text})
        turn = await self.fleet.chat(self.messages, headers=self.headers, **body)
        if turn.status == 200:
            self.messages.append({"role": "assistant", "content": turn.text})
        return turn


@dataclass(slots=True)
class TestFleet:
    """Engines by name (P1, D1, ...), the proxy, and a client session."""

    __test__ = False

    proxy: Proxy
    base_url: str
    session: aiohttp.ClientSession
    engines: dict[str, SimEngine]
    stack: AsyncExitStack

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Turn:
        async with self.session.post(self.base_url + path, json=body, headers=headers) as response:
            data = await response.read()
            return Turn(response.status, response.headers, await response.json(content_type=None) if data else None, "")

    async def chat(self, messages: list[dict[str, Any]], headers: Mapping[str, str] | None = None, **body: Any) -> Turn:
        body = {"model": "sim", "messages": messages, "max_tokens": 24, **body}
        turn = await self.post("/v1/chat/completions", body, headers)
        if turn.status == 200:
            turn.text = turn.body["choices"][0]["message"]["content"]
        return turn

    def conversation(self, **headers: str) -> Chat:
        return Chat(self, headers={name.replace("_", "-"): value for name, value in headers.items()})

    async def admin(self, method: str, path: str, body: Any = None, key: str = ADMIN_KEY) -> tuple[int, Any]:
        async with self.session.request(
            method, f"{self.base_url}/admin{path}", json=body, headers={"X-Admin-Key": key}
        ) as response:
            return response.status, await response.json()

    async def receipt(self, turn: Turn) -> dict[str, Any]:
        _, receipt = await self.admin("GET", f"/requests/{turn.headers['X-Request-Id']}")
        assert isinstance(receipt, dict)
        return receipt

    async def metric(self, sample: str) -> float:
        """The value of one Prometheus sample, named as it is printed; 0 where there is none."""
        async with self.session.get(f"{self.base_url}/metrics") as response:
            for line in (await response.text()).splitlines():
                name, _, value = line.rpartition(" ")
                if name == sample:
                    return float(value)
        return 0.0

    async def add(self, name: str, **changes: Any) -> SimEngine:
        """One more engine, known to the proxy as a static worker and found healthy."""
        engine = await self.stack.enter_async_context(running_engine(sim_config(name, **changes)))
        self.engines[name] = engine
        status, _ = await self.admin("POST", "/workers", {"worker": f"{name[0]}={engine.address}"})
        assert status == 201
        await self.until(lambda: self.state(name) == "up")
        return engine

    def state(self, name: str) -> str:
        address = self.engines[name].address
        return next((view.state for view in self.proxy.state.registry.views() if view.id == address), "absent")

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for something that another task brings about; fails after 20 s."""
        async with asyncio.timeout(20):
            while not holds():  # noqa: ASYNC110 - the state of other tasks
                await asyncio.sleep(0.005)

    def idle(self) -> bool:
        """Nothing runs, nothing is reserved, nothing is pinned."""
        views = self.proxy.state.registry.views()
        busy = any(view.inflight or view.queued_prefill_tokens for view in views)
        pinned = any(engine.pinned for engine in self.engines.values())
        running = any(list(engine.scheduler.sequences) for engine in self.engines.values())
        return not (busy or pinned or running or len(self.proxy.state.ledger))


def sim_config(name: str, **changes: Any) -> SimConfig:
    return replace(SimConfig(role=Role(name[0]), keep_requests=1000), **changes)


Start = Callable[..., Any]


@pytest.fixture
def start_fleet() -> Start:
    """`async with start_fleet("P1 D1 D2 R1", mode=...) as fleet`; engine settings as `engine={...}`."""

    @asynccontextmanager
    async def start(names: str, *, engine: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[TestFleet]:
        defaults: dict[str, Any] = {
            "port": 0,
            "heartbeat_port": 0,
            "admin_key": ADMIN_KEY,
            "mode": Mode.ALWAYS_LOCAL,
            "probe_interval_s": 0.2,
            "shutdown_timeout_s": 1.0,
        }
        config = ProxyConfig(**(defaults | settings))
        async with AsyncExitStack() as stack:
            proxy = assemble(Settings(config))
            base_url = await stack.enter_async_context(running_proxy(proxy, config))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            fleet = TestFleet(proxy, base_url, session, {}, stack)
            for name in names.split():
                await fleet.add(name, **(engine or {}))
            yield fleet

    return start


@asynccontextmanager
async def running_proxy(proxy: Proxy, config: ProxyConfig) -> AsyncIterator[str]:
    """The proxy's base URL while it serves."""
    listening = listen(config)
    port = listening.getsockname()[1]
    stop = asyncio.Event()
    task = asyncio.create_task(serve(proxy, listening, stop))
    try:
        async with aiohttp.ClientSession() as session:
            asking = asyncio.create_task(session.get(f"http://127.0.0.1:{port}/health"))
            await asyncio.wait({task, asking}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                asking.cancel()
                task.result()
            assert (await asking).status == 200
        yield f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        await task
        listening.close()
