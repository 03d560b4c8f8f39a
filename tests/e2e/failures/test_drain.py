"""`ppd serve` as a process: how signals end it, and what stalled clients cost it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ppd.servers.fleet.ports import free_ports
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.engine.engine import SimEngine
from ppd.servers.sim.launch import running_engine

MIB = 2**20
DONE = b"data: [DONE]"
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}


@dataclass(frozen=True)
class Process:
    """A proxy in a process of its own."""

    process: asyncio.subprocess.Process
    port: int
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    def ask(self, **body: Any) -> Any:
        return self.session.post(f"{self.url}/v1/chat/completions", json={**CHAT, **body})

    async def connections(self) -> int:
        """How many it holds, this one's own included."""
        async with self.session.get(f"{self.url}/metrics") as response:
            return int(float((await response.text()).partition("\nppd_connections ")[2].split()[0]))

    async def until_refused(self) -> None:
        """Until the proxy no longer accepts connections."""
        async with asyncio.timeout(60):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except ConnectionRefusedError:
                    return
                except ConnectionResetError:  # it was in the backlog as the port was closed
                    continue
                writer.close()
                await asyncio.sleep(0.01)


@asynccontextmanager
async def started(worker: str, *flags: str) -> AsyncIterator[Process]:
    """`ppd serve` with one replica, ready to serve."""
    (port,) = free_ports(1)
    argv = ("serve", "--port", str(port), "--heartbeat-port", "0", "--mode", "replica", "--workers", f"R={worker}")
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "ppd.servers", *argv, *flags)
    try:
        async with aiohttp.ClientSession() as session:
            proxy = Process(process, port, session)
            async with asyncio.timeout(60):
                while not await _is_ready(proxy):
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
            yield proxy
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _is_ready(proxy: Process) -> bool:
    try:
        async with proxy.session.get(f"{proxy.url}/ready") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    """As slow as a real one: about 8 ms a token."""
    async with running_engine(replace(SimConfig(), time_scale=1.0, shutdown_s=0.1)) as running:
        yield running


async def test_a_stream_under_way_ends_whole(engine: SimEngine) -> None:
    async with started(engine.address) as proxy:
        kept, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: p\r\n\r\n")
        assert b" 200 " in await kept.readuntil(b"}")
        async with proxy.ask(stream=True, max_tokens=150) as response:
            await response.content.readany()
            proxy.process.terminate()
            await proxy.until_refused()
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: p\r\n\r\n")
            refused = await asyncio.wait_for(kept.read(), 60)
            rest = await response.content.read()
        assert DONE in rest
        assert refused.startswith(b"HTTP/1.1 503")
        head, _, body = refused.partition(b"\r\n\r\n")
        head = head.lower()
        assert b"retry-after: " in head and b"connection: close" in head
        assert json.loads(body)["error"]["code"] == "draining"
        assert await asyncio.wait_for(proxy.process.wait(), 60) == 0
        writer.close()


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("/v1/chat/completions", b'data: {"error":'),
        ("/v1/messages", b"event: error\ndata: "),
    ],
)
async def test_a_stream_that_takes_too_long_ends_with_an_error(engine: SimEngine, endpoint: str, said: bytes) -> None:
    async with started(engine.address, "--shutdown-timeout-s", "0.5") as proxy:
        body = {**CHAT, "stream": True, "max_tokens": 20_000}
        async with proxy.session.post(proxy.url + endpoint, json=body) as response:
            await response.content.readany()
            proxy.process.terminate()
            rest = await response.content.read()
        assert DONE not in rest and b"message_stop" not in rest
        assert rest.rpartition(b"\n\n")[0].rpartition(b"\n\n")[2].startswith(said)
        assert await asyncio.wait_for(proxy.process.wait(), 60) == 0


async def test_an_answer_that_has_not_begun_is_refused_at_the_limit(engine: SimEngine) -> None:
    async with started(engine.address, "--shutdown-timeout-s", "0.2") as proxy:
        asking = asyncio.create_task(_whole(proxy, max_tokens=20_000))
        async with asyncio.timeout(60):
            while not engine.counters.generation_tokens:
                await asyncio.sleep(0.01)
        proxy.process.terminate()
        status, headers, body = await asking
        assert (status, body["error"]["code"], headers["Connection"]) == (503, "draining", "close")
        assert await asyncio.wait_for(proxy.process.wait(), 60) == 0
        async with asyncio.timeout(60):
            while list(engine.scheduler.sequences):
                await asyncio.sleep(0.01)


