"""Idle connections to workers: kept after a request, or made in advance."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any, Protocol

from .. import plane
from ..errors import Overloaded
from ..runtime.loop_watch import time_limit
from ..runtime.process_limits import NO_FILES
from ..runtime.tls import NEVER_S, Tls
from .call import GONE, LATE, UNREACHABLE, Call
from .connection import WorkerConnection

Origin = tuple[str, bool]
"""A worker's host:port, and whether it uses TLS."""

_RST_AT_CLOSE = struct.pack("ii", 1, 0)

# A machine that vanished sends no reset. Its kernel fails these probes after 25 s, that of a busy engine answers them.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Settable(Protocol):
    """A socket, or what stands for one in an event loop."""

    def setsockopt(self, level: int, name: int, value: int, /) -> None: ...


class Pool:
    """The idle connections to one origin. The last one used is taken first, so that surplus ones age and are closed."""

    def __init__(
        self, origin: Origin, *, keepalive_s: float, tls: Tls | None, poller: plane.Poller | None = None
    ) -> None:
        """poller: serves connections without TLS; None: the event loop does."""
        self._host, _, port = origin[0].rpartition(":")
        self._host = self._host.strip("[]")
        self._port = int(port)
        self._tls = tls
        self._poller = None if tls else poller
        self._keepalive_s = keepalive_s
        self.has_answered = False  # its worker has, since `count_answers`; set by the connections
        self.answers = 0  # see `count_answers`
        self._loop = asyncio.get_running_loop()
        self._open = 0  # connections
        self._idle: dict[WorkerConnection, None] = {}  # of these, the longest unused first
        self._retiring: asyncio.TimerHandle | None = None

    @property
    def is_used(self) -> bool:
        return self._open > 0

    def count_answers(self) -> bool:
        """Called once a second: whether the worker has sent some of an answer meanwhile. A server's error is none."""
        has_answered, self.has_answered = self.has_answered, False
        self.answers += has_answered
        return has_answered

    def take(self) -> WorkerConnection | None:
        """An idle connection that is still good, or None."""
        oldest_s = self._loop.time() - self._keepalive_s
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.is_quiet and connection.free_s > oldest_s:
                return connection
            connection.abort()
        return None

    async def warm(self, count: int, limit_s: float) -> None:
        """Connects until `count` are idle, at most for `limit_s`. Failures are ignored: the health checks find them."""
        with contextlib.suppress(OSError, UnicodeError, TimeoutError):
            async with asyncio.timeout(limit_s):
                while len(self._idle) < count:
                    self.free(await self._connected())

    async def connect(self, call: Call, limit_s: float) -> WorkerConnection:
        """A new connection; LegError if there is none in time, Overloaded if the proxy has no file descriptor left."""
        connection: WorkerConnection | None = None
        try:
            async with connecting(call, limit_s):
                connection = await self._connected()
        except BaseException:
            if connection is not None:
                connection.abort()
            raise
        return connection

    def free(self, connection: WorkerConnection) -> None:
        connection.free_s = self._loop.time()
        self._idle[connection] = None
        if self._retiring is None:
            self._retiring = self._loop.call_later(self._keepalive_s, self._retire)

    def made(self) -> None:
        self._open += 1

    def lost(self, connection: WorkerConnection) -> None:
        self._open -= 1
        self._idle.pop(connection, None)

    def close(self) -> None:
        if self._retiring is not None:
            self._retiring.cancel()
        for connection in tuple(self._idle):
            connection.abort()

    def _retire(self) -> None:
        """Closes idle connections before the worker does, as a request sent just then would fail."""
        self._retiring = None
        oldest_s = self._loop.time() - self._keepalive_s
        for connection in tuple(self._idle):
            if connection.free_s <= oldest_s:
                connection.abort()
            else:
                self._retiring = self._loop.call_at(connection.free_s + self._keepalive_s, self._retire)
                return

    async def _connected(self) -> WorkerConnection:
        failure: OSError | None = None
        for family, address in await self._addresses():
            made, connection = _socket(family), WorkerConnection(self, self._loop)
            try:
                await self._loop.sock_connect(made, address)
                await self._begin(connection, made)
            except OSError as exc:
                made.close()
                failure = exc
            except BaseException:
                connection.drop()
                made.close()
                raise
            else:
                return connection
        raise failure or OSError("no address")

    async def _begin(self, connection: WorkerConnection, made: socket.socket) -> None:
        if self._poller is not None:
            self._poller.adopt(made, connection)
            return
        await self._loop.create_connection(
            lambda: connection,
            sock=made,
            ssl=self._tls.context if self._tls else None,
            server_hostname=self._host if self._tls else None,
            ssl_handshake_timeout=NEVER_S if self._tls else None,
        )

    async def _addresses(self) -> list[tuple[int, Any]]:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with contextlib.suppress(OSError):
            socket.inet_pton(family, self._host)
            return [(family, (self._host, self._port))]  # an IP address needs no resolver, which would cost a thread
        found = await self._loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        return [(family, address) for family, _, _, _, address in found]


def _socket(family: int) -> socket.socket:
    """A socket that drops its unsent bytes when closed, so that a leg that was given up does not arrive later.

    By then its handoff may have ended, and the blocks that it names may hold another prompt's KV.
    """
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_AT_CLOSE)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(made)
    return made


def keep_alive(made: Settable) -> None:
    """Has the kernel end this connection once the other machine is gone."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every platform
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextlib.asynccontextmanager
async def connecting(call: Call, limit_s: float) -> AsyncIterator[None]:
    """Limits the time to connect; turns failures into LegError or Overloaded."""
    try:
        async with time_limit(0.0 if call.is_gone else limit_s) as limit:

            def give_up(_: object) -> None:
                with contextlib.suppress(RuntimeError):  # its time has just run out
                    limit.reschedule(0.0)

            call.on_failure = give_up
            try:
                yield
            finally:
                call.on_failure = None
        if call.is_gone:  # just when the connection was made
            raise call.error(*GONE)
    except TimeoutError as exc:
        raise call.error(*(GONE if call.is_gone else LATE)) from exc
    except (OSError, UnicodeError) as exc:  # UnicodeError: a host name that can't be encoded
        if isinstance(exc, OSError) and exc.errno in NO_FILES:
            raise Overloaded(
                "the proxy has no file left to open for a connection", reason="queue_full", retry_after_s=1.0
            ) from exc
        raise call.error(*(GONE if call.is_gone else UNREACHABLE)) from exc
