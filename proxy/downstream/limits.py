"""Limits on clients: on each connection's time in every phase, on a request's head, and on all open requests."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Protocol

from ..admission.wrong_keys import WrongKeys
from ..config import OPERATOR_PATHS, ProxyConfig
from ..errors import PPDError, RequestError
from ..runtime.kernel_buffers import has_undelivered, has_unread_bytes
from ..runtime.loop_watch import time_limit
from ..runtime.tasks import Drain, draining
from ..telemetry.access_log import AccessLog, AccessRecord
from . import response
from .request_head import check_target, check_values, head_too_large, size_of, too_many_lines

CUT_S = 1.0  # for clients to take the end of an answer that a drain cuts short
CLOSE_S = 5.0  # for a client to take the last bytes when its connection is closed
LINGER_S = 1.0  # without a byte from a client over TLS that may not have read its last answer
# A frame of 8 bytes, type 7, on stream 0: no error, and no stream is refused yet.
GOAWAY = b"\x00\x00\x08\x07\x00" + bytes(4) + b"\x7f\xff\xff\xff" + bytes(4)
EVICTION_TRIES = 8  # connections looked at for one to close
LEFT_LIMIT = 500  # a connection is dropped after more abandoned requests than this, ...
LEFT_SHARE = 0.5  # ... if they are more than this share of its requests (HTTP/2 "rapid reset")


class ConnectionPhase(Enum):
    WAITING = "waiting"  # for a request's first byte
    HEAD = "head"  # part of a request's head has come
    BUSY = "busy"  # a request is served: it has time-outs of its own


# Looking up an enum's members by name is slow.
_WAITING, _HEAD, _BUSY = ConnectionPhase.WAITING, ConnectionPhase.HEAD, ConnectionPhase.BUSY


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. head_s: for a connection's first byte, and for each head. idle_s: between two requests."""

    head_s: float
    idle_s: float


class AtWork(Protocol):
    """A request under way."""

    is_multiplexed: bool

    def leave(self) -> None: ...  # the client is gone


class IdleConnection(Protocol):
    @property
    def address(self) -> str: ...

    def evict(self) -> bool:
        """Closes it for another's sake; False if its client still takes an answer, or has just asked."""


class IdleConnections:
    """Those without a request, of each address and of all, longest idle first. Each step takes constant time."""

    def __init__(self) -> None:
        self._all: OrderedDict[IdleConnection, None] = OrderedDict()
        self._by_address: dict[str, OrderedDict[IdleConnection, None]] = {}

    def add(self, connection: IdleConnection) -> None:
        self._all[connection] = None
        self._by_address.setdefault(connection.address, OrderedDict())[connection] = None

    def discard(self, connection: IdleConnection) -> None:
        if self._all.pop(connection, self) is self:
            return
        own = self._by_address[connection.address]
        del own[connection]
        if not own:
            del self._by_address[connection.address]

    def evict(self, address: str | None = None) -> bool:
        """Closes the longest idle one, of this address if one is given; False if there is none that may be closed."""
        idle = self._all if address is None else self._by_address.get(address, OrderedDict())
        for connection in tuple(islice(idle, EVICTION_TRIES)):
            self.discard(connection)
            if connection.evict():
                return True
            self.add(connection)
        return False


