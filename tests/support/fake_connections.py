"""Connections of clients and workers without a socket: what the data path makes of bytes that come in these pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

from ppd.proxy.downstream.http1_connection import ClientConnection
from ppd.proxy.downstream.limits import ConnectionLimits, Patience
from ppd.proxy.downstream.request_head import OFFERED, RequestHead
from ppd.proxy.errors import RequestError
from ppd.proxy.upstream.connection import WorkerConnection

UNREACHED_BYTES = 2**20  # limits on sizes count what came in one piece, so they are left out here


class FakeTransport:
    """What was written, which nothing may be after the end."""

    def __init__(self) -> None:
        self.written = b""
        self.is_ended = False

    def write(self, data: bytes) -> None:
        assert not self.is_ended, data
        self.written += data

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.write(b"".join(parts))

    def write_eof(self) -> None:
        self.is_ended = True

    close = abort = write_eof

    def is_closing(self) -> bool:
        return self.is_ended

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> None:
        """It has neither a socket nor TLS."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


# -- a client's


class Pace(Enum):
    """When answers go out, which is never before the request is whole or refused."""

    AT_ONCE = 0  # as soon as the request is whole
    LATE = 1  # all has been sent by then
    STALLED = 2  # the client takes nothing until it has sent all


@dataclass(frozen=True)
class Told:
    """All that the bytes of one request said, and nothing of how they were cut."""

    start: bytes  # the request line; empty where the head could not be read
    headers: list[tuple[bytes, bytes]]
    keeps_alive: bool
    body: bytes
    is_whole: bool
    refusal: str
    is_answered: bool

    @property
    def is_refused(self) -> bool:
        return self.refusal != ""


class FakeExchange:
    """Answers with its number and what it was asked; a request that is not whole stays without an answer."""

    buffer = None

    def __init__(self, server: FakeServer, connection: ClientConnection, head: RequestHead | None) -> None:
        self.head = head
        self.body = b""
        self.is_begun = self.is_whole = self.is_over = False
        self.refused: RequestError | None = None
        self._server = server
        self._connection = connection

    def begin(self) -> None:
        assert not self.is_begun and self._server.current is None
        self._server.begun.append(self)
        self.is_begun = True
        self._react()

    def take(self, data: bytes) -> None:
        assert data and not self.is_whole and self.refused is None
        self.body += data

    def taken(self) -> None:
        assert not self.is_whole and self.refused is None
        self.is_whole = True
        self._react()

    def refuse(self, error: RequestError) -> None:
        assert not self.is_whole and self.refused is None
        self.refused = error
        self._react()

    def leave(self) -> None:
        assert self.is_begun and not self.is_over
        self.is_over = True

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def _react(self) -> None:
        if self._server.pace is not Pace.LATE:
            self.answer()

    def answer(self) -> None:
        if not self.is_begun or self.is_over or not (self.is_whole or self.refused):
            return
        self.is_over = True
        self._connection.write(b"%d\n" % len(self._server.begun))
        keeps_alive = self.refused is None and self.head is not None and self.head.keeps_alive
        self._connection.finished(keeps_alive=keeps_alive)

    def told(self) -> Told:
        head, error = self.head, self.refused
        return Told(
            b"" if head is None else b" ".join((head.method, head.target, head.version.encode())),
            [] if head is None else [(OFFERED if name == b"upgrade" else name, value) for name, value in head.headers],
            head is not None and head.keeps_alive,
            self.body,
            self.is_whole,
            "" if error is None else f"{error.status} {error.message}",
            self.is_over,
        )


