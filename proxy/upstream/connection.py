"""One HTTP/1.1 connection to a worker: sends one request at a time, and parses its answer.

What is parsed goes straight to the answer that waits for it, without a task or a queue between.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
from collections.abc import Iterable
from typing import Protocol, cast

import httptools

HEAD_LIMIT_BYTES = 256 * 1024
SERVER_ERROR = 500
_CONTINUE = 200  # lower statuses are informational: the real answer follows
_BODILESS = (204, 304)


class AnswerReceiver(Protocol):
    """Takes the parsed answer."""

    def head(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def body_came(self, data: bytes, *, is_last: bool) -> None:
        """data: what has come since the last call; empty only if `is_last`."""

    def broken(self, *, is_malformed: bool) -> None: ...  # the rest will not come


class WorkerConnection(asyncio.Protocol):
    """Calls `owner.free` when an answer is complete and the next request may follow, `owner.lost` when it closes."""

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._headers: dict[bytes, bytes] = {}  # of the answer that is being parsed
        self._parser = httptools.HttpResponseParser(self)
        self._listener: AnswerReceiver | None = None
        self._status = 0
        self._parts: list[bytes] = []
        self._is_whole = False
        self._lasts_until_closed = False
        self._can_be_kept = False
        self._is_good = False  # the answer under way is no error of a server
        self._has_head = False
        self._head_bytes = 0
        self._is_odd = False  # bytes came that belong to no request
        self.free_s = 0.0  # when it was last freed, by the loop's clock

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes of the request are still in this process."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    @property
    def has_undelivered(self) -> bool:
        """Whether the worker's machine has not acknowledged all bytes of the request."""
        if self._transport is None or self.has_unsent:
            return self._transport is not None
        with contextlib.suppress(OSError):  # it has just been closed
            unacked = fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            return int.from_bytes(unacked, sys.byteorder) > 0
        return False

    @property
    def has_heard(self) -> bool:
        """Whether a byte of an answer has come since the connection was last free."""
        return self._head_bytes > 0

    def send(self, listener: AnswerReceiver, head: bytes, body: Iterable[bytes | memoryview]) -> None:
        assert self._transport is not None and self._listener is None, "a free connection"
        self._listener = listener
        self._transport.writelines((head, *body))

    def pause(self) -> None:
        """Stops reading until `resume`; TCP then stops the worker's sending."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def abort(self) -> None:
        """Drops the connection and its unsent bytes; vLLM then aborts the request."""
        self._listener = None
        if self._transport is not None:
            self._transport.abort()

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        listener = self._listener
        if listener is None:  # no request is open
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a bug of ours: asyncio logs it, and closes the connection
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self._is_whole:
                self._fail(is_malformed=True)
                return
            self._is_odd = True  # the bytes after the answer are not HTTP
        if not self._has_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT_BYTES:
                self._fail(is_malformed=True)
                return
        parts, is_whole = self._parts, self._is_whole
        if not parts and not is_whole:
            return
        if self._is_good:
            self._owner.has_answered = True
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
        del self._parser  # breaks a reference cycle, so that both are freed at once

    def _fail(self, *, is_malformed: bool) -> None:
        listener = self._listener
        self.abort()
        if listener is not None:
            listener.broken(is_malformed=is_malformed)

    def _free(self) -> None:
        """Called before the listener learns of the end, as the code it wakes may want this connection."""
        self._listener = None
        self._is_whole = self._has_head = False
        self._head_bytes = 0
        # Bytes after the answer, or unsent bytes of the request, would corrupt the next exchange.
        if self._is_odd or not self._can_be_kept or self._transport is None or self.has_unsent:
            self.abort()
            return
        self._owner.free(self)

    # -- called by the parser

    def on_message_begin(self) -> None:
        self._headers = {}  # drops trailers of the answer before
        if self._is_whole:  # no request is open for this one
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
        self._is_good = status < SERVER_ERROR
        if self._is_good:
            self._owner.has_answered = True
        is_sized = b"content-length" in headers or b"transfer-encoding" in headers or status in _BODILESS
        self._lasts_until_closed = not is_sized
        if self._listener is not None:
            self._listener.head(status, headers)

    def on_body(self, data: bytes) -> None:
        if self._has_head and not self._is_odd:  # a body of an informational answer is ignored
            self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._is_odd:
            return
        # It is called for informational answers too, with `_status` still 0.
        self._is_whole = self._status != 0
        self._status = 0
        self._can_be_kept = self._parser.should_keep_alive() and not self._lasts_until_closed


class Owner(Protocol):
    """The pool that a connection belongs to."""

    has_answered: bool  # set when a part of an answer comes

    def free(self, connection: WorkerConnection) -> None: ...

    def lost(self, connection: WorkerConnection) -> None: ...