class ConnectionLimits:
    """The phase of one client's connection and its deadline. now: a monotonic clock in seconds."""

    __slots__ = (
        *("_at_work", "_deadline_s", "_ends_by_s", "_idle", "_left", "_multiplexed", "_now", "_patience", "_requests"),
        *("_is_spoilt", "address", "is_stalled", "is_tls", "phase", "transport"),
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        patience: Patience,
        now: Callable[[], float],
        *,
        address: str = "",
        is_tls: bool = False,
        idle: IdleConnections | None = None,
    ) -> None:
        """idle: holds this connection while it has no request."""
        self.transport = transport
        self.address = address
        self.is_tls = is_tls
        self._idle = idle or IdleConnections()
        self._idle.add(self)
        self.phase = _WAITING
        self.is_stalled = False  # the client does not take its answer, which has a time-out of its own
        self._patience = patience
        self._now = now
        self._deadline_s = now() + patience.head_s
        self._at_work: AtWork | None = None
        self._multiplexed: tuple[AtWork, ...] | None = None  # None: the connection is not of HTTP/2
        self._requests = 0
        self._left = 0
        self._is_spoilt = False
        self._ends_by_s: float | None = None  # the latest deadline, once the connection is to end

    def heard(self) -> None:
        """Bytes came. On HTTP/2 they need not belong to a request, so only the idle time counts there."""
        if self.phase is _WAITING and self._multiplexed is None and self._ends_by_s is None:
            self.phase = _HEAD
            self._idle.discard(self)
            self._deadline_s = self._now() + self._patience.head_s

    def began(self, request: AtWork) -> None:
        if self.phase is _WAITING:  # else it is idle no more
            self._idle.discard(self)
        self.phase = _BUSY
        if request.is_multiplexed:
            self._multiplexed = (*(self._multiplexed or ()), request)
        else:
            self._at_work = request
        self._requests += 1
        if self._ends_by_s is None:  # else it was refused before its request begins, and ends in its time
            self._deadline_s = math.inf  # until the request has ended, which may take long: a number less to keep

    @property
    def has_served(self) -> bool:
        return self._requests > 0

    def ended(self, request: AtWork, *, left: bool) -> None:
        """left: the client went before the answer was complete."""
        if request is self._at_work:
            self._at_work = None
        elif self._multiplexed:
            self._multiplexed = tuple([other for other in self._multiplexed if other is not request])
        self._left += left
        if self._left > LEFT_LIMIT and self._left > LEFT_SHARE * self._requests:
            self.abort()
        elif self._at_work is None and not self._multiplexed:
            self.phase = _WAITING
            if self._ends_by_s is None:
                self._deadline_s = self._now() + (CLOSE_S if self._is_spoilt else self._patience.idle_s)
                if not self.transport.is_closing():
                    self._idle.add(self)

    def evict(self) -> bool:
        if self.is_stalled or self.transport.get_write_buffer_size() or has_unread_bytes(self.transport):
            return False
        self._ends_by_s = math.inf
        if self.is_tls:
            self.abort()  # else it would wait for the client's goodbye, and keep its place
        else:
            self.close(CLOSE_S)
        return True

    def lost(self) -> None:
        """The client has left. Hypercorn reports that too, but not while it holds back a pipelined request."""
        for request in (self._at_work, *(self._multiplexed or ())):
            if request is not None:
                request.leave()

    def close_if_overdue(self) -> None:
        """Aborts a connection that was closed already, if its client has not taken the last bytes in time.

        Over TLS up to a MiB may lie between TLS and the kernel, and `is_stalled` does not tell of it. So that time
        begins anew while the kernel holds some of it; the event loop limits how long that may go on.
        """
        if self.transport.is_closing():
            if self.is_tls and has_undelivered(self.transport):
                self._deadline_s = max(self._deadline_s, self._now() + CLOSE_S)
            elif self.phase is not _BUSY and self._now() >= self._deadline_s:
                self.transport.abort()
            return
        if self.is_stalled or self.phase is _BUSY or self._now() < self._deadline_s:
            return
        if self.phase is _HEAD:
            self.transport.write(response.refusal(_late()))
        self.close(CLOSE_S)

    def excuse(self, seconds: float) -> None:
        """For so long nobody has looked at what the client did."""
        self._deadline_s += seconds
        if self._ends_by_s is not None:
            self._ends_by_s += seconds

    def close(self, limit_s: float) -> None:
        self._idle.discard(self)
        self.phase = _WAITING
        self._deadline_s = self._now() + limit_s
        self.transport.close()

    def close_gently(self, *, is_read: bool) -> None:
        """Closes after the last answer. Unread input would cause a reset, which can overtake that answer.

        So the connection is half-closed and read on until the client closes too. TLS has no half-close: there the
        connection stays open for a while, unless all that the client sent `is_read`.
        """
        self._ends_by_s = math.inf
        self._idle.discard(self)
        if self.is_tls and is_read:
            self.close(CLOSE_S)
            return
        self.phase = _WAITING
        self._deadline_s = self._ends_by_s = self._now() + CLOSE_S
        if self.is_tls:
            self.lingers()
        else:
            half_close(self.transport)

    def lingers(self) -> None:
        """The client still sends, or was just answered."""
        if self.is_tls:
            latest_s = math.inf if self._ends_by_s is None else self._ends_by_s
            self._deadline_s = min(latest_s, self._now() + LINGER_S)

    def go_away(self) -> None:
        """Tells a client of HTTP/2 to begin no further stream here; those under way go on (RFC 9113, 6.8)."""
        if not self.transport.is_closing():
            self.transport.write(GOAWAY)

    def spoil(self) -> None:
        """An answer over HTTP/2 can't be completed. Hypercorn resets no stream: the connection ends after the rest."""
        if not self._is_spoilt:
            self._is_spoilt = True
            self.go_away()

    def break_off(self) -> None:
        """Drops the connection, so that the client sees that its answer is incomplete, unless it is closing already."""
        if self._ends_by_s is None:
            self.abort()

    def abort(self) -> None:
        self.transport.abort()