async def _whole(proxy: Process, **body: Any) -> tuple[int, Any, Any]:
    async with proxy.ask(**body) as response:
        return response.status, response.headers, await response.json()


async def test_idle_and_silent_connections_hold_nothing_up(engine: SimEngine) -> None:
    async with started(engine.address, "--shutdown-timeout-s", "120") as proxy:
        opened = [await asyncio.open_connection("127.0.0.1", proxy.port) for _ in range(3)]
        opened[1][1].write(b"GET /health HTTP/1.1\r\n")
        opened[2][1].write(b"GET /health HTTP/1.1\r\nHost: p\r\n\r\n")
        await opened[2][0].readuntil(b"\r\n\r\n")
        proxy.process.terminate()
        assert await asyncio.wait_for(proxy.process.wait(), 60) == 0
        for _, writer in opened:
            writer.close()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(engine: SimEngine, second: signal.Signals) -> None:
    async with started(engine.address, "--shutdown-timeout-s", "600") as proxy:
        async with proxy.ask(stream=True, max_tokens=20_000) as response:
            await response.content.readany()
            proxy.process.terminate()
            await proxy.until_refused()
            proxy.process.send_signal(second)
            assert await asyncio.wait_for(proxy.process.wait(), 60) == -second


async def test_a_certificate_that_cannot_be_used_is_one_clear_line(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ppd.servers", "serve", "--port", "0", "--heartbeat-port", "0"),
        *("--tls-cert-file", str(tmp_path / "none.pem"), "--tls-key-file", str(tmp_path / "none.key")),
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert "tls_cert_file" in err.decode() and "Traceback" not in err.decode()


EVENT = b'data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n'


@asynccontextmanager
async def gushing_worker(written: dict[str, int]) -> AsyncIterator[str]:
    """A worker whose streams are as fast as they are taken, and end after 256 MB; counts what was taken."""
    events = EVENT % (b"y" * 400) * 100

    async def gush(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        name = str(len(written))
        written[name] = 0
        while written[name] < 256 * MIB:
            await response.write(events)
            written[name] += len(events)
        return response

    async def plain(request: web.Request) -> web.Response:
        return web.Response(text='{"data": [{"id": "sim"}]}' if request.path == "/v1/models" else "")

    app = web.Application()
    app.router.add_post("/{path:.*}", gush)
    app.router.add_get("/{path:.*}", plain)
    async with TestServer(app) as server:
        yield f"127.0.0.1:{server.port}"


@asynccontextmanager
async def stalled(proxy: Process) -> AsyncIterator[None]:
    """A client that asks for a stream and stops reading it."""
    data = json.dumps({**CHAT, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, limit=1024)
    try:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        assert b"200" in await reader.readline()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        yield
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def settled(written: Mapping[str, int]) -> None:
    """Until nobody takes any more."""
    async with asyncio.timeout(60):
        taken = -1
        while not written or sum(written.values()) != taken:
            taken = sum(written.values())
            await asyncio.sleep(0.5)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
async def test_three_stalled_readers_cost_little_memory() -> None:
    written: dict[str, int] = {}
    async with gushing_worker(written) as worker, started(worker) as proxy:
        before = proxy.rss_bytes
        async with stalled(proxy), stalled(proxy), stalled(proxy):
            await settled(written)
            grown = proxy.rss_bytes - before
        assert len(written) == 3
        assert max(written.values()) < 64 * MIB, "they did stall"
        assert grown < 64 * MIB


async def test_a_client_that_stops_reading_is_dropped() -> None:
    written: dict[str, int] = {}
    async with gushing_worker(written) as worker, started(worker, "--idle-timeout-s", "1") as proxy, stalled(proxy):
        async with asyncio.timeout(60):
            while await proxy.connections() > 1:  # the one that asks
                await asyncio.sleep(0.1)
