"""A bad network between a client and a server: a TCP proxy in this event loop that delays, loses and cuts.

It works above TCP and cannot drop packets. Loss is modelled by its effect: the connection stalls for one retransmission
time-out, doubled each time the retransmission is lost too, and all later data waits. Fast retransmission is not
modelled: the small writes of a token stream seldom cause the duplicate acknowledgements that it needs, but for large
bodies the model is too harsh. The kernel's own time-outs are not modelled either.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

_READ_BYTES = 64 * 1024
_PACKET_BYTES = 1448
_WINDOW_CHUNKS = 64  # in flight; then the sender has to wait
_BACKLOG = 1024
_PLUG_S = 0.2
_NO_LINGER = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Of each direction of every connection."""

    latency_s: float = 0.0  # one way
    jitter_s: float = 0.0  # added to the latency, evenly drawn from 0 to this; order is kept
    bandwidth_bps: float = 0.0  # bytes (not bits) per second of one connection and direction; 0: no limit
    loss: float = 0.0  # share of packets
    retransmission_s: float = 0.2  # the kernel's shortest time-out


class LinkDirection:
    """One direction of one connection: when what is sent arrives. Pure."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._sent_s = 0.0
        self._arrived_s = 0.0

    def arrival_s(self, now_s: float, size: int, conditions: Conditions) -> float:
        """When the last of `size` bytes sent now arrives; never before what was sent earlier."""
        if conditions.bandwidth_bps:
            self._sent_s = max(now_s, self._sent_s) + size / conditions.bandwidth_bps
        else:
            self._sent_s = now_s
        flight_s = conditions.latency_s + conditions.jitter_s * self._random.random()
        arrival_s = self._sent_s + flight_s + self._stalls_s(size, conditions)
        self._arrived_s = max(self._arrived_s, arrival_s)
        return self._arrived_s

    def _stalls_s(self, size: int, conditions: Conditions) -> float:
        stall_s = 0.0
        for _ in range(max(1, -(-size // _PACKET_BYTES))):
            wait_s = conditions.retransmission_s
            while self._random.random() < conditions.loss:
                stall_s += wait_s
                wait_s *= 2
        return stall_s


class Way(StrEnum):
    OUT = "out"  # from the client to the target
    BACK = "back"


class _Reset:
    """Queued last when the sender's connection was reset."""


@dataclass(slots=True, eq=False)
class _End:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def reset(self) -> None:
        with suppress(OSError):  # closed already
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.writer.transport.abort()


class FaultLink:
    """Listens on a free loopback port and forwards to the target, under `conditions`, which may change at any time.

    `async with FaultLink("127.0.0.1", 8000, seed=1) as link:` and connect to `link.address`.
    """

    def __init__(self, host: str, port: int, *, conditions: Conditions | None = None, seed: int = 0) -> None:
        self.conditions = conditions or Conditions()
        self._target = (host, port)
        self._random = Random(seed)
        self._clear = {way: asyncio.Event() for way in Way}
        self._ends: set[_End] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepted: set[socket.socket] = set()  # their tasks have not begun
        self._listening = socket.socket()
        self._is_accepting = False
        self._plug: socket.socket | None = None
        self._plug_name: object = None

    async def __aenter__(self) -> FaultLink:
        self._listening.setblocking(False)
        self._listening.bind(("127.0.0.1", 0))
        self.heal()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.heal()
        self._stop_accepting()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for end in self._ends:
            end.reset()
        for accepted in self._accepted:
            accepted.close()
        self._listening.close()

    @property
    def address(self) -> str:
        host, port = self._listening.getsockname()
        return f"{host}:{port}"

    @property
    def connections(self) -> int:
        """Open connections: one to the client, and one to the target, for each client."""
        return len(self._ends)

    async def partition(self, *ways: Way, accepts: bool = False) -> None:
        """Nothing passes in these ways (default: both) and neither end is told; what is sent arrives after `heal`.

        New connections get no answer to their SYN. With `accepts` they are accepted, and nothing passes on them.
        """
        for way in ways or Way:
            self._clear[way].clear()
        if not accepts:
            await self._drop_syns()

    def heal(self) -> None:
        for clear in self._clear.values():
            clear.set()
        if self._plug is not None:
            self._plug.close()
            self._plug = None
        if not self._is_accepting:
            self._is_accepting = True
            self._listening.listen(_BACKLOG)
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def reset(self) -> None:
        for end in self._ends:
            end.reset()

    async def _drop_syns(self) -> None:
        """Fills an accept queue that has room for one connection: the kernel drops the SYNs that follow."""
        if not self._is_accepting:
            return
        self._stop_accepting()
        self._listening.listen(0)
        self._plug = socket.socket()
        self._plug.setblocking(False)
        with suppress(TimeoutError):  # the queue was already full
            async with asyncio.timeout(_PLUG_S):
                await asyncio.get_running_loop().sock_connect(self._plug, self._listening.getsockname())
        self._plug_name = self._plug.getsockname()

    def _stop_accepting(self) -> None:
        self._is_accepting = False
        asyncio.get_running_loop().remove_reader(self._listening)

    def _accept(self) -> None:
        accepted, peer = self._listening.accept()
        if peer == self._plug_name:
            accepted.close()
        else:
            self._accepted.add(accepted)
            self._spawn(self._serve(accepted))

    async def _serve(self, accepted: socket.socket) -> None:
        self._accepted.discard(accepted)
        near = _End(*await asyncio.open_connection(sock=accepted))
        self._ends.add(near)
        try:
            await self._clear[Way.OUT].wait()
            try:
                far = _End(*await asyncio.open_connection(*self._target))
            except OSError:
                near.reset()
                return
            self._ends.add(far)
            try:
                await asyncio.gather(self._carry(near, far, Way.OUT), self._carry(far, near, Way.BACK))
            finally:
                self._ends.discard(far)
                far.writer.close()
        finally:
            self._ends.discard(near)
            near.writer.close()

    async def _carry(self, source: _End, sink: _End, way: Way) -> None:
        flight: asyncio.Queue[tuple[float, bytes | type[_Reset]]] = asyncio.Queue(_WINDOW_CHUNKS)
        now, line = asyncio.get_running_loop().time, LinkDirection(self._random)
        landing = asyncio.ensure_future(self._land(flight, sink, self._clear[way], now))
        try:
            data: bytes | type[_Reset] = b"-"
            while data and data is not _Reset:
                data = await _next(source)
                size = len(data) if isinstance(data, bytes) else 0
                await flight.put((line.arrival_s(now(), size, self.conditions), data))
            await landing
        finally:
            landing.cancel()

    async def _land(
        self,
        flight: asyncio.Queue[tuple[float, bytes | type[_Reset]]],
        sink: _End,
        clear: asyncio.Event,
        now: Callable[[], float],
    ) -> None:
        while True:
            arrival_s, data = await flight.get()
            await asyncio.sleep(arrival_s - now())
            await clear.wait()
            with suppress(OSError):  # the sink is gone
                if not isinstance(data, bytes):
                    sink.reset()
                    return
                if not data:
                    if not sink.writer.is_closing():
                        sink.writer.write_eof()
                    return
                if not sink.writer.is_closing():
                    sink.writer.write(data)
                    await sink.writer.drain()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _next(source: _End) -> bytes | type[_Reset]:
    try:
        return await source.reader.read(_READ_BYTES)
    except ConnectionError:
        return _Reset