def half_close(transport: asyncio.Transport) -> None:
    """Ends the writing side. A client may have reset the connection: asyncio tells that here, before it is read."""
    with contextlib.suppress(OSError):
        transport.write_eof()


def _late() -> RequestError:
    error = RequestError("the request's head did not come in time")
    error.status = 408
    return error


class UnderWay(AtWork, Protocol):
    """A request whose answer is not complete."""

    is_draining: bool  # the connection closes after this answer
    record: AccessRecord | None  # None: no access log

    def cut(self) -> None:
        """Ends the answer now, as the process is about to end, in a form that the client understands."""


class OpenRequests:
    """Every request whose answer is not whole, on all connections of one proxy."""

    def __init__(self, config: ProxyConfig, drain: Drain, access: AccessLog | None = None) -> None:
        self._config = config
        self._drain = drain
        self._access = access
        self.wrong_keys = WrongKeys(time.monotonic)
        self._open: dict[UnderWay, None] = {}  # not a set, which may be five times as large as what is in it
        self._quiet = asyncio.Event()

    def opened(self, method: str, path: str) -> AccessRecord | None:
        return None if self._access is None else self._access.opened(method, path)

    def refused(self, method: str, path: str, status: int) -> None:
        """A request that never began."""
        if self._access is not None:
            record = self._access.opened(method, path)
            record.status = status
            self._access.closed(record, "completed")

    def began(self, request: UnderWay, connection: ConnectionLimits) -> None:
        request.is_draining = self._drain.is_draining
        connection.began(request)
        self._open[request] = None

    def ended(self, request: UnderWay, connection: ConnectionLimits, *, left: bool) -> None:
        self._open.pop(request, None)
        if self._access is not None and request.record is not None:
            self._access.closed(request.record, "completed" if not left else "cut" if self._drain.is_cut else "left")
        if not self._open:
            self._quiet.set()
        connection.ended(request, left=left)

    async def drained(self, limit_s: float) -> None:
        """Waits until every answer is complete; cuts those still open after `limit_s`."""
        for exchange in self._open:
            exchange.is_draining = True
        try:
            async with time_limit(limit_s):
                await self._none_open()
        except TimeoutError:
            self._drain.is_cut = True
            for exchange in tuple(self._open):
                exchange.cut()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CUT_S):
                    await self._none_open()

    async def _none_open(self) -> None:
        while self._open:
            self._quiet.clear()
            await self._quiet.wait()

    def refusal(
        self, path: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], *, read_bytes: int | None = None
    ) -> PPDError | None:
        """The error that refuses a request with this head, or None. target: path and query as received.

        read_bytes: read for the head, by a parser that rejects control characters; None: by another parser.
        """
        if self._drain.is_draining and path not in OPERATOR_PATHS:
            return draining()
        config = self._config
        if len(headers) > config.header_limit:
            return too_many_lines(config.header_limit)
        # The parsers limit only the incomplete part of a head: a head that comes in two reads can exceed their limit.
        is_measured = read_bytes is not None and read_bytes <= config.head_limit_bytes
        if not is_measured and size_of(target, headers) > config.head_limit_bytes:
            return head_too_large(config.head_limit_bytes)
        try:
            check_target(target)
            if read_bytes is None:
                check_values(headers)
        except RequestError as exc:
            return exc
        return None
