"""A turn service and an application behind real client connections, of which a test says what they answer."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ppd.proxy import plane
from ppd.proxy.bodies.body_memory import BodyMemory
from ppd.proxy.config import DataPlane, ProxyConfig
from ppd.proxy.downstream.asgi_edge import Edge
from ppd.proxy.downstream.http1_connection import ClientConnection
from ppd.proxy.downstream.http1_server import Http1Server
from ppd.proxy.downstream.limits import ConnectionLimits, Patience
from ppd.proxy.errors import Unauthorized
from ppd.proxy.routing.router import TurnReply
from ppd.proxy.routing.service import TurnService
from ppd.proxy.runtime.process import new_loop
from ppd.proxy.runtime.tasks import Drain
from ppd.proxy.telemetry.access_log import AccessLog
from ppd.proxy.telemetry.receipts import Receipt
from tests.support.raw_http import read_answers

TURN = b"POST /v1/chat/completions HTTP/1.1\r\nHost: p\r\n"
EVENT = b"data: {}\n\n"
SILENT_TURNS = 15


class Pieces:
    """A body in pieces, each after `more` is set."""

    def __init__(self, *pieces: bytes, kind: str = "text/event-stream") -> None:
        self.pieces = pieces
        self.kind = kind
        self.taken = 0
        self.more = asyncio.Event()
        self.is_abandoned = False

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        for piece in self.pieces:
            self.taken += 1
            yield piece
        await self.more.wait()
        yield b"data: [DONE]\n\n"

    def abandon(self) -> None:
        self.is_abandoned = True


@dataclass
class Site:
    """A server of one turn service, of which a test says what it answers."""

    port: int = 0
    asked: list[bytes] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)  # statuses that were counted
    cancelled: int = 0
    unended: int = 0  # turns whose answers were whole, and that nobody has ended
    answers_those_who_left: bool = False
    failures: list[Any] = field(default_factory=list)
    open: set[ConnectionLimits] = field(default_factory=set)
    patience: Patience = field(default_factory=lambda: Patience(10.0, 75.0))
    replies: dict[bytes, Any] = field(default_factory=dict)  # by the request's body; an exception is raised
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    edge: Edge | None = None
    ahead_s: float = 0.0
    read_bytes: int = 0  # from all clients

    def now(self) -> float:
        """The connections' clock: the loop's, and what `advance` added."""
        return asyncio.get_running_loop().time() + self.ahead_s

    def advance(self, seconds: float) -> None:
        """Time passes, and every connection is looked at."""
        self.ahead_s += seconds
        for one in tuple(self.open):
            one.close_if_overdue()

    def is_stalled(self) -> bool:
        return any(limits.is_stalled for limits in self.open)

    # -- as the turn service

    def caller(self, endpoint: str, headers: dict[str, str]) -> Any:
        if headers.get("authorization") == "bad":
            raise Unauthorized("no such key")
        if headers.get("authorization") == "defect":
            raise RuntimeError("a defect")
        receipt = Receipt(id="id", at="", endpoint=endpoint, model="", stream=False, session="", turn=1, kind="")
        return SimpleNamespace(receipt=receipt)

    def rejected(self, status: int) -> None:
        self.refused.append(status)

    async def answer(self, caller: object, body: bytes) -> TurnReply:
        self.asked.append(body)
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            if not self.answers_those_who_left:
                raise
        said = self.replies.get(body, b"[%b]" % body)
        if isinstance(said, Exception):
            raise said
        if not isinstance(said, bytes):
            return TurnReply(said.kind, {}, said)
        self.unended += 1
        return TurnReply("application/json", {}, said, end=self._end)

    def _end(self) -> None:
        self.unended -= 1

    # -- as the application

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        if scope["path"] == "/unread":
            await self.may_answer.wait()
        while scope["path"] != "/unread":
            event = await receive()
            body += event.get("body", b"")
            if not event.get("more_body", False):
                break
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers, "trailers": False})
        said = self.replies.get(body, scope["path"].encode() + body)
        await send({"type": "http.response.body", "body": said, "more_body": False})
        while (await receive())["type"] != "http.disconnect":  # as Quart 0.23 does
            pass

    # -- as the host of connections

    def opened(self, transport: asyncio.Transport, address: str) -> ConnectionLimits:
        made = ConnectionLimits(transport, self.patience, self.now, address=address)
        self.open.add(made)
        return made

    def closed(self, limits: ConnectionLimits) -> None:
        self.open.discard(limits)

    def speak_http2(self, limits: ConnectionLimits, data: bytes) -> None:
        limits.transport.write(b"HTTP/2 " + data)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.002)

    async def until_read(self, size: int) -> None:
        """So many bytes have been read, from all clients: what is written from here on comes in another read."""
        await self.until(lambda: self.read_bytes >= size)


class CountedConnection(ClientConnection):
    """Tells its site of each read, whether the bytes came to the connection or to where they belong."""

    def __init__(self, server: Http1Server, site: Site) -> None:
        super().__init__(server, site, "a")
        self._site = site

    def data_received(self, data: bytes) -> None:
        self._site.read_bytes += len(data)
        super().data_received(data)

    def on_body_in_place(self, size: int) -> None:
        self._site.read_bytes += size
        super().on_body_in_place(size)


_is_polled: ContextVar[bool] = ContextVar("_is_polled", default=False)


def on_both_planes(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """On the transports of `native`, and on those of `direct`, which are uvloop's.

    They differ in when they pause a protocol, and in what they allow once they are closing.
    """

    def run(data_plane: DataPlane, **given: Any) -> None:
        is_native = data_plane is DataPlane.NATIVE
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop if is_native else new_loop) as runner:
            context = copy_context()
            context.run(_is_polled.set, is_native)
            runner.run(test(**given), context=context)

    own = inspect.signature(test).parameters.values()
    first = inspect.Parameter("data_plane", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([first, *own])  # type: ignore[attr-defined]
    run.__doc__ = test.__doc__
    marked: Callable[..., None] = pytest.mark.parametrize("data_plane", [DataPlane.NATIVE, DataPlane.DIRECT])(run)
    return marked


@asynccontextmanager
async def site(
    *,
    patience: Patience | None = None,
    waits: bool = False,
    room_wait_s: float = 10.0,
    log: AccessLog | None = None,
    **settings: Any,
) -> AsyncIterator[Site]:
    """Nothing may have failed unseen, neither in a callback nor in the log of the data path, and each turn is ended."""
    config = ProxyConfig(**settings)
    made = Site()
    made.patience = patience or made.patience
    made.edge = edge = Edge(cast(Any, made.app), config, Drain(), BodyMemory(1 << 30, room_wait_s), log)
    if not waits:
        made.may_answer.set()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: made.failures.append(context))
    handler = _Keeps(made.failures)
    logging.getLogger("ppd.proxy.downstream").addHandler(handler)
    http1 = Http1Server(edge, cast(TurnService, made), config)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    made.port = listening.getsockname()[1]
    accepting = asyncio.create_task(_accept(listening, lambda: CountedConnection(http1, made)))
    watching = asyncio.create_task(_watch(made))
    try:
        yield made
        assert (made.failures, made.unended) == ([], 0)
    finally:
        watching.cancel()
        logging.getLogger("ppd.proxy.downstream").removeHandler(handler)
        accepting.cancel()
        await asyncio.wait((accepting,))
        listening.close()
        for limits in tuple(made.open):
            limits.abort()
        await asyncio.sleep(0.01)


async def _accept(listening: socket.socket, make: Callable[[], ClientConnection]) -> None:
    """`sock_accept` would lose, and leave open, a connection that comes as this is cancelled."""
    loop, poller = asyncio.get_running_loop(), plane.Poller() if _is_polled.get() else None
    readable = asyncio.Event()
    loop.add_reader(listening, readable.set)
    try:
        while await readable.wait():
            readable.clear()
            with contextlib.suppress(BlockingIOError):
                accepted, _ = listening.accept()
                if poller is not None:
                    poller.adopt(accepted, make())
                else:
                    await loop.connect_accepted_socket(make, accepted)
    finally:
        loop.remove_reader(listening)


class _Keeps(logging.Handler):
    def __init__(self, failures: list[Any]) -> None:
        super().__init__(logging.WARNING)
        self._failures = failures

    def emit(self, record: logging.LogRecord) -> None:
        self._failures.append(record)


async def _watch(site: Site) -> None:
    while True:
        await asyncio.sleep(0.02)
        site.advance(0.0)


@asynccontextmanager
async def connected(site: Site) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=2**26)
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def heard(site: Site, *parts: bytes) -> tuple[bytes, bool]:
    """All that comes until the connection ends or falls silent, and whether it ended. Each part is read by itself."""
    async with connected(site) as (reader, writer):
        for part in parts:
            due_bytes = site.read_bytes + len(part)
            writer.write(part)
            await site.until_read(due_bytes)
        data = b""
        try:
            while part := await _read_or_silence(reader):
                data += part
        except TimeoutError:
            return data, False
        except ConnectionResetError:
            pass
        return data, True


async def _read_or_silence(reader: asyncio.StreamReader) -> bytes:
    """TimeoutError once the loop, which is the server's too, has turned often and nothing came."""
    reading = asyncio.ensure_future(reader.read(2**20))
    for _ in range(SILENT_TURNS):
        if reading.done():
            return await reading
        await asyncio.sleep(0.001)
    reading.cancel()
    raise TimeoutError


def turn(body: bytes = b"{}", headers: bytes = b"", start: bytes = TURN) -> bytes:
    return start + headers + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def statuses(data: bytes) -> list[int]:
    return [answer.status for answer in read_answers(data)]


GET = b"GET /a HTTP/1.1\r\nHost: p\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"


def under_way(at: Site) -> set[Any]:
    assert at.edge is not None
    return set(at.edge.requests._open)
