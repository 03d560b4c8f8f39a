"""`ppd serve` is stopped (SIGSTOP) for longer than its time limits, and goes on: nobody is blamed for that."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ppd.servers.fleet.ports import free_ports
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.engine.engine import SimEngine
from ppd.servers.sim.launch import running_engine
from tests.support.announcements import Sender
from tests.support.credentials import Authority, trusting
from tests.support.proxy import ADMIN_KEY
from tests.support.serve_program import Program, running

DONE = b"data: [DONE]"
LIMIT_S = 3.0
STOPPED_S = 6.0  # longer than a process may be silent, too
LIMITS = ("head", "idle", "answer", "first-event", "prefill", "queue", "connect", "shutdown")
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "temperature": 0}


@dataclass
class Stop:
    """The moment at which the proxy is stopped, for all who wait for it; `url` is the proxy's."""

    url: str
    tls: ssl.SSLContext | None
    ready: asyncio.Barrier
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        await self.ready.wait()
        await self.stopped.wait()

    def ask(self, session: aiohttp.ClientSession, tokens: int, **body: Any) -> Any:
        return session.post(
            f"{self.url}/v1/chat/completions", json={**CHAT, "max_tokens": tokens, **body}, ssl=self.tls or True
        )

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]), ssl=self.tls)


Client = Callable[[Stop], Coroutine[Any, Any, bytes]]
"""What it gets of its answer, with its end."""


def stream(tokens: int) -> Client:
    async def client(stop: Stop) -> bytes:
        async with aiohttp.ClientSession() as session, stop.ask(session, tokens, stream=True) as response:
            await response.content.readany()
            await stop.wait()
            return bytes(await response.content.read())

    return client


async def whole(stop: Stop) -> bytes:
    async def text() -> bytes:
        async with aiohttp.ClientSession() as session, stop.ask(session, 60) as response:
            assert response.status == 200, await response.text()
            return bytes(await response.read())

    asking = asyncio.create_task(text())
    await asyncio.sleep(0.1)
    await stop.wait()
    return await asking


def sent_until(at: int) -> Client:
    """So much of the request is sent before, and the rest meanwhile."""

    async def client(stop: Stop) -> bytes:
        body = json.dumps({**CHAT, "max_tokens": 3, "stream": True}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\n"
        data = head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        reader, writer = await stop.connect()
        writer.write(data[:at])
        await asyncio.sleep(0.1)
        await stop.wait()
        writer.write(data[at:])
        got = await reader.read()
        writer.close()
        return got

    return client


async def kept(stop: Stop) -> bytes:
    """Its next request comes on a connection that has been idle for too long by then."""
    get = b"GET /health HTTP/1.1\r\nHost: p\r\n\r\n"
    reader, writer = await stop.connect()
    writer.write(get)
    await reader.readuntil(b"}")
    await stop.wait()
    writer.write(get)
    got = await reader.readuntil(b"}")
    writer.close()
    return got


CLIENTS: dict[str, tuple[Client, bytes]] = {
    "a stream that ends meanwhile": (stream(150), DONE),
    "a stream that goes on": (stream(1500), DONE),
    "an answer that is no stream": (whole, b'"finish_reason":"length"'),
    "a head": (sent_until(20), DONE),
    "a body": (sent_until(-10), DONE),
    "a kept connection": (kept, b"200 OK"),
}


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    """As slow as a real one: about 8 ms a token."""
    async with running_engine(SimConfig(time_scale=1.0, shutdown_s=0.1)) as one:
        yield one


@asynccontextmanager
async def started(
    engine: SimEngine, folder: Path, processes: int, *, with_tls: bool
) -> AsyncIterator[tuple[Program, ssl.SSLContext | None]]:
    """With limits of `LIMIT_S`, also of the engine that announces itself."""
    port, beats = free_ports(2)
    flags: tuple[str, ...] = ()
    tls: ssl.SSLContext | None = None
    if with_tls:
        tls, own = trusting(authority := Authority(folder)), authority.issue("proxy")
        flags = ("--tls-cert-file", own.cert, "--tls-key-file", own.key)
    argv = ["serve", "--port", str(port), "--processes", str(processes), "--mode", "replica", "--admin-key", ADMIN_KEY]
    argv += [part for name in LIMITS for part in (f"--{name}-timeout-s", str(LIMIT_S))]
    argv += ["--idle-connection-s", str(LIMIT_S), "--worker-ttl-s", str(LIMIT_S), "--heartbeat-port", str(beats)]
    sender = Sender(beats)

    async def beat() -> None:
        while True:
            await sender.beat(engine.address, "R")
            await asyncio.sleep(0.2)

    beating = asyncio.create_task(beat())
    try:
        async with running(folder, port, processes, *argv, *flags, tls=tls) as program:
            yield program, tls
    finally:
        beating.cancel()
        sender.close()


def signal_all(program: Program, number: int) -> None:
    for pid in (program.process.pid, *program.children()):
        os.kill(pid, number)


@pytest.mark.parametrize(
    ("processes", "with_tls"), [(1, False), (2, False), (1, True)], ids=["one", "two", "one with TLS"]
)
async def test_all_that_was_under_way_goes_on_and_nobody_is_blamed(
    engine: SimEngine, tmp_path: Path, processes: int, with_tls: bool
) -> None:
    async with started(engine, tmp_path, processes, with_tls=with_tls) as (program, tls):
        stop = Stop(program.base_url, tls, asyncio.Barrier(len(CLIENTS) + 1))
        asking = {name: asyncio.create_task(client(stop)) for name, (client, _) in CLIENTS.items()}
        await stop.ready.wait()
        signal_all(program, signal.SIGSTOP)
        stop.stopped.set()
        await asyncio.sleep(STOPPED_S)
        signal_all(program, signal.SIGCONT)
        await asyncio.wait(asking.values())
        lost = {
            name: task.exception() or task.result()[-400:]
            for name, task in asking.items()
            if task.exception() or CLIENTS[name][1] not in task.result()
        }
        assert not lost
        log = (tmp_path / "log").read_text()
        said = [line for line in log.splitlines() if " INFO " not in line]
        assert len(said) == processes and all("this process stood still" in line for line in said), log
        assert ": gone" not in log and ": down" not in log
