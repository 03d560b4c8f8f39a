"""Clients' connections: accepted, counted and limited here, then served as HTTP/1.1 or HTTP/2."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import math
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .. import plane
from ..config import ProxyConfig
from ..errors import Overloaded
from ..runtime.kernel_buffers import has_sent
from ..runtime.loop_watch import STOOD_STILL_S, time_limit
from ..runtime.process_limits import open_files_limit, share_of_clients
from ..runtime.tls import NEVER_S, Tls
from . import response
from .http1_connection import ClientConnection
from .http1_server import Http1Server
from .hypercorn import HypercornReader, HypercornServer
from .limits import CLOSE_S, ConnectionLimits, IdleConnections, Patience, half_close

log = logging.getLogger(__name__)

LAST_S = 1.0  # at the end of the process, for clients to take what is already written
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ACCEPT_AGAIN_S = 0.5  # pause in accepting after one of them
COMPLAIN_EVERY_S = 60.0
TURN_AWAY_S = 1.0  # for a client without a place to take its refusal
TURNED_AWAY_AT_ONCE = 256  # further ones are closed without a word
AT_ONCE = 64  # connections accepted in a row before open ones are served again
SOME_AT_ONCE = 4  # the same if other processes accept from this socket: all should share a burst


class Connections:
    """Every connection of one listening socket."""

    def __init__(
        self,
        http1: Http1Server,
        hypercorn: HypercornServer,
        config: ProxyConfig,
        tls: Tls | None,
        now: Callable[[], float],
        poller: plane.Poller | None = None,
    ) -> None:
        """poller: serves connections without TLS; None: the event loop does."""
        self._http1 = http1
        self._hypercorn = hypercorn
        self._tls = tls
        self._poller = None if tls else poller
        self._now = now
        self._patience = Patience(config.head_timeout_s, config.idle_connection_s)
        self._take_s = max(CLOSE_S, config.idle_timeout_s)  # for a client over TLS to take all before it is closed
        self._limit = config.connections_per_address
        self._limit_of_all = share_of_clients(open_files_limit())
        self._open: dict[ConnectionLimits, None] = {}  # not a set, which may be five times as large as what is in it
        self._idle = IdleConnections()
        self._arriving: dict[asyncio.BaseProtocol, _Arriving] = {}
        self._http2: set[ConnectionLimits] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._by_address: Counter[str] = Counter()
        self._count = 0
        self._refused = 0
        self._evicted = 0
        self._turning_away = 0
        self._complained_s = -math.inf
        self._at_once = AT_ONCE

    def share_bursts(self) -> None:
        self._at_once = SOME_AT_ONCE

    async def accept(self, listening: socket.socket) -> None:
        """Until cancelled. Accepts many per round of the event loop, as a burst of clients would wait otherwise."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        readable = asyncio.Event()
        loop.add_reader(listening, readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                if not self._accept_some(listening):
                    loop.remove_reader(listening)
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                    loop.add_reader(listening, readable.set)
                await asyncio.sleep(0)  # a flood of connections must not keep the others from being served
        finally:
            loop.remove_reader(listening)

    async def watch(self) -> None:
        pause_s = min(1.0, self._patience.head_s / 4, self._patience.idle_s / 4)
        while True:
            due_s = self._now() + pause_s
            await asyncio.sleep(pause_s)
            late_s = self._now() - due_s
            for limits in tuple(self._open):
                if late_s > STOOD_STILL_S:
                    limits.excuse(late_s)
                limits.close_if_overdue()

    async def close(self) -> None:
        """Closes all connections; clients get `LAST_S` to take what is already written."""
        for limit_s in (LAST_S, 0.0):
            for limits in tuple(self._open):
                limits.close(limit_s) if limit_s else limits.abort()
            until_s = self._now() + LAST_S
            while self._count and self._now() < until_s:
                await asyncio.sleep(0.01)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def go_away(self) -> None:
        """Tells every client of HTTP/2: see `ConnectionLimits.go_away`."""
        for limits in self._http2:
            # One that has served a request was sent our settings, which must come first.
            if limits.has_served:
                limits.go_away()

    def gauges(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("ppd_connections", "Clients' connections that are open", self._count)
        yield CounterMetricFamily("ppd_connections_refused", "Connections above a limit on their number", self._refused)
        yield CounterMetricFamily(
            "ppd_connections_evicted", "Idle connections closed for new ones at that limit", self._evicted
        )

    # -- called by the connections

    def opened(self, transport: asyncio.Transport, address: str) -> ConnectionLimits:
        limits = ConnectionLimits(
            transport, self._patience, self._now, address=address, is_tls=self._tls is not None, idle=self._idle
        )
        self._open[limits] = None
        arriving = self._arriving.get(transport.get_protocol())
        if arriving is not None:
            self._idle.discard(arriving)  # `limits` stand there for the connection
            if arriving.is_evicted:
                self._idle.discard(limits)
                transport.abort()
        return limits

    def closed(self, limits: ConnectionLimits) -> None:
        self._open.pop(limits, None)
        self._idle.discard(limits)
        self._gone(limits.address)

    def speak_http2(self, limits: ConnectionLimits, data: bytes) -> None:
        """Hands a connection that begins with HTTP/2's preface to Hypercorn."""
        reader = HypercornReader()
        protocol = asyncio.StreamReaderProtocol(reader, loop=asyncio.get_running_loop())
        limits.transport.set_protocol(protocol)
        protocol.connection_made(limits.transport)
        reader.feed_data(data)
        self._start(self._serve_http2(limits, protocol, reader))

    # -- accepting

    def _accept_some(self, listening: socket.socket) -> bool:
        """False where there is no room for a connection."""
        for _ in range(self._at_once):
            try:
                accepted, (host, *_) = listening.accept()
            except BlockingIOError:
                break
            except OSError as exc:
                if exc.errno in NO_ROOM:
                    self._complain(os.strerror(exc.errno))
                    return False
                log.debug("a connection could not be accepted: %s", exc)
                # Else it is what became of this connection: its client has gone, say, or a firewall forbids it.
            else:
                self._admit(accepted, _address_key(host))
        return True

    def _admit(self, accepted: socket.socket, key: str) -> None:
        refusal = self._refusal(key)
        if refusal:
            self._refused += 1
            self._complain(f"{refusal}, and none is idle (this process may open {open_files_limit()} files)")
            if self._turning_away < min(TURNED_AWAY_AT_ONCE, self._limit_of_all // 8):
                self._turning_away += 1
                client = _TurnedAway(refusal)
                turning = self._start(self._turn_away(client, accepted))
                turning.add_done_callback(lambda _: self._turned_away(client, accepted))
            else:
                accepted.close()
            return
        self._count += 1
        self._by_address[key] += 1
        connection = ClientConnection(self._http1, self, key)
        if self._poller is not None:
            try:
                self._poller.adopt(accepted, connection)
            except OSError as exc:
                log.debug("a connection could not be set up: %s", exc)
                accepted.close()
                self._gone(key)
            return
        task = self._start(self._connect(lambda: connection, accepted))
        arriving = self._arriving[connection] = _Arriving(key, accepted, task, is_tls=self._tls is not None)
        self._idle.add(arriving)
        task.add_done_callback(partial(self._arrived, accepted, connection))

    def _arrived(self, accepted: socket.socket, connection: ClientConnection, task: asyncio.Task[None]) -> None:
        self._idle.discard(arriving := self._arriving.pop(connection))
        if not connection.is_made:  # its client has gone, its handshake failed, or it was evicted
            why = "evicted" if task.cancelled() else task.exception()
            log.debug("a connection could not be set up: %s", why)
            accepted.close()
            self._gone(arriving.address)

    def _refusal(self, key: str) -> str:
        """Why this address gets no more connections; empty if it does, perhaps in place of one that is idle.

        Idle clients must not use up the file descriptors that turns need for connections to workers.
        """
        if self._by_address[key] >= self._limit and not self._evict(key):
            return f"more than {self._limit} connections from one address"
        if self._count >= self._limit_of_all and not self._evict(None):
            return f"more than {self._limit_of_all} connections"
        return ""

    def _complain(self, why: str) -> None:
        """Now and then: in a burst each connection would be a line."""
        if self._now() - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = self._now()
            log.warning("new clients get no connection: %s", why)

    def _evict(self, address: str | None) -> bool:
        is_evicted = self._idle.evict(address)
        self._evicted += is_evicted
        return is_evicted

    def _gone(self, key: str) -> None:
        self._count -= 1
        self._by_address[key] -= 1
        if not self._by_address[key]:
            del self._by_address[key]

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _turn_away(self, client: _TurnedAway, accepted: socket.socket) -> None:
        """Sends the refusal, and reads on for a moment, so that no reset overtakes it."""
        with suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(TURN_AWAY_S):
                await self._connect(lambda: client, accepted)
                await client.is_gone.wait()

    def _turned_away(self, client: _TurnedAway, accepted: socket.socket) -> None:
        """Called also where the process ends before the refusal has begun."""
        self._turning_away -= 1
        if client.transport is None:
            accepted.close()
        else:
            client.transport.abort()

    async def _connect(self, make: Callable[[], asyncio.Protocol], accepted: socket.socket) -> None:
        """With TLS the handshake comes first; OSError if that fails, or the client has gone."""
        connect = asyncio.get_running_loop().connect_accepted_socket
        if self._tls is None:
            await connect(make, accepted)
            return
        async with time_limit(self._patience.head_s):
            await connect(
                make,
                accepted,
                ssl=self._tls.context,
                ssl_handshake_timeout=NEVER_S,
                ssl_shutdown_timeout=self._take_s,
            )

    async def _serve_http2(
        self, limits: ConnectionLimits, protocol: asyncio.StreamReaderProtocol, reader: HypercornReader
    ) -> None:
        self._http2.add(limits)
        try:
            await self._hypercorn.serve(limits, protocol, reader)
        finally:
            self._http2.discard(limits)
            self.closed(limits)


def _address_key(host: str) -> str:
    """What counts as one address: for IPv6 the /64 network, as a host picks its own addresses within it.

    One object for all connections from there.
    """
    if ":" not in host:
        return sys.intern(host)
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return sys.intern(str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False)))


@dataclass(eq=False, slots=True)
class _Arriving:
    """A connection that is being set up; with TLS that is its handshake."""

    address: str
    accepted: socket.socket
    task: asyncio.Task[None]
    is_tls: bool
    is_evicted: bool = False

    def evict(self) -> bool:
        """Ends a handshake now, a plain connection once it is made: if cancelled then, uvloop never reports its end.

        A handshake that its client has begun goes on, as does a request whose head has begun: in a burst each newcomer
        would end the one before it, and none would be served.
        """
        if self.is_tls and has_sent(self.accepted):
            return False
        self.is_evicted = True
        if self.is_tls:
            self.task.cancel()
        return True


class _TurnedAway(asyncio.Protocol):
    """A client that gets no place: told why, then read without heed until it closes."""

    def __init__(self, why: str) -> None:
        self.is_gone = asyncio.Event()
        self.transport: asyncio.Transport | None = None
        self._why = why

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = made = cast("asyncio.Transport", transport)
        made.write(response.refusal(Overloaded(self._why, reason="connections", retry_after_s=1.0)))
        if made.can_write_eof():
            half_close(made)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_gone.set()
