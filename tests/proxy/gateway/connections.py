"""Gateways' connections without a socket: what HTTP/2, gRPC and the picker make of bytes that come in these pieces."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import cast

from ppd.proxy.app.client_routes import create_app
from ppd.proxy.assembly import Proxy
from ppd.proxy.gateway.health import EXTERNAL_PROCESSOR, HealthCheck
from ppd.proxy.gateway.picking import PickerCall
from ppd.proxy.gateway.reports import Reports
from ppd.proxy.gateway.wire.frames import END_HEADERS, END_STREAM, PREFACE, FrameReader, FrameType, frame
from ppd.proxy.gateway.wire.grpc import GrpcConnection, Method
from ppd.proxy.gateway.wire.heads import Heads
from ppd.proxy.gateway.wire.http2 import Http2Connection
from ppd.proxy.gateway.wire.http2_stream import Stream
from ppd.proxy.gateway.wire.open_connections import OpenConnections
from tests.proxy.gateway.envoy import MADE, proxy_of
from tests.support.fake_connections import FakeTransport
from tests.support.fleet import has_work
from tests.support.proxy_thread import Alarms

STATUS_200, TRAILERS = b"\x88", b"\x00\x01a\x01b"
PROCESS = f"/{EXTERNAL_PROCESSOR}/Process".encode()


@dataclass
class Echo:
    """Sends back what comes, and ends where the client does."""

    stream: Stream
    came: bytes = b""
    is_reset: bool = False

    def data(self, piece: memoryview) -> None:
        self.came += piece

    def half_closed(self) -> None:
        self.stream.send_head(STATUS_200)
        self.stream.send(self.came)
        self.stream.end(TRAILERS)

    def reset(self) -> None:
        self.is_reset = True


@dataclass
class EchoServer:
    out: bytearray = field(default_factory=bytearray)
    calls: list[tuple[Echo, Heads]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.connection = Http2Connection(self._opened, self.out.extend)
        self.connection.open()

    def _opened(self, stream: Stream, headers: Heads) -> Echo:
        self.calls.append((Echo(stream), headers))
        return self.calls[-1][0]

    def answers(self) -> list[tuple[int, int, int, bytes]]:
        """The frames since last asked."""
        sent, self.out[:] = bytes(self.out), b""
        return frames_in(sent)


def frames_in(sent: bytes) -> list[tuple[int, int, int, bytes]]:
    return [
        (kind, flags, stream, bytes(payload)) for kind, flags, stream, payload in FrameReader().feed(PREFACE + sent)
    ]


def echoed(parts: Iterable[bytes]) -> tuple[bytes, bool]:
    """What is answered, and whether the connection stays open."""
    server = EchoServer()
    is_open = all(server.connection.receive(part) for part in parts)
    server.connection.lost()
    assert not server.connection.streams and not server.connection.waiting
    check_order(bytes(server.out))
    return bytes(server.out), is_open


def check_order(sent: bytes) -> None:
    """Whole frames; on each stream a head, then data, then its end, and nothing behind that."""
    begun, ended = set[int](), set[int]()
    for kind, flags, stream, _ in frames_in(sent):
        if kind in (FrameType.HEADERS, FrameType.DATA):
            assert stream not in ended
            assert kind == FrameType.HEADERS or stream in begun
            begun.add(stream)
        if kind == FrameType.RST_STREAM or (kind == FrameType.HEADERS and flags & END_STREAM):
            ended.add(stream)


# -- the picker's


class FakePicker:
    """One picker, and gateways that come one after another. Whatever they send, its books are empty once they left."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self._faults.append(str(context)))
        self._faults: list[str] = []
        self._proxy = self._loop.run_until_complete(self._assembled())
        self._app = create_app(self._proxy)

    async def _assembled(self) -> Proxy:
        # What one gateway tells of workers must not change the next one's turn.
        proxy = proxy_of(breaker_failures=1 << 30)
        MADE.remove(proxy)  # it lives as long as this process
        return proxy

    def serve(self, parts: Iterable[bytes]) -> None:
        self._faults.clear()
        alarms = Alarms()
        logging.getLogger("ppd").addHandler(alarms)
        try:
            self._loop.run_until_complete(self._serve(parts))
        finally:
            logging.getLogger("ppd").removeHandler(alarms)
        alarms.check()
        assert not self._faults, self._faults

    async def _serve(self, parts: Iterable[bytes]) -> None:
        proxy, reports, open_ones = self._proxy, Reports(), OpenConnections()
        methods: dict[bytes, Method] = {
            b"/grpc.health.v1.Health/Check": lambda call: HealthCheck(call, lambda: True),
            PROCESS: partial(PickerCall, proxy, self._app, reports),
        }
        connection, transport = GrpcConnection(methods, open_ones), FakeTransport()
        connection.connection_made(cast(asyncio.Transport, transport))
        for part in parts:
            if transport.is_ended:  # the loop reads no more then
                break
            connection.data_received(part)
            await self._settled()
        transport.is_ended = True
        connection.connection_lost(None)
        await self._settled()
        check_order(transport.written)
        state = proxy.state
        assert connection.is_idle and not len(open_ones)
        assert not any(map(has_work, state.registry.views())) and not state.admission.inside
        assert not proxy.body_memory.held_bytes
        assert all(receipt.outcome != "running" for receipt in state.receipts.newest(100))

    async def _settled(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


@cache
def fake_picker() -> FakePicker:
    """To make one takes longer than to fuzz it."""
    return FakePicker()


def call(stream: int, *messages: bytes) -> bytes:
    """The frames of a call with these messages, still open."""
    block = b"\x83\x86\x04" + bytes((len(PROCESS),)) + PROCESS + b"\x0f\x10\x10application/grpc"  # HPACK
    sent = [frame(FrameType.HEADERS, END_HEADERS, stream, block)]
    sent += [frame(FrameType.DATA, 0, stream, struct.pack(">BI", 0, len(each)) + each) for each in messages]
    return b"".join(sent)
