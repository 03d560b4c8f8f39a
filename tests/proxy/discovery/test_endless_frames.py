"""A peer whose frame has no end: each socket on which others may send ends the connection at its head."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress

import pytest
import zmq
import zmq.asyncio

from ppd.proxy.config import ProxyConfig
from ppd.proxy.discovery.heartbeat import MESSAGE_LIMIT_BYTES
from ppd.proxy.discovery.heartbeat_listener import HeartbeatListener
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.kv_events.replay import FRAME_LIMIT_BYTES, set_options
from ppd.proxy.telemetry.metrics import Metrics
from ppd.servers.agent.announcer import Announcer
from ppd.servers.fleet.ports import free_ports
from ppd.servers.sidecar.reporter import Reporter
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
        """At this host:port."""
        async with await asyncio.start_server(self.talk, "127.0.0.1", 0) as server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


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

    async def by(self, connect: Callable[[str], object], close: Callable[[], object]) -> None:
        """connect: to host:port."""
        async with self._peers[0].listening() as one, self._peers[1].listening() as other:
            connect(one)
            connect(other)
            await self._end()
            close()
            await self._peers[0].is_ended.wait()

    async def _end(self) -> None:
        allowed, endless = self._peers
        async with asyncio.timeout(60):
            await endless.is_ended.wait()
        assert not allowed.is_ended.is_set()


def ends_of(socket: zmq.asyncio.Socket) -> tuple[Callable[[str], object], Callable[[], object]]:
    return lambda address: socket.connect(f"tcp://{address}"), lambda: socket.close(linger=0)


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
                await talks.by(*ends_of(socket))


async def test_of_events_that_are_sent_again() -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        set_options(socket, by_ipv6=False)
        await Talks("ROUTER", FRAME_LIMIT_BYTES).by(*ends_of(socket))


@pytest.mark.parametrize("sends", [lambda to: Announcer([to]), Reporter], ids=["heartbeats", "reports"])
async def test_of_who_takes_heartbeats_or_reports(sends: Callable[[str], Announcer | Reporter]) -> None:
    with ExitStack() as made:
        await Talks("ROUTER", MESSAGE_LIMIT_BYTES).by(lambda address: made.callback(sends(address).close), made.close)
