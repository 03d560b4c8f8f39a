"""Real vLLM on CPU, one P, one D and one R, started once for all tests here, and the real proxy before them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.eviction.engines import tiny_engine
from benchmarks.network.fault_link import FaultLink
from ppd.proxy.config import Mode
from ppd.proxy.fleet.worker import Load, Role
from ppd.proxy.health.probe import probe
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.vllm.cpu_install import Environment, InstallError, ensure, unsupported_reason
from ppd.servers.vllm.launch import TINY_NAME, EngineSpec, Launch, command
from ppd.servers.vllm.mooncake_parts import ensure_mooncake, environment_of
from ppd.servers.vllm.tiny_model import ensure_model
from tests.support.fleet import proxy_before
from tests.support.proxy import ProxyClient
from tests.vllm.nursery.launches import READ_AT_LOAD, Born, nursery

KEEPS_S = 240
START_S = 600.0  # three engines side by side on a loaded machine
READS_BACK = {Role.PREFILL, Role.REPLICA}  # R as a D: the D of these tests keeps nothing after its answers


DESTRUCTIVE = ("test_abandoned", "test_canary", "test_expired", "test_killed")
"""They harm the engines that all tests here share, and so run after all others, in this order."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        if "tests/vllm/" in item.nodeid:
            item.add_marker(pytest.mark.vllm)
    yield  # marks select, and fixtures put in order
    items.sort(key=harm)


def harm(item: pytest.Item) -> int:
    """0: none. ValueError: a file in destructive/ that `DESTRUCTIVE` does not name."""
    return 1 + DESTRUCTIVE.index(item.path.stem) if "tests/vllm/destructive/" in item.nodeid else 0


@dataclass
class Streamed:
    """A streamed answer as its client has it when it ends, or when the client leaves."""

    status: int = 0
    text: str = ""
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    done: bool = False

    def take(self, line: bytes) -> None:
        name, _, data = line.strip().partition(b": ")
        self.done = self.done or data == b"[DONE]"
        if name != b"data" or data == b"[DONE]":
            return
        event = json.loads(data)
        self.error = event.get("error", self.error)
        self.usage = event.get("usage", self.usage)
        for choice in event.get("choices", ()):
            self.text += choice["delta"].get("content") or ""


@dataclass
class StreamClient(ProxyClient):
    """Reads streams too."""

    async def stream(self, messages: list[dict[str, Any]], seen: Streamed | None = None, **body: Any) -> Streamed:
        """The whole stream; `seen` grows meanwhile."""
        seen = seen or Streamed()
        body = {"model": self.model, "messages": messages, "max_tokens": 24, "temperature": 0, "stream": True, **body}
        async with self.session.post(f"{self.base_url}/v1/chat/completions", json=body) as response:
            seen.status = response.status
            async for line in response.content:
                seen.take(line)
        return seen

    def new_stream(self) -> Streamed:
        """To look into while it grows: hand it to `stream`."""
        return Streamed()

    async def eventually(self, holds: Callable[[], Awaitable[bool]], limit_s: float = 60.0) -> None:
        """Waits for something that has to be asked for."""
        async with asyncio.timeout(limit_s):
            while not await holds():
                await asyncio.sleep(0.02)


def with_env(launch: Launch, env: dict[str, str]) -> Launch:
    return Launch(launch.argv, launch.env | env)


