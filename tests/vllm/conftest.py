"""Real vLLM on CPU, one P, one D and one R, started once for all tests here, and the real proxy before them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from ppd.proxy.config import Mode
from ppd.proxy.probes import probe
from ppd.proxy.workers import Role
from ppd.servers.process import EngineProcess
from ppd.servers.tiny_model import ensure_model
from ppd.servers.vllm import TINY_ARGS, TINY_NAME, EngineSpec, command
from ppd.servers.vllm_cpu import ensure, unsupported_reason
from proxy_client import ProxyClient, running_proxy

START_S = 600.0  # three engines side by side on a loaded machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/vllm/" in item.nodeid:
            item.add_marker(pytest.mark.vllm)


@dataclass
class Fleet(ProxyClient):
    """The proxy, and engines by role."""

    engines: dict[Role, EngineProcess] = field(default_factory=dict)
    urls: dict[Role, str] = field(default_factory=dict)

    async def counters(self, role: Role) -> dict[str, float]:
        """What the engine of this role has counted: see `ppd.proxy.scrape`."""
        return (await probe(self.session, self.urls[role])).metrics.counters

    async def mode(self, mode: Mode) -> None:
        status, _ = await self.admin("PUT", "/weights", {"mode": mode})
        assert status == 200


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    if reason := unsupported_reason():
        pytest.skip(f"real vLLM is not tested here: {reason}")
    environment = await asyncio.to_thread(ensure, print)
    model = await asyncio.to_thread(ensure_model, environment)
    logs = tmp_path_factory.mktemp("engines")
    async with AsyncExitStack() as stack:
        engines, urls = {}, {}
        for role in Role:
            spec = engine_spec(role, model, environment.python)
            urls[role] = f"http://{spec.address}"
            process = EngineProcess(command(spec), logs / f"{role}.log", name=role)
            engines[role] = await stack.enter_async_context(process)
        await asyncio.gather(*(engines[role].wait_healthy(urls[role], timeout_s=START_S) for role in Role))
        workers = tuple(f"{role}={url.removeprefix('http://')}" for role, url in urls.items())
        async with running_proxy(workers=workers, mode=Mode.ALWAYS_LOCAL) as (proxy, base_url, session):
            fleet = Fleet(proxy, base_url, session, TINY_NAME, engines, urls)
            await fleet.until(lambda: fleet.states() == {"P1": "up", "D1": "up", "R1": "up"}, limit_s=60)
            yield fleet


def engine_spec(role: Role, model: Path, python: Path) -> EngineSpec:
    return EngineSpec(
        role=role,
        model=str(model),
        served_model_name=TINY_NAME,
        port=free_port(),
        side_channel_port=free_port(),
        device="cpu",
        extra_args=TINY_ARGS,
        python=str(python),
    )


def free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port: int = probe_socket.getsockname()[1]
        return port
