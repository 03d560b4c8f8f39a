"""A peer whose frame has no end: each socket on which others may send to the proxy ends the connection at its head."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import zmq
import zmq.asyncio

from ppd.proxy.config import ProxyConfig
from ppd.proxy.discovery.heartbeat_listener import MESSAGE_LIMIT_BYTES, HeartbeatListener
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.kv_events.replay import FRAME_LIMIT_BYTES, set_options
from ppd.proxy.telemetry.metrics import Metrics
from ppd.servers.fleet.ports import free_ports
from tests.support.announcements import subscribing
from tests.support.clock import FakeClock

pytestmark = pytest.mark.slow

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)  # of ZMTP 3.0
COMMAND, LONG = b"\x04", b"\x02"


def ready(kind: str) -> bytes:
    value = kind.encode()
    said = b"\x05READY\x0bSocket-Type" + len(value).to_bytes(4) + value
    return COMMAND + bytes([len(said)]) + said


class Peer:
    """Speaks ZMTP over a plain connection: greets, and begins one frame."""

    def __init__(self, kind: str, frame_bytes: int) -> None:
        """kind: of socket, as which it names itself; frame_bytes: as the frame's head has it."""
        self._said = GREETING + ready(kind) + LONG + frame_bytes.to_bytes(8) + b"x"
        self.is_ended = asyncio.Event()  # by the other side

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._said)
        try:
            with suppress(ConnectionError):
                while await reader.read(1024):
                    pass
            self.is_ended.set()
        finally:
            writer.close()

    async def connect(self, port: int) -> asyncio.Task[None]:
        return asyncio.create_task(self.talk(*await asyncio.open_connection("127.0.0.1", port)))

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """At this endpoint."""
        async with await asyncio.start_server(self.talk, "127.0.0.1", 0) as server:
            yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class Talks:
    """With a socket of the proxy's: one frame is as long as it may be, the other one too long; neither comes whole."""

    def __init__(self, kind: str, limit_bytes: int) -> None:
        self._peers = Peer(kind, limit_bytes), Peer(kind, limit_bytes + 1)

    async def to(self, port: int) -> None:
        talking = [await peer.connect(port) for peer in self._peers]
        await self._end()
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)

    async def by(self, socket: zmq.asyncio.Socket) -> None:
        async with self._peers[0].listening() as one, self._peers[1].listening() as other:
            socket.connect(one)
            socket.connect(other)
            await self._end()
            socket.close(linger=0)
            await self._peers[0].is_ended.wait()

    async def _end(self) -> None:
        allowed, endless = self._peers
        async with asyncio.timeout(60):
            await endless.is_ended.wait()
        assert not allowed.is_ended.is_set()


async def test_of_a_heartbeat(clock: FakeClock) -> None:
    (port,) = free_ports(1)
    listener = HeartbeatListener(ProxyConfig(heartbeat_port=port), Registry(), Metrics(), clock)
    listener.open()
    try:
        await Talks("DEALER", MESSAGE_LIMIT_BYTES).to(port)
    finally:
        listener.close()


@pytest.mark.parametrize("is_bound", [False, True])
async def test_of_kv_events(is_bound: bool) -> None:
    """From a worker that publishes them, or connects."""
    async with subscribing() as lab:
        with lab.subscriber._socket(by_ipv6=False) as socket:
            socket.setsockopt(zmq.HEARTBEAT_IVL, 0)  # which would end the connection too, after a while
            talks = Talks("PUB", FRAME_LIMIT_BYTES)
            if is_bound:
                await talks.to(socket.bind_to_random_port("tcp://127.0.0.1"))
            else:
                await talks.by(socket)


async def test_of_events_that_are_sent_again() -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        set_options(socket, by_ipv6=False)
        await Talks("ROUTER", FRAME_LIMIT_BYTES).by(socket)
