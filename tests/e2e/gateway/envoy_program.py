"""A real Envoy before a proxy of tests, configured as `ppd envoy-config` writes it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import yaml  # type: ignore[import-untyped]

from ppd.proxy.assembly import Proxy
from ppd.proxy.config import ProxyConfig
from ppd.proxy.downstream.serve import listen as open_port
from ppd.proxy.gateway.envoy_config import envoy_config
from ppd.servers.fleet.gateway import find_envoy
from ppd.servers.fleet.ports import free_ports
from ppd.servers.sidecar.allow_list import AllowList
from ppd.servers.sidecar.failed_legs import FailurePolicy
from ppd.servers.sidecar.sidecar import FIXED, SidecarOptions, assemble, serve
from tests.support.fleet import Fleet
from tests.support.proxy import ProxyClient

STARTS_IN_S = 30
_base_ids = itertools.count(os.getpid() << 8)


@asynccontextmanager
async def envoy_before(
    proxy: Proxy,
    proxy_url: str,
    port: int,
    folder: Path,
    *,
    pickers: Sequence[tuple[str, int]] = (),
    edited: Callable[[str], str] = str,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> AsyncIterator[str]:
    """The base URL of an Envoy that asks this proxy, or `pickers`, once it serves.

    port: a free one; tls: the client's, of an Envoy that speaks it; options: of `envoy_config`, whose text `edited` may
    change.
    """
    config = proxy.settings.config
    shown = replace(config, host="127.0.0.1", port=int(proxy_url.rpartition(":")[2]))
    asked = pickers or [(config.picker_host, config.picker_port)]
    written = edited(envoy_config(shown, ("127.0.0.1", port), asked, **options))
    async with envoy_of(written, port, folder, tls=tls) as url:
        yield url


@asynccontextmanager
async def envoy_of(
    written: str, port: int, folder: Path, *, tls: ssl.SSLContext | None = None, threads: int = 1
) -> AsyncIterator[str]:
    """The base URL of an Envoy with this configuration, once it serves. threads: each has connections of its own."""
    file, log = folder / "envoy.yaml", folder / "envoy.log"
    file.write_text(written)
    base_id = str(next(_base_ids) & 0x7FFFFFFF)
    flags = ("-c", str(file), "--concurrency", str(threads), "--base-id", base_id, "-l", "error")
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            find_envoy(), *flags, "--disable-hot-restart", stdout=out, stderr=out
        )
        try:
            url = f"http{'s' if tls else ''}://127.0.0.1:{port}"
            await _serves(f"{url}/health", process, log, tls)
            yield url
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _serves(url: str, process: asyncio.subprocess.Process, log: Path, tls: ssl.SSLContext | None) -> None:
    connector = aiohttp.TCPConnector(ssl=tls or True)
    async with asyncio.timeout(STARTS_IN_S), aiohttp.ClientSession(connector=connector) as session:
        while True:
            assert process.returncode is None, f"Envoy has ended: see {log}"
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.05)


def asks_of_everything(written: str) -> str:
    """Envoy's configuration as llm-d has it: one route, and the picker is asked about all that comes."""
    whole = yaml.safe_load(written)
    manager = whole["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    host["routes"] = [{"match": {"prefix": "/"}, "route": {"cluster": "picked", "timeout": "0s"}}]
    return str(yaml.safe_dump(whole))


async def until_envoy_knows(session: aiohttp.ClientSession, admin_port: int, count: int) -> None:
    """So many workers, of those in the picker's file."""
    async with asyncio.timeout(STARTS_IN_S):
        while True:
            async with session.get(f"http://127.0.0.1:{admin_port}/clusters") as answer:
                lines = (await answer.text()).splitlines()
            if sum(line.startswith("picked::") and "::health_flags::" in line for line in lines) == count:
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def carried(
    folder: Path, names: str, *, options: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Fleet, ProxyClient]]:
    """A fleet, and what speaks to it through Envoy. options: of `envoy_before`."""
    picker, clients, reports = free_ports(3)
    async with (
        Fleet.of(names, **{"picker_port": picker, "heartbeat_port": reports, **settings}) as fleet,
        envoy_before(fleet.proxy, fleet.base_url, clients, folder, **(options or {})) as url,
    ):
        yield fleet, ProxyClient(fleet.proxy, url, fleet.session)


@asynccontextmanager
async def sidecar_before(engine: str, picker: Proxy) -> AsyncIterator[str]:
    """The address of a sidecar that runs in this event loop before the engine at that address, and reports."""
    config = ProxyConfig(**{**FIXED, "port": 0, "shutdown_timeout_s": 1.0})
    options = SidecarOptions(
        config=config,
        engine=engine,
        allow_list=AllowList("127.0.0.0/8"),
        encoder_list=AllowList("127.0.0.0/8", "encoder"),
        policy=FailurePolicy(),
        report=f"127.0.0.1:{picker.settings.config.heartbeat_port}",
    )
    listening, stop = open_port(config), asyncio.Event()
    serving = asyncio.create_task(serve(assemble(options), listening, stop))
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        stop.set()
        await serving


def is_finished(proxy: Proxy, request_id: str) -> bool:
    receipt = proxy.state.receipts.find(request_id)
    return receipt is not None and receipt.outcome == "completed"


def is_over(fleet: Fleet, request_id: str) -> bool:
    receipt = fleet.proxy.state.receipts.find(request_id)
    return receipt is not None and receipt.outcome != "running"


def is_reported(fleet: Fleet, request_id: str) -> bool:
    receipt = fleet.proxy.state.receipts.find(request_id)
    return receipt is not None and receipt.outcome == "completed" and receipt.counts_evidence == "report"
