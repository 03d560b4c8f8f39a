"""gRPC over HTTP/2, the server's side: which method is called, its messages, and the status at the end.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md. Messages come whole; compressed ones are refused, as no
client sends them unasked. All services are on one connection, told apart by path.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Protocol, cast
from urllib.parse import quote

from ...upstream.pool import keep_alive
from .heads import Heads
from .http2 import Http2Connection
from .http2_stream import Stream
from .open_connections import OpenConnections

log = logging.getLogger(__name__)

MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024
HELD_LIMIT_BYTES = 4 * MESSAGE_LIMIT_BYTES
UNREAD_LIMIT_BYTES = 128 * 1024 * 1024  # answers that a peer does not read; then its connection is dropped
_PREFIX = struct.Struct(">BI")
_PREFIX_BYTES = 5


class GrpcStatus(IntEnum):
    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


def _literal(name: bytes, value: bytes) -> bytes:
    """A header in HPACK that leaves the tables as they are, of at most 127 bytes each (RFC 7541, 6.2.2)."""
    return bytes((0, len(name))) + name + bytes((len(value),)) + value


_STATUS_200 = b"\x88"  # of HPACK's static table
_HEAD = _STATUS_200 + _literal(b"content-type", b"application/grpc")
_OK = _literal(b"grpc-status", b"0")
_SHOWN_BYTES = 100


class MessageTaker(Protocol):
    """One call's."""

    def message(self, data: bytes | memoryview) -> None: ...  # which is to be read before this returns

    def half_closed(self) -> None: ...  # no more messages will come

    def lost(self) -> None: ...  # the call is over, whatever was still to be answered


Method = Callable[["GrpcCall"], MessageTaker]


class GrpcCall:
    """What is answered to one call."""

    __slots__ = ("_has_head", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._has_head = False

    def send(self, message: bytes, rest: bytes | memoryview = b"") -> None:
        """rest: of the message, where it is long; then it is not copied."""
        if not self._has_head:
            self._begin()
        self._stream.send(_PREFIX.pack(0, len(message) + len(rest)) + message)
        if rest:
            self._stream.send(rest)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, message: str = "") -> None:
        if not self._has_head:
            self._begin()
        trailers = _OK
        if status is not GrpcStatus.OK:
            told = quote(message, safe=" ")[:_SHOWN_BYTES].encode()
            trailers = _literal(b"grpc-status", b"%d" % status) + _literal(b"grpc-message", told)
        self._stream.end(trailers)

    def _begin(self) -> None:
        self._has_head = True
        self._stream.send_head(_HEAD)


class _Messages:
    """Cuts a call's bytes into its messages."""

    __slots__ = ("_call", "_counted", "_held", "_memory", "_taker", "_wanted")

    def __init__(self, call: GrpcCall, taker: MessageTaker, memory: _HeldBytes) -> None:
        self._call = call
        self._memory = memory
        self._counted = 0  # there, of what is held
        self._taker: MessageTaker | None = taker
        self._held = bytearray()
        self._wanted = _PREFIX_BYTES

    def data(self, piece: memoryview) -> None:
        if self._taker is None:  # it was refused
            return
        held = self._held
        if held:
            held += piece
        try:
            if not held:
                self._cut(piece)
            elif len(held) >= self._wanted:
                self._held = bytearray()
                self._cut(memoryview(held))
        except Exception as exc:  # the other calls of this connection go on
            log.error("a gateway's message could not be taken", exc_info=exc)
            self._refuse(GrpcStatus.INTERNAL, "internal error")
        if self._held or self._counted:
            self._count()
            if self._memory.count > HELD_LIMIT_BYTES and self._held:
                self._refuse(GrpcStatus.RESOURCE_EXHAUSTED, "the unfinished messages of all calls are too large")

    def _cut(self, came: memoryview) -> None:
        """came: from the beginning of a message on."""
        at, end = 0, len(came)
        self._wanted = _PREFIX_BYTES
        while end - at >= _PREFIX_BYTES and self._taker is not None:
            flags, size = _PREFIX.unpack_from(came, at)
            if flags or size > MESSAGE_LIMIT_BYTES:
                why = "is compressed" if flags else f"is longer than {MESSAGE_LIMIT_BYTES} bytes"
                self._refuse(GrpcStatus.UNIMPLEMENTED if flags else GrpcStatus.RESOURCE_EXHAUSTED, f"the message {why}")
                return
            begin = at + _PREFIX_BYTES
            if begin + size > end:
                self._wanted = _PREFIX_BYTES + size
                break
            at = begin + size
            self._taker.message(came[begin:at])
        if at < end and self._taker is not None:
            self._held += came[at:]

    def half_closed(self) -> None:
        if self._held:
            self._refuse(GrpcStatus.INVALID_ARGUMENT, "the call ends inside of a message")
        elif self._taker is not None:
            self._taker.half_closed()

    def reset(self) -> None:
        self._held.clear()
        self._count()
        taker, self._taker = self._taker, None
        if taker is not None:
            taker.lost()

    def _count(self) -> None:
        self._memory.count += len(self._held) - self._counted
        self._counted = len(self._held)

    def _refuse(self, status: GrpcStatus, why: str) -> None:
        self.reset()
        self._call.finish(status, why)


class _HeldBytes:
    """Of unfinished messages, on one connection."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class GrpcConnection(asyncio.Protocol):
    """One client's connection. methods: by path, as `/package.Service/Method`."""

    def __init__(self, methods: Mapping[bytes, Method], connections: OpenConnections) -> None:
        """connections: the open ones, of which this is one while it is."""
        self._methods = methods
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._http2 = Http2Connection(self._opened, self._write)
        self._memory = _HeldBytes()
        self._newest: tuple[Heads, Method | None] = [], None  # a call's head, and what it asks for

    @property
    def is_idle(self) -> bool:
        return self._http2.is_idle

    def go_away(self) -> None:
        self._http2.go_away()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def evict(self) -> None:
        if self._transport is not None and self._transport.get_write_buffer_size():
            self._transport.abort()  # it does not read, so an orderly end might never come
        else:
            self.go_away()
            self.close()

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if not self._connections.add(self):
            self._transport.abort()
            return
        if (made := transport.get_extra_info("socket")) is not None:
            keep_alive(made)  # else the turns of a gateway whose machine is gone would stay open
        self._http2.open()

    def data_received(self, data: bytes) -> None:
        if not self._http2.receive(data):
            self.close()  # once the client has read what was written, which may be never
            self._http2.lost()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connections.discard(self)
        self._http2.lost()

    # -- called by HTTP/2

    def _write(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > UNREAD_LIMIT_BYTES:
            log.warning("a gateway's connection is dropped: it does not read its answers")
            self._transport.abort()

    def _opened(self, stream: Stream, headers: Heads) -> _Messages | None:
        call = GrpcCall(stream)
        known, method = self._newest
        if known is not headers:
            method = self._method(headers)
            self._newest = headers, method
        if method is None:
            call.finish(GrpcStatus.UNIMPLEMENTED, "there is no such method here")
            return None
        return _Messages(call, method(call), self._memory)

    def _method(self, headers: Heads) -> Method | None:
        head = dict(reversed(headers))
        is_grpc = head.get(b":method") == b"POST" and head.get(b"content-type", b"").startswith(b"application/grpc")
        return self._methods.get(head.get(b":path", b"")) if is_grpc else None
