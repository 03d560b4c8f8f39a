"""One client's HTTP/1.1 connection: parses requests as they come, and writes the answers in their order.

Each request becomes an `Exchange`, which answers it. Pipelined requests wait here, and the client is not read
meanwhile. While a client does not take what it was sent, its next request waits too.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from .. import plane
from ..errors import RequestError
from ..runtime.loop_watch import TimeLimit
from .limits import ConnectionLimits
from .request_head import OLD, VERSIONS, RequestHead, head_too_large, not_supported, origin_form, without_offer

SLICE_BYTES = 16 * 1024
HELD_BYTES = 64 * 1024
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # RFC 9113, 3.4


class Exchange(Protocol):
    """One request and its answer. Parts of the request, and `refuse`, may come before `begin`."""

    def begin(self) -> None: ...  # the answers before it are written

    @property
    def buffer(self) -> plane.BodyBuffer | None: ...  # where the rest of the body belongs, if that is settled

    def take(self, data: bytes) -> None: ...  # a part of the request's body, which the buffer has not been filled with

    def taken(self) -> None: ...  # the request has come completely

    def refuse(self, error: RequestError) -> None:
        """The bytes that follow are not HTTP, or the rest of the body did not come in time."""

    def leave(self) -> None: ...  # the client is gone

    def pause(self) -> None: ...  # the client does not take what it was sent

    def resume(self) -> None: ...


class Host(Protocol):
    """Counts connections, and takes over those that speak HTTP/2."""

    def opened(self, transport: asyncio.Transport, address: str) -> ConnectionLimits: ...

    def closed(self, limits: ConnectionLimits) -> None: ...

    def speak_http2(self, limits: ConnectionLimits, data: bytes) -> None: ...


class Server(Protocol):
    """Makes the exchange that answers a request."""

    patience_s: float  # for a request's body, and for a client to take what it was sent
    head_limit_bytes: int

    def exchange(self, connection: ClientConnection, head: RequestHead) -> Exchange: ...

    # For a request whose head could not be read.
    def refusal(self, connection: ClientConnection, error: RequestError) -> Exchange: ...


class ClientConnection(asyncio.Protocol):
    """address: the key under which `host` counts this client's connections."""

    __slots__ = (
        *("_address", "_ahead", "_body_left_bytes", "_body_timer", "_current", "_has_read", "_held", "_host"),
        *("_ignores_input", "_incoming", "_is_advancing", "_is_ended", "_is_ending", "_is_held_back", "_is_in_head"),
        *("_offer", "_parser", "_server", "_stall_timer", "_transport", "_unclear_bytes"),
        *("is_made", "limits", "loop"),
    )

    def __init__(self, server: Server, host: Host, address: str) -> None:
        self.limits: ConnectionLimits
        self.is_made = False  # from here on, `host` is told when it is closed
        self.loop = asyncio.get_running_loop()
        self._server = server
        self._host = host
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._parser: plane.RequestParser | None = None
        self._current: Exchange | None = None  # is being answered
        self._incoming: Exchange | None = None  # its request is being read
        self._ahead: tuple[Exchange, ...] = ()  # wait for the answers before them
        self._held = b""  # unparsed bytes behind those, or the first ones, which may become HTTP/2's preface
        self._offer = b""  # the head of a request that offered an upgrade, rewritten without the offer
        self._body_left_bytes = 0  # still to come of the current body, if its length is known
        self._unclear_bytes = 0  # read since the last complete head or part of a body
        self._has_read = False
        self._is_in_head = False
        self._ignores_input = False  # whatever still comes is ignored
        self._is_ending = False  # no further request is answered
        self._is_ended = False
        self._is_advancing = False
        self._is_held_back = False  # its exchange takes no more of the request now
        self._body_timer: TimeLimit | None = None
        self._stall_timer: TimeLimit | None = None

    # -- for the exchange that answers

    @property
    def transport(self) -> asyncio.Transport | None:
        """None once nothing can be written any more."""
        return None if self._is_ended else self._transport

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._is_ended:
            self._transport.write(data)

    def hold_back(self) -> None:
        """Does not read the client, until `read_on`."""
        self._is_held_back = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def read_on(self) -> None:
        self._is_held_back = False
        if self._transport is not None and not self._transport.is_closing() and len(self._held) <= HELD_BYTES:
            self._transport.resume_reading()

    def lasts(self) -> None:
        """The answer may take long: frees the parser, a kilobyte; the next request gets a new one."""
        if self._incoming is None and not self._is_in_head and not self._unclear_bytes:
            self._parser = None

    def finished(self, *, keeps_alive: bool) -> None:
        if self._incoming is self._current:
            self._stop_body_timer()
        if self._is_held_back and self._incoming in (None, self._current):  # its exchange may have taken nothing
            self.read_on()
        self._current = None
        self._is_ending = self._is_ending or not keeps_alive
        self._advance()
        if self._current is not None:
            self._watch_body()

    def abort(self) -> None:
        """Drops the connection, so that the client sees that its answer is incomplete."""
        if self._transport is not None:
            self._transport.abort()

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.is_made = True
        self.limits = self._host.opened(self._transport, self._address)

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            self.limits.lingers()
            return
        if not self._has_read:
            data, self._held = self._held + data, b""
            if len(data) < len(_HTTP2) and _HTTP2.startswith(data):
                self._held = data
                return
            self._has_read = True
            if data.startswith(_HTTP2):
                self._host.speak_http2(self.limits, data)
                return
        if self._held:  # it was there first, and waits for the answer to a request before it
            self._hold(data)
        else:
            self._parse(data)

    def eof_received(self) -> None:
        """A client that closes its half is usually gone: it is taken to be, and asyncio closes the connection.

        Over TLS asyncio first waits until the client has taken what it was sent, and tells nobody meanwhile.
        """
        if self.limits.is_tls and self._current is not None:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._parser = None
        self._ignores_input = self._is_ended = True
        self._ahead = ()
        self._stop_body_timer()
        self._stop_stall_timer()
        current, self._current, self._incoming = self._current, None, None
        try:
            if current is not None:
                current.leave()
        finally:
            self._host.closed(self.limits)

    def pause_writing(self) -> None:
        self.limits.is_stalled = True
        self._watch_stall()
        if self._current is not None:
            self._current.pause()

    def resume_writing(self) -> None:
        self.limits.is_stalled = False
        self._stop_stall_timer()
        if self._current is not None:
            self._current.resume()
        else:
            self._advance()
            self._watch_body()

    # -- requests

    def _parse(self, data: bytes) -> None:
        """In slices: pipelined requests are parsed only as far as needed; the rest is kept as bytes."""
        start = 0
        while start < len(data):
            if self._ignores_input:
                return
            if self._ahead or self.limits.is_stalled:
                self._hold(data[start:])
                return
            piece = data[start : start + max(SLICE_BYTES, self._body_left_bytes)]
            start += len(piece)
            self._parse_piece(piece)
        if self._body_left_bytes and self._incoming is not None and (buffer := self._incoming.buffer) is not None:
            self._fill(buffer)

    def _fill(self, buffer: plane.BodyBuffer) -> None:
        """Has the rest of the body read to where it belongs; only the compiled plane's sockets can."""
        transport, parser = self._transport, self._parser
        if isinstance(transport, plane.SocketTransport) and parser is not None:
            buffer.read(transport, parser)

    def _parse_piece(self, data: bytes) -> None:
        self._unclear_bytes += len(data)
        try:
            self._feed(data)
        except plane.NotHttp:
            self._refuse(RequestError("the request is not HTTP/1.1"))
            return
        if self._unclear_bytes > self._server.head_limit_bytes:
            self._refuse(head_too_large(self._server.head_limit_bytes))
        if self._incoming is not None:
            self._watch_body()

    def _feed(self, data: bytes) -> None:
        while True:
            if self._parser is None:
                self._parser = plane.RequestParser(self)
            parsed = self._parser.feed(data)
            offer, self._offer = self._offer, b""
            if not offer:
                return
            self._parser, data = None, offer + data[parsed:]

    def _refuse(self, error: RequestError) -> None:
        """Reads no more requests. The error goes to the request whose body is being read, else to a new exchange."""
        self._ignores_input = True
        if self._incoming is None:
            self._queue(self._server.refusal(self, error))
        else:
            self._incoming.refuse(error)

    def _hold(self, data: bytes) -> None:
        """Reads on, up to `HELD_BYTES`: on a connection that is not read, a client that leaves is not noticed."""
        self._held += data
        if len(self._held) > HELD_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def _queue(self, exchange: Exchange) -> None:
        if not self._is_ended:
            self._ahead += (exchange,)
            self._advance()

    def _advance(self) -> None:
        """Begins the next exchange, or closes. It loops, as an answer may be complete before `begin` returns."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._current is None and not self.limits.is_stalled and not self._is_ended:
                if self._is_ending or (self._ignores_input and not self._ahead):
                    self._end()
                elif self._ahead:
                    self._current, self._ahead = self._ahead[0], self._ahead[1:]
                    self._current.begin()
                    if self._held and self._current is not None and self._current is self._incoming:
                        self._read_on()  # the rest of its body
                elif self._held and self._has_read:
                    self._read_on()
                else:
                    break
        except Exception:  # of the code behind it, whose failure is told to whoever has called
            self.abort()
            raise
        finally:
            self._is_advancing = False

    def _read_on(self) -> None:
        held, self._held = self._held, b""
        if self._transport is not None and not self._is_held_back:
            self._transport.resume_reading()
        self._parse(held)

    def _end(self) -> None:
        is_read = self._incoming is None and not self._ignores_input and not self._held
        self._ignores_input = self._is_ended = True
        self._ahead = ()
        self._held = b""
        self._stop_body_timer()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self.limits.close_gently(is_read=is_read)

    # -- how long a client may take

    def _watch_body(self) -> None:
        """Limits the time of a body, once its request is the current one. A body that came with its head needs none."""
        if self._current is not None and self._current is self._incoming and self._body_timer is None:
            self._body_timer = TimeLimit(self._server.patience_s, self._late)

    def _late(self) -> None:
        error = RequestError(f"the body did not come within {self._server.patience_s:g} s")
        error.status = 408
        self._refuse(error)

    def _watch_stall(self) -> None:
        transport = self._transport
        if transport is None:
            return
        unsent_bytes = transport.get_write_buffer_size()

        def check() -> None:
            if transport.get_write_buffer_size() < unsent_bytes:  # the client took something
                self._watch_stall()
            else:
                self.abort()

        self._stop_stall_timer()
        self._stall_timer = TimeLimit(self._server.patience_s, check)

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # -- called by the parser

    def on_message_begin(self) -> None:
        self.limits.heard()  # not at the first byte: an empty line after a body is no request
        self._is_in_head = True

    def on_head(self) -> None:
        self._is_in_head = False
        if self._ignores_input:
            return
        parser = self._parser
        assert parser is not None, "it calls this"
        method, target, version = parser.method, parser.target, parser.version
        headers, fields = parser.headers, parser.fields
        if version not in VERSIONS or method == b"CONNECT":
            self._refuse(not_supported(version))
            return
        if parser.offers_upgrade:
            self._offer = without_offer(method, target, version, headers)
            return
        if not target.startswith(b"/"):
            target, headers, fields = origin_form(target, headers, fields)
        keeps_alive, read_bytes = parser.keeps_alive, self._unclear_bytes
        # The parser has let it pass, so its last 20 digits count; `int` takes no more than 4,300, be they zeros.
        size = 0 if "transfer-encoding" in fields else int(fields.get("content-length", "0")[-20:])
        head = RequestHead(method, target, headers, fields, version, version == OLD, keeps_alive, read_bytes, size)
        self._unclear_bytes = 0
        self._body_left_bytes = size
        self._incoming = self._server.exchange(self, head)
        self._queue(self._incoming)

    def on_body(self, data: bytes) -> None:
        self._unclear_bytes = 0
        self._body_left_bytes -= len(data)
        if self._incoming is not None and not self._is_ended:
            self._incoming.take(data)

    def on_body_in_place(self, size: int) -> None:
        self._unclear_bytes = 0
        self._body_left_bytes -= size

    def on_message_complete(self) -> None:
        if self._offer:
            return
        self._unclear_bytes = self._body_left_bytes = 0
        incoming, self._incoming = self._incoming, None
        if incoming is not None and not self._is_ended:
            self._stop_body_timer()
            incoming.taken()
