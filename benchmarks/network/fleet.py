"""One P, two D and the proxy, each a process of its own, with a network between the proxy and the workers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from ppd.servers.fleet.ports import free_ports
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.vllm.launch import Launch

from .fault_link import Conditions

WORKERS = ("P1", "D1", "D2")
HOST = "127.0.0.1"
ADMIN_KEY = "operator"
_STARTS_S = 60.0
_ENGINE_FLAGS = ("--num-blocks", "4096", "--max-model-len", "16384", "--time-scale", "0.15")
# Short, so that the proxy notices a fault of two seconds.
PROXY_FLAGS = {
    "probe-interval-s": 0.5,
    "connect-timeout-s": 1.0,
    "prefill-timeout-s": 3.0,
    "first-event-timeout-s": 3.0,
    "answer-timeout-s": 10.0,
    "idle-timeout-s": 3.0,
    "warm-up-s": 2.0,
    "breaker-open-s": 1.0,
}


class NetworkKind(Protocol):
    name: str

    async def open(self) -> None: ...

    async def place(self, worker: str) -> tuple[str, tuple[str, ...]]:
        """The host that a worker listens on, and the prefix of its command line."""
        ...

    async def connect(self, worker: str, port: int) -> str:
        """The address at which the proxy reaches it."""
        ...

    async def apply(self, conditions: Conditions) -> None: ...

    async def cut_off(self, worker: str) -> None: ...

    async def heal(self, worker: str) -> None: ...

    async def reset(self) -> None:
        """End every connection between the proxy and the workers with RST."""
        ...


@dataclass(frozen=True, slots=True)
class ReachedFleet:
    url: str
    session: aiohttp.ClientSession

    async def register(self, role: str, address: str) -> None:
        await self._admin("POST", "/workers", {"worker": f"{role}={address}"})

    async def all_up(self) -> None:
        async with asyncio.timeout(_STARTS_S):
            while True:
                workers = (await self._admin("GET", "/workers"))["workers"]
                if len(workers) == len(WORKERS) and all(worker["state"] == "up" for worker in workers):
                    return
                await asyncio.sleep(0.1)

    async def retries(self) -> int:
        async with self.session.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        counts = [line for line in lines if line.startswith('ppd_retries_total{result="retried"}')]
        return int(sum(float(line.rpartition(" ")[2]) for line in counts))

    async def _admin(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"X-Admin-Key": ADMIN_KEY}
        async with self.session.request(method, f"{self.url}/admin{path}", json=body, headers=headers) as answer:
            answer.raise_for_status()
            return await answer.json()


@asynccontextmanager
async def running_fleet(network: NetworkKind, folder: Path) -> AsyncIterator[ReachedFleet]:
    port, *ports = free_ports(1 + len(WORKERS))
    flags = [item for name, value in PROXY_FLAGS.items() for item in (f"--{name}", str(value))]
    argv = (*_ppd("serve"), "--port", str(port), "--heartbeat-port", "0", *flags)
    async with AsyncExitStack() as stack:
        await network.open()
        session = await stack.enter_async_context(aiohttp.ClientSession())
        fleet = ReachedFleet(f"http://{HOST}:{port}", session)
        proxy = EngineProcess(Launch(argv, {"PPD_ADMIN_KEY": ADMIN_KEY}), folder / "proxy.log", name="proxy")
        await stack.enter_async_context(proxy)
        places = {name: (await network.place(name), own) for name, own in zip(WORKERS, ports, strict=True)}
        engines = [
            await stack.enter_async_context(_engine(name, host, own, prefix, folder))
            for name, ((host, prefix), own) in places.items()
        ]
        await proxy.wait_healthy(fleet.url, timeout_s=_STARTS_S)
        for engine, (name, ((host, _), own)) in zip(engines, places.items(), strict=True):
            await engine.wait_healthy(f"http://{host}:{own}", timeout_s=_STARTS_S)
            await fleet.register(name[0], await network.connect(name, own))
        await fleet.all_up()
        yield fleet


def _engine(name: str, host: str, port: int, prefix: tuple[str, ...], folder: Path) -> EngineProcess:
    argv = (*prefix, *_ppd("sim"), "--role", name[0], "--host", host, "--port", str(port), *_ENGINE_FLAGS)
    return EngineProcess(Launch(argv), folder / f"{name}.log", name=name)


def _ppd(command: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "ppd.servers", command)
