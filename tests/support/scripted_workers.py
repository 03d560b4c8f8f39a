"""Workers that no engine would be: healthy by their probes, and answering as a test says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.upstream.call import Call, Timeouts
from ppd.proxy.upstream.client import Upstream

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def odd_worker(fleet: Any, handler: Handler, role: str = "D") -> AsyncIterator[None]:
    """A worker that is healthy, serves model `sim`, and answers chats as the handler does."""

    async def plain(request: web.Request) -> web.Response:
        return web.Response(text='{"data": [{"id": "sim"}]}' if request.path == "/v1/models" else "")

    app = web.Application(client_max_size=128 * 1024 * 1024)
    app.router.add_post("/{path:.*}", handler)
    app.router.add_get("/{path:.*}", plain)
    async with TestServer(app) as server:
        address = f"127.0.0.1:{server.port}"
        await joins(fleet, f"{role}={address}")
        yield


async def joins(fleet: Any, worker: str) -> None:
    """Announces it as a static worker, and returns once it is up."""
    address = worker.partition("=")[2].partition(",")[0]
    await fleet.admin("POST", "/workers", {"worker": worker})
    await fleet.until(lambda: any(v.id == address and v.up for v in fleet.proxy.state.registry.views()))


def to_a_probe(head: bytes) -> bytes:
    """What a healthy worker of model `sim` says to a GET."""
    body = b'{"data": [{"id": "sim"}]}' if b"/v1/models" in head else b""
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


async def stop_listening(listening: asyncio.Server) -> None:
    """Closes the port. asyncio would lose a connection that it has accepted but not made, and warn of its socket."""
    for accepting in listening.sockets:
        asyncio.get_running_loop().remove_reader(accepting.fileno())
    for _ in range(3):
        await asyncio.sleep(0)
    listening.close()


class MortalWorker:
    """Healthy, silent to whatever it is asked, and then dead: its port and its connections close."""

    def __init__(self) -> None:
        self.asked = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._listening: asyncio.Server | None = None

    @asynccontextmanager
    async def joined(self, fleet: Any, role: str = "R") -> AsyncIterator[MortalWorker]:
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        address = f"127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"
        try:
            await joins(fleet, f"{role}={address}")
            yield self
        finally:
            self.die()

    def die(self) -> None:
        if self._listening is not None:
            self._listening.close()
        while self._writers:
            self._writers.pop().transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"POST"):
                    self.asked += 1
                    continue
                writer.write(to_a_probe(head))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass


class LateReader:
    """A D so short of time that it reads a request `late_s` after it came, and drops it if its client has gone by then.

    Else it sends the head of a stream, and no more.
    """

    def __init__(self, late_s: float) -> None:
        self.late_s = late_s
        self.came = self.taken = self.dropped = 0

    @asynccontextmanager
    async def joined(self, fleet: Any) -> AsyncIterator[LateReader]:
        listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        try:
            await joins(fleet, f"D={address}")
            yield self
        finally:
            await stop_listening(listening)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"POST"):
                    self.came += 1
                    await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
                    await asyncio.sleep(self.late_s)
                    if reader.at_eof() or writer.is_closing():
                        self.dropped += 1
                        return
                    self.taken += 1
                    writer.write(HEAD)
                    continue
                writer.write(to_a_probe(head))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


PATIENT = Timeouts(connect_s=20.0, first_s=20.0, idle_s=20.0)
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]
"""What a server does with one request; the number counts the requests of all connections, from 1."""


@asynccontextmanager
async def server(script: Script) -> AsyncIterator[Worker]:
    """Reads requests and does as the script says with each; the connection stays open unless the script ends it."""
    requests = 0
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int((head.lower().partition(b"content-length: ")[2] or b"0").split(b"\r\n")[0])
                await reader.readexactly(size)
                requests += 1
                await script(reader, writer, requests)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield worker(listening.sockets[0].getsockname()[1])
    finally:
        listening.close()
        for writer in writers:
            writer.close()


class Wire:
    """A worker's connection without a socket, of which only the reading counts."""

    def __init__(self) -> None:
        self.is_read = True
        self.is_aborted = False
        self.loop = asyncio.get_running_loop()

    def pause(self) -> None:
        self.is_read = False

    def resume(self) -> None:
        self.is_read = True

    def abort(self) -> None:
        self.is_aborted = True


def worker(port: int) -> Worker:
    return Worker(role=Role.DECODE, address=f"127.0.0.1:{port}")


def says(*parts: bytes, then: Callable[[asyncio.StreamWriter], None] | None = None) -> Script:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.005)
        if then is not None:
            then(writer)

    return script


def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


@asynccontextmanager
async def deaf(port: int = 0) -> AsyncIterator[Worker]:
    """Nobody takes what wants to connect, and nobody refuses it."""
    with socket.socket() as listening, socket.socket() as plug:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(0)
        plug.connect(listening.getsockname())
        yield worker(listening.getsockname()[1])


async def read(upstream: Upstream, call: Call, timeouts: Timeouts = PATIENT) -> bytes:
    async with upstream.answer(call, "/", body=b"{}", timeouts=timeouts) as answer:
        return await answer.body()