class FakeServer:
    """The server and the host of one connection."""

    patience_s = 3600.0
    head_limit_bytes = UNREACHED_BYTES

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.begun: list[FakeExchange] = []
        self.http2 = b""
        self.closed_count = 0

    @property
    def current(self) -> FakeExchange | None:
        return self.begun[-1] if self.begun and not self.begun[-1].is_over else None

    def exchange(self, connection: ClientConnection, head: RequestHead) -> FakeExchange:
        return FakeExchange(self, connection, head)

    def refusal(self, connection: ClientConnection, error: RequestError) -> FakeExchange:
        made = FakeExchange(self, connection, None)
        made.refused = error
        return made

    def opened(self, transport: asyncio.Transport, address: str) -> ConnectionLimits:
        return ConnectionLimits(transport, Patience(3600.0, 3600.0), lambda: 0.0)

    def closed(self, limits: ConnectionLimits) -> None:
        self.closed_count += 1

    def speak_http2(self, limits: ConnectionLimits, data: bytes) -> None:
        self.http2 = data


@dataclass(frozen=True)
class Served:
    """What became of a client's bytes."""

    requests: list[Told]  # that were begun, in their order
    written: bytes
    is_ended: bool  # before the client left
    http2: bytes


async def served(parts: Sequence[bytes], pace: Pace) -> Served:
    server, transport = FakeServer(pace), FakeTransport()
    connection = ClientConnection(server, server, "a")
    connection.connection_made(cast(asyncio.Transport, transport))
    if pace is Pace.STALLED:
        connection.pause_writing()
    for part in parts:
        if server.http2:
            server.http2 += part
        else:
            connection.data_received(part)
            if server.current is not None:
                connection.lasts()
    if pace is Pace.STALLED:
        connection.resume_writing()
    answered = -1
    while answered < len(server.begun):
        answered = len(server.begun)
        if server.current is not None:
            server.current.answer()
    told = Served([each.told() for each in server.begun], transport.written, transport.is_ended, server.http2)
    transport.is_ended = True
    connection.connection_lost(None)
    assert server.closed_count == 1 and server.current is None
    return told


# -- a worker's


@dataclass
class FakeListener:
    """One answer, as its connection told it: in order, and once."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False
    is_broken: bool = False
    is_malformed: bool = False

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        assert status >= 200 and not (self.status or self.is_whole or self.is_broken)
        self.status, self.headers = status, headers

    def body_came(self, data: bytes, *, is_last: bool) -> None:
        assert (data or is_last) and self.status and not (self.is_whole or self.is_broken)
        self.body += data
        self.is_whole = is_last

    def broken(self, *, is_malformed: bool) -> None:
        assert not (self.is_whole or self.is_broken)
        self.is_broken, self.is_malformed = True, is_malformed


class FakeOwner:
    def __init__(self) -> None:
        self.is_free = False
        self.has_answered = False
        self.lost_count = 0

    def made(self) -> None: ...

    def free(self, connection: WorkerConnection) -> None:
        assert connection.is_open and not self.is_free
        self.is_free = True

    def lost(self, connection: WorkerConnection) -> None:
        self.lost_count += 1


@dataclass(frozen=True)
class Answered:
    """What became of a worker's bytes."""

    answer: FakeListener
    size: int  # of the pieces up to the one that ended the answer
    is_kept: bool  # for another request


async def answered(parts: Sequence[bytes], *, is_reset: bool = False) -> Answered:
    """is_reset: what comes last is no orderly end."""
    owner, transport, listener = FakeOwner(), FakeTransport(), FakeListener()
    connection = WorkerConnection(owner, asyncio.get_running_loop())
    connection.connection_made(cast(asyncio.Transport, transport))
    connection.send(listener, b"POST", (b" /", b""))
    size = 0
    for part in parts:
        if transport.is_ended:  # the loop reads no more then
            break
        size += 0 if listener.is_whole or listener.is_broken else len(part)
        connection.data_received(part)
    is_kept = owner.is_free and connection.is_open
    if not transport.is_ended and not is_reset:
        connection.eof_received()
    transport.is_ended = True
    connection.connection_lost(None)
    assert owner.lost_count == 1 and transport.written == b"POST /"
    assert listener.is_whole is not listener.is_broken
    return Answered(listener, size, is_kept)
