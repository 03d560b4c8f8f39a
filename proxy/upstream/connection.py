"""One HTTP/1.1 connection to a worker: requests out, one at a time, and answers in, as they are parsed.

What is parsed goes straight to the answer that waits for it, without a task or a queue between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol, cast

import httptools

HEAD_LIMIT_BYTES = 256 * 1024
_CONTINUE = 200  # informational statuses lie below, and announce the real one
_BODILESS = (204, 304)


class AnswerReceiver(Protocol):
    """The answer under way."""

    def head(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def body_came(self, data: bytes, *, is_last: bool) -> None:
        """What has come since the last call; empty only where it is the last."""

    def broken(self, *, is_malformed: bool) -> None:
        """There will be no more of it."""


class WorkerConnection(asyncio.Protocol):
    """Given back to its owner when an answer is whole and it can take the next request; lost to it when it ends."""

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._headers: dict[bytes, bytes] = {}  # as they come
        self._parser = httptools.HttpResponseParser(self)
        self._listener: AnswerReceiver | None = None
        self._status = 0
        self._parts: list[bytes] = []
        self._is_whole = False
        self._lasts_until_closed = False
        self._can_be_kept = False
        self._has_head = False
        self._head_bytes = 0
        self._is_odd = False  # more came than was asked for
        self.free_s = 0.0  # since when it is free, by the loop's clock

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, listener: AnswerReceiver, head: bytes, body: Iterable[bytes | memoryview]) -> None:
        """Writes a request; its answer goes to `listener`."""
        assert self._transport is not None and self._listener is None, "a free connection"
        self._listener = listener
        self._transport.writelines((head, *body))

    def pause(self) -> None:
        """Nothing more is read until `resume`: the worker's own send buffer fills then."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def abort(self) -> None:
        """Drops the connection, with what is unsent: vLLM aborts the request."""
        self._listener = None
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        listener = self._listener
        if listener is None:  # nobody has asked for anything
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a defect of ours: asyncio logs it, and closes the connection
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self._is_whole:
                self._fail(is_malformed=True)
                return
            self._is_odd = True  # what follows the answer is no part of it
        if not self._has_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT_BYTES:
                self._fail(is_malformed=True)
                return
        parts, is_whole = self._parts, self._is_whole
        if not parts and not is_whole:
            return
        self._parts = []
        if is_whole:
            self._free()
        listener.body_came(parts[0] if len(parts) == 1 else b"".join(parts), is_last=is_whole)

    def eof_received(self) -> None:
        if self._lasts_until_closed and self._listener is not None:
            listener, self._listener = self._listener, None
            listener.body_came(b"", is_last=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._owner.lost(self)
        self._fail(is_malformed=False)
        del self._parser  # it holds this connection: both would wait for the collector

    def _fail(self, *, is_malformed: bool) -> None:
        listener = self._listener
        self.abort()
        if listener is not None:
            listener.broken(is_malformed=is_malformed)

    def _free(self) -> None:
        """Before the listener hears of the end: whoever it wakes may want this connection."""
        self._listener = None
        self._is_whole = self._has_head = False
        self._head_bytes = 0
        # One with bytes behind the answer, or with some of the request unsent, would spoil the next.
        if self._is_odd or not self._can_be_kept or self._transport is None or self._transport.get_write_buffer_size():
            self.abort()
            return
        self._owner.free(self)

    # -- the parser's side

    def on_message_begin(self) -> None:
        self._headers = {}  # trailers of the answer before are in the way
        if self._is_whole:  # nobody has asked for this one
            self._is_odd = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value.rstrip(b" \t")

    def on_headers_complete(self) -> None:
        headers, self._headers = self._headers, {}
        if self._is_odd:
            return
        status = self._parser.get_status_code()
        if status < _CONTINUE:
            return
        self._status, self._has_head = status, True
        is_sized = b"content-length" in headers or b"transfer-encoding" in headers or status in _BODILESS
        self._lasts_until_closed = not is_sized
        if self._listener is not None:
            self._listener.head(status, headers)

    def on_body(self, data: bytes) -> None:
        if self._has_head and not self._is_odd:  # of an informational answer nobody wants a body
            self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._is_odd:
            return
        # An informational answer ends too, without a status of its own here.
        self._is_whole = self._status != 0
        self._status = 0
        self._can_be_kept = self._parser.should_keep_alive() and not self._lasts_until_closed


class Owner(Protocol):
    """The pool that a connection belongs to."""

    def free(self, connection: WorkerConnection) -> None: ...

    def lost(self, connection: WorkerConnection) -> None: ...
