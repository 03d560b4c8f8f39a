"""One HTTP/1.1 connection to a worker: sends one request at a time, and parses its answer.

What is parsed goes straight to the answer that waits for it, without a task or a queue between.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterable
from typing import Protocol, cast

from .. import plane
from ..runtime.kernel_buffers import has_undelivered, has_unread

HEAD_LIMIT_BYTES = 256 * 1024
READ_BYTES = 256 * 1024
SERVER_ERROR = 500
_TAKEN: dict[bytes, bytes] = {}  # replaces headers that the listener has


class AnswerReceiver(Protocol):
    """Takes the parsed answer."""

    def head(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def body_came(self, data: bytes, *, is_last: bool) -> None:
        """data: what has come since the last call; empty only if `is_last`."""

    def broken(self, *, is_malformed: bool) -> None: ...  # the rest will not come


class WorkerConnection(asyncio.Protocol):
    """Calls `owner.made`, then `owner.free` whenever another request may follow, and `owner.lost` when it closes.

    HTTP does not tell to which request an answer belongs: the next answer is taken for that of the last request. So a
    worker that says more than it was asked is not asked again on that connection.
    """

    __slots__ = (
        *("_has_head", "_head_bytes", "_listener", "_owner", "_parser", "_transport"),
        *("free_s", "loop", "spoke_early"),
    )

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._parser = plane.AnswerParser()
        self._listener: AnswerReceiver | None = None
        self._has_head = False
        self._head_bytes = 0  # of one that has not come whole
        self.free_s = 0.0  # when it was last freed, by the loop's clock; 0: never
        self.spoke_early = False  # the worker, before it had the whole of a request

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_quiet(self) -> bool:
        """Whether it is open, and the worker has said nothing, not even goodbye, that was not read yet."""
        return self.is_open and not (self._transport is None or has_unread(self._transport))

    @property
    def has_unsent(self) -> bool:
        """Whether bytes of the request are still in this process."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    @property
    def has_undelivered(self) -> bool:
        """Whether the worker's machine has not acknowledged all bytes of the request."""
        return self._transport is not None and (self.has_unsent or has_undelivered(self._transport))

    @property
    def has_heard(self) -> bool:
        """Whether a byte of an answer has come since the connection was last free."""
        return self._has_head or self._head_bytes > 0

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

    def drop(self) -> None:
        """As `abort`, and lost at once: uvloop reports no end of a connection that is cancelled just as it is made."""
        self.abort()
        self.connection_lost(None)

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._owner.made()

    def data_received(self, data: bytes) -> None:
        if self._listener is None:  # no request is open
            self.abort()
            return
        if not self.has_heard and self.has_undelivered:
            self.spoke_early = True
            if self.free_s:  # then it may be the end of what was asked before
                self._fail(is_malformed=False)
                return
        try:
            body = self._parser.feed(data)
        except plane.NotHttp:
            self.unparsable()
            return
        self.parsed(body, len(data))

    def eof_received(self) -> None:
        if self._parser.lasts_until_closed and self._listener is not None:
            listener, self._listener = self._listener, None
            listener.body_came(b"", is_last=True)

    def connection_lost(self, exc: Exception | None) -> None:
        transport, self._transport = self._transport, None
        if transport is None:  # it was dropped
            return
        self._owner.lost(self)
        if self._listener is not None:
            self._decrypt_rest(transport.get_extra_info("ssl_object"))
        self._fail(is_malformed=False)
        del self._parser  # breaks a reference cycle, so that both are freed at once

    def _decrypt_rest(self, tls: ssl.SSLObject | None) -> None:
        """Takes what the worker sent before it closed, and was not read: less than 512 KiB, still in the TLS object.

        uvloop decrypts nothing of a connection that is paused, and reports its end as soon as the worker closes it.
        """
        with contextlib.suppress(ssl.SSLError):  # that nothing more lies there is one
            while tls is not None and self._listener is not None:
                if not (data := tls.read(READ_BYTES)):  # the worker's goodbye: TLS tells the end, not the socket
                    self.eof_received()
                    return
                self.data_received(data)

    # -- called with what the parser found

    def text_lane(self, client: asyncio.Transport) -> plane.TextLane | None:
        """What can pass plain events of this answer on; None where one of the sockets is not of the compiled plane."""
        worker = self._transport
        if not plane.IS_BUILT or not isinstance(worker, plane.SocketTransport):
            return None
        return plane.TextLane(worker, self._parser, self, client) if isinstance(client, plane.SocketTransport) else None

    def answers(self) -> None:
        self._owner.has_answered = True

    def unparsable(self) -> None:
        if self._listener is not None:
            self._take_head(self._listener)
            self._fail(is_malformed=True)

    def parsed(self, body: bytes, size: int) -> None:
        """body: what is of it in the `size` bytes that came."""
        parser, listener = self._parser, self._listener
        if listener is None:
            self.abort()
            return
        if not self._has_head:
            self._take_head(listener)
            if not self._has_head:
                self._head_bytes += size
                if self._head_bytes > HEAD_LIMIT_BYTES:
                    self._fail(is_malformed=True)
                    return
        is_whole = parser.is_whole
        if not body and not is_whole:
            return
        if parser.status < SERVER_ERROR:
            self._owner.has_answered = True
        if is_whole:
            self._free()
        listener.body_came(body, is_last=is_whole)

    def _fail(self, *, is_malformed: bool) -> None:
        listener = self._listener
        self.abort()
        if listener is not None:
            listener.broken(is_malformed=is_malformed)

    def _take_head(self, listener: AnswerReceiver) -> None:
        """Tells the listener of the answer's head, once it has come."""
        parser = self._parser
        if parser.status and not self._has_head:
            self._has_head = True
            if parser.status < SERVER_ERROR:
                self._owner.has_answered = True
            headers, parser.headers = parser.headers, _TAKEN
            listener.head(parser.status, headers)

    def _free(self) -> None:
        """Called before the listener learns of the end, as the code it wakes may want this connection."""
        parser = self._parser
        self._listener = None
        self._has_head = False
        self._head_bytes = 0
        # Bytes after the answer, or those of a request that the worker did not read, would corrupt the next exchange.
        if parser.is_followed or not parser.can_be_kept or self._transport is None or self.spoke_early:
            self.abort()
            return
        parser.next()
        self._owner.free(self)


class Owner(Protocol):
    """The pool that a connection belongs to."""

    has_answered: bool  # set when a part of an answer comes

    def made(self) -> None: ...  # it is open from here on

    def free(self, connection: WorkerConnection) -> None: ...

    def lost(self, connection: WorkerConnection) -> None: ...
