"""Real vLLM engines with little room for KV, each a process of its own, and `ppd serve` before them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from ppd.proxy.errors import PPDError
from ppd.proxy.fleet.worker import Role
from ppd.servers.fleet.ports import HOST, free_ports
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.vllm.cpu_install import ensure
from ppd.servers.vllm.launch import TINY_ARGS, TINY_NAME, EngineSpec, command
from ppd.servers.vllm.launch import Launch as Program
from ppd.servers.vllm.tiny_model import ensure_model

BLOCK = 32  # tokens, the least on CPUs
ADMIN_KEY = "operator"
COUNTS_EVICTIONS = ("--kv-cache-metrics", "--kv-cache-metrics-sample", "1")
_STARTS_S = 600.0  # several engines side by side on a loaded machine
_UP_S = 60.0
_IDLE_S = 60.0  # twice a lease of NIXL's


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Of one engine, in blocks; the first is never used. 0: all that the tiny model's usual arguments say."""

    blocks: int = 0

    @property
    def tokens(self) -> int:
        return (self.blocks - 1) * BLOCK

    @property
    def args(self) -> tuple[str, ...]:
        if not self.blocks:
            return ()
        return ("--max-model-len", str(self.tokens), "--num-gpu-blocks-override", str(self.blocks))


def tiny_engine(role: Role, model: Path, python: Path, *extra_args: str) -> EngineSpec:
    """On free ports of this machine."""
    port, side_channel_port = free_ports(2)
    return EngineSpec(
        role=role,
        model=str(model),
        served_model_name=TINY_NAME,
        port=port,
        side_channel_port=side_channel_port,
        device="cpu",
        extra_args=(*TINY_ARGS, *extra_args),
        python=str(python),
    )


@asynccontextmanager
async def engines(roles: Mapping[str, Role], size: CacheSize, logs: Path) -> AsyncIterator[dict[str, str]]:
    """Base URLs by name, once all answer."""
    environment = ensure(print)
    model = ensure_model(environment)
    async with AsyncExitStack() as stack:
        processes, urls = {}, {}
        for name, role in roles.items():
            spec = tiny_engine(role, model, environment.python, *size.args, *COUNTS_EVICTIONS)
            usual = command(spec)
            program = replace(usual, env=usual.env | {"VLLM_SERVER_DEV_MODE": "1"})  # for /reset_prefix_cache
            processes[name] = await stack.enter_async_context(EngineProcess(program, logs / f"{name}.log", name=name))
            urls[name] = f"http://{spec.address}"
        healthy = (process.wait_healthy(urls[name], timeout_s=_STARTS_S) for name, process in processes.items())
        await asyncio.gather(*healthy)
        yield urls


async def forget(session: aiohttp.ClientSession, urls: Sequence[str]) -> None:
    """Empties the engines' prefix caches; PPDError if KV is in use for longer than a lease."""

    async def is_empty(url: str) -> bool:
        async with session.post(f"{url}/reset_prefix_cache") as response:
            return response.status == 200 and (await response.json())["success"] is True

    for url in urls:
        try:
            async with asyncio.timeout(_IDLE_S):
                while not await is_empty(url):
                    await asyncio.sleep(0.2)
        except TimeoutError as exc:
            raise PPDError(f"{url} still uses KV after {_IDLE_S:g} s, and does not empty its cache") from exc


@asynccontextmanager
async def proxy(urls: Mapping[str, str], flags: Mapping[str, object], log: Path) -> AsyncIterator[str]:
    """The base URL of a proxy that knows nothing yet but that all engines are up. urls: by name, as "D1"."""
    [port] = free_ports(1)
    argv = [sys.executable, "-m", "ppd.servers", "serve", "--port", str(port), "--heartbeat-port", "0"]
    for name, url in urls.items():
        connector = ",connector=nixl" if name.startswith("R") else ""
        argv += ["--workers", f"{name[0]}={url.removeprefix('http://')}{connector}"]
    argv += [item for flag, value in flags.items() for item in (f"--{flag}", str(value))]
    base_url = f"http://{HOST}:{port}"
    async with (
        EngineProcess(Program(tuple(argv), {"PPD_ADMIN_KEY": ADMIN_KEY}), log, name="proxy") as process,
        aiohttp.ClientSession(headers={"X-Admin-Key": ADMIN_KEY}) as session,
    ):
        await process.wait_healthy(base_url, timeout_s=_UP_S)
        async with asyncio.timeout(_UP_S):
            while await _workers_up(session, base_url) < len(urls):
                await asyncio.sleep(0.1)
        yield base_url


async def _workers_up(session: aiohttp.ClientSession, base_url: str) -> int:
    async with session.get(f"{base_url}/admin/workers") as response:
        response.raise_for_status()
        return sum(worker["state"] == "up" for worker in (await response.json())["workers"])
