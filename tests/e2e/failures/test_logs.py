"""Logs that nobody reads or that a full disk refuses: the proxy goes on, and ends, all the same."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ppd.proxy.config import Mode
from ppd.servers.fleet.ports import free_ports

PIPE_BYTES = 4096
TURNS = 400
BODY: dict[str, Any] = {"model": "sim", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def broken_worker() -> AsyncIterator[str]:
    """Healthy, but each turn fails, of which the proxy warns."""

    async def fail(request: web.Request) -> web.Response:
        return web.Response(status=500)

    async def plain(request: web.Request) -> web.Response:
        return web.Response(text='{"data": [{"id": "sim"}]}' if request.path == "/v1/models" else "")

    app = web.Application()
    app.router.add_post("/{path:.*}", fail)
    app.router.add_get("/{path:.*}", plain)
    async with TestServer(app) as server:
        yield f"127.0.0.1:{server.port}"


@asynccontextmanager
async def unread_serve(
    worker: str, processes: int, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`ppd serve` with stderr and stdout into a full pipe, and its base URL."""
    (port,) = free_ports(1)
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ppd.servers", "serve", "--port", str(port), "--heartbeat-port", "0"),
        *("--mode", "replica", "--workers", f"R={worker}", "--breaker-failures", "1000000"),
        *("--processes", str(processes), "--log-lines-per-minute", "0", *flags),
        stdout=writing,
        stderr=writing,
    )
    os.close(writing)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        os.close(reading)


@pytest.mark.parametrize("processes", [1, 2])
async def test_thousands_of_warnings_into_a_pipe_that_nobody_reads_stop_nothing(processes: int) -> None:
    async with broken_worker() as worker, unread_serve(worker, processes) as (process, url):
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(20)) as session:
            await until_ready(session, url, process)
            for _ in range(TURNS // 20):
                await asyncio.gather(*(turn(session, url) for _ in range(20)))
            for _ in range(5):
                async with session.get(f"{url}/health") as response:
                    assert response.status == 200
            async with session.get(f"{url}/metrics") as response:
                assert 'ppd_log_lines_lost_total{log="log"}' in await response.text()
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_closed_standard_streams_are_no_clients(processes: str) -> None:
    (port,) = free_ports(1)
    serve = f"{sys.executable} -m ppd.servers serve --port {port} --heartbeat-port 0 --processes {processes}"
    process = await asyncio.create_subprocess_exec("sh", "-c", f"exec {serve} --access-log text <&- >&- 2>&-")
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    break
                except OSError:
                    await asyncio.sleep(0.05)
        for _ in range(3):
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            answer = await asyncio.wait_for(reader.readuntil(b"}"), 60)
            assert answer.startswith(b"HTTP/1.1 200 ")
        writer.close()
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_receipts_that_a_full_disk_refuses_are_counted(start_fleet: Any) -> None:
    async with start_fleet("R1", mode=Mode.REPLICA, receipt_log="/dev/full") as fleet:
        assert (await fleet.chat(BODY["messages"])).status == 200
        async with asyncio.timeout(60):
            while await fleet.metric("ppd_receipts_lost_total") != 1:
                await asyncio.sleep(0.01)


async def until_ready(session: aiohttp.ClientSession, url: str, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(60):
        while True:
            assert process.returncode is None
            try:
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


async def turn(session: aiohttp.ClientSession, url: str) -> None:
    async with session.post(f"{url}/v1/chat/completions", json=BODY) as response:
        assert response.status == 502