@dataclass
class VllmFleet(StreamClient):
    """The proxy, and engines by role."""

    engines: dict[Role, EngineProcess] = field(default_factory=dict)
    urls: dict[Role, str] = field(default_factory=dict)
    specs: dict[Role, EngineSpec] = field(default_factory=dict)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    env: dict[str, str] = field(default_factory=dict)  # of the engines, beside their specs'
    born: Born = field(kw_only=True)

    async def start_again(self, role: Role) -> None:
        """Another process at the address of one that was killed; its cache is empty."""
        log_path = self.engines[role].log_path.with_name(f"{role}-again.log")
        process = EngineProcess(self.born(with_env(command(self.specs[role]), self.env)), log_path, name=role)
        self.engines[role] = await self.stack.enter_async_context(process)
        await process.wait_healthy(self.urls[role], timeout_s=START_S)

    async def counters(self, role: Role) -> dict[str, float]:
        """What the engine of this role has counted: see `ppd.proxy.fleet.engine_metrics`."""
        return (await probe(self.session, self.urls[role])).metrics.counters

    async def mode(self, mode: Mode) -> None:
        status, _ = await self.admin("PUT", "/weights", {"mode": mode})
        assert status == 200

    async def load(self, role: Role) -> Load:
        return (await probe(self.session, self.urls[role])).metrics.load

    async def computes(self, role: Role) -> bool:
        return (await self.load(role)).running > 0

    async def straight(self, role: Role, messages: list[dict[str, Any]], **body: Any) -> str:
        """What the engine of this role answers when it is asked without a proxy."""
        body = {"model": self.model, "messages": messages, "max_tokens": 24, "temperature": 0, **body}
        async with self.session.post(f"{self.urls[role]}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            text: str = (await response.json())["choices"][0]["message"]["content"]
            return text

    @asynccontextmanager
    async def beside(self, *linked: Role, **settings: Any) -> AsyncIterator[Beside]:
        """Another proxy before the same engines; those that are `linked` it reaches over a link that can fail."""
        async with AsyncExitStack() as stack:
            addresses = {role: url.removeprefix("http://") for role, url in self.urls.items()}
            links = {}
            for role in linked:
                spec = self.specs[role]
                links[role] = await stack.enter_async_context(FaultLink(spec.host, spec.port))
                addresses[role] = links[role].address
            settings = {"mode": Mode.ALWAYS_SPLIT, "probe_interval_s": 0.5, **settings}
            running = await stack.enter_async_context(proxy_before(addresses.items(), limit_s=60, **settings))
            yield Beside(*running, self.model, links)


@dataclass
class Beside(StreamClient):
    """Another proxy before the fleet's engines, and the links between them."""

    links: dict[Role, FaultLink] = field(default_factory=dict)

    def inflight(self, role: Role) -> int:
        return sum(view.inflight for view in self.proxy.state.registry.views() if view.role is role)

    def is_idle(self) -> bool:
        """This proxy holds nothing and waits for nothing."""
        views, state = self.proxy.state.registry.views(), self.proxy.state
        busy = any(view.inflight or view.queued_prefill_tokens for view in views)
        return not busy and state.handoffs.outstanding(state.now()) == 0


ROLES = (Role.PREFILL, Role.DECODE, Role.REPLICA)


@pytest.fixture(scope="session")
def environment() -> Environment:
    if reason := unsupported_reason():
        pytest.skip(f"real vLLM is not tested here: {reason}")
    return ensure(print)


@pytest.fixture(scope="session")
def tiny_spec(environment: Environment) -> Callable[[Role], EngineSpec]:
    """An engine of this role with the tiny model, on ports of its own."""
    model = ensure_model(environment)
    return lambda role: tiny_engine(role, model, environment.python)


@pytest.fixture(scope="session")
def libraries(environment: Environment) -> dict[str, str]:
    """Where Mooncake's are found: read when a process starts, so one nursery for all engines is told of them."""
    try:
        return {READ_AT_LOAD: environment_of(ensure_mooncake(environment, print))[READ_AT_LOAD]}
    except InstallError:  # the tests of Mooncake say so
        return {}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def born(
    tiny_spec: Callable[[Role], EngineSpec], libraries: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Born]:
    """The launch of an engine that starts in seconds, in place of the usual one."""
    usual = with_env(command(tiny_spec(Role.PREFILL)), libraries)
    async with nursery(usual, tmp_path_factory.mktemp("nursery")) as by_nursery:
        yield by_nursery


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet(
    tiny_spec: Callable[[Role], EngineSpec],
    born: Born,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[VllmFleet]:
    logs = tmp_path_factory.mktemp("engines")
    async with AsyncExitStack() as stack:
        engines, urls, specs = {}, {}, {}
        for role in ROLES:
            spec = tiny_spec(role)
            specs[role] = spec = replace(spec, reads_back=role in READS_BACK, keeps_s=KEEPS_S)
            urls[role] = f"http://{spec.address}"
            process = EngineProcess(born(command(spec)), logs / f"{role}.log", name=role)
            engines[role] = await stack.enter_async_context(process)
        await asyncio.gather(*(engines[role].wait_healthy(urls[role], timeout_s=START_S) for role in ROLES))
        addresses = [(role, spec.address) for role, spec in specs.items()]
        async with proxy_before(addresses, limit_s=60, mode=Mode.ALWAYS_LOCAL) as running:
            yield VllmFleet(*running, TINY_NAME, engines, urls, specs, stack, born=born)
