"""Messages of calls, cut anywhere; what is no call of ours; and the statuses that they end with."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import pytest

from ppd.proxy.gateway.health import READY, HealthCheck
from ppd.proxy.gateway.messages import HealthCheckRequest, HealthCheckResponse
from ppd.proxy.gateway.wire import grpc
from ppd.proxy.gateway.wire.frames import FrameType, frame
from ppd.proxy.gateway.wire.grpc import MESSAGE_LIMIT_BYTES, GrpcCall, GrpcConnection, GrpcStatus
from ppd.proxy.gateway.wire.open_connections import OpenConnections

PATH = "/test.Service/Method"


@dataclass
class Taker:
    call: GrpcCall
    messages: list[bytes] = field(default_factory=list)
    is_lost: bool = False
    fails: bool = False
    stays: bool = False  # and answers on when all was asked

    def message(self, data: bytes | memoryview) -> None:
        if self.fails:
            raise ValueError("of the method")
        self.messages.append(bytes(data))
        self.call.send(bytes(data).upper())

    def half_closed(self) -> None:
        if not self.stays:
            self.call.finish()

    def lost(self) -> None:
        self.is_lost = True


class Transport:
    """Of asyncio, as far as it is used."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.is_closed = False
        self.socket: socket.socket | None = None

    def write(self, data: bytes) -> None:
        self.out += data

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self.socket if name == "socket" else None

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Answered:
    messages: list[bytes]
    headers: dict[bytes, bytes]
    trailers: dict[bytes, bytes]


class Client:
    def __init__(self) -> None:
        self.takers: list[Taker] = []
        self.fails = self.stays = False
        self.connection = GrpcConnection({PATH.encode(): self._method}, OpenConnections())
        self.transport = Transport()
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding=None))
        self.h2.initiate_connection()

    def _method(self, call: GrpcCall) -> Taker:
        self.takers.append(Taker(call, fails=self.fails, stays=self.stays))
        return self.takers[-1]

    def begun(self, *pieces: bytes, path: str = PATH, method: str = "POST", kind: str = "application/grpc") -> int:
        stream = self.h2.get_next_available_stream_id()
        pseudo = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "x")]
        self.h2.send_headers(stream, [*pseudo, ("content-type", kind)])
        for piece in pieces:
            self.h2.send_data(stream, piece)
            self.connection.data_received(self.h2.data_to_send())
        return stream

    def asked(self, *pieces: bytes, **head: str) -> Answered:
        stream = self.begun(*pieces, **head)
        self.h2.end_stream(stream)
        self.connection.data_received(self.h2.data_to_send())
        answered, body = Answered([], {}, {}), b""
        for event in self.h2.receive_data(bytes(self.transport.out)):
            if isinstance(event, h2.events.ResponseReceived):
                answered.headers = dict(event.headers or ())
            elif isinstance(event, h2.events.DataReceived):
                body += event.data or b""
            elif isinstance(event, h2.events.TrailersReceived):
                answered.trailers = dict(event.headers or ())
        self.transport.out.clear()
        while body:
            (size,) = struct.unpack_from(">I", body, 1)
            answered.messages.append(body[5 : 5 + size])
            body = body[5 + size :]
        return answered


def prefixed(message: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(message)) + message


@pytest.mark.parametrize("step", [1, 2, 4, 5, 6, 11, 1000])
def test_messages_come_whole_however_they_are_cut(step: int) -> None:
    sent = prefixed(b"first") + prefixed(b"") + prefixed(b"the third one")
    answered = Client().asked(*[sent[at : at + step] for at in range(0, len(sent), step)])
    assert answered.messages == [b"FIRST", b"", b"THE THIRD ONE"]
    assert answered.headers == {b":status": b"200", b"content-type": b"application/grpc"}
    assert answered.trailers == {b"grpc-status": b"0"}


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (prefixed(b"x", flag=1), GrpcStatus.UNIMPLEMENTED),
        (struct.pack(">BI", 0, MESSAGE_LIMIT_BYTES + 1), GrpcStatus.RESOURCE_EXHAUSTED),
        (prefixed(b"half a message")[:-1], GrpcStatus.INVALID_ARGUMENT),
    ],
)
def test_what_is_no_message_ends_the_call_and_not_the_connection(sent: bytes, status: GrpcStatus) -> None:
    client = Client()
    assert client.asked(sent).trailers[b"grpc-status"] == b"%d" % status
    assert client.takers[0].is_lost
    assert client.asked(prefixed(b"next")).messages == [b"NEXT"]


@pytest.mark.parametrize(
    "head", [{"path": "/test.Service/Other"}, {"path": "*"}, {"method": "GET"}, {"kind": "application/json"}]
)
def test_what_is_no_call_is_told_so(head: dict[str, str]) -> None:
    client = Client()
    assert client.asked(**head).trailers[b"grpc-status"] == b"%d" % GrpcStatus.UNIMPLEMENTED
    assert not client.takers


def test_a_method_that_fails_ends_its_own_call_alone() -> None:
    client = Client()
    client.fails = True
    assert client.asked(prefixed(b"x")).trailers[b"grpc-status"] == b"%d" % GrpcStatus.INTERNAL
    assert client.takers[0].is_lost
    client.fails = False
    assert client.asked(prefixed(b"next")).messages == [b"NEXT"]


def test_unfinished_messages_are_bounded_over_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc, "HELD_LIMIT_BYTES", 100)
    client = Client()
    first = client.begun(prefixed(b"x" * 90)[:80])
    refused = client.asked(prefixed(b"y" * 90)[:80])
    assert refused.trailers[b"grpc-status"] == b"%d" % GrpcStatus.RESOURCE_EXHAUSTED
    client.h2.reset_stream(first)
    client.connection.data_received(client.h2.data_to_send())
    assert client.takers[0].is_lost
    assert client.connection._memory.count == 0
    assert client.asked(prefixed(b"z" * 90)).messages == [b"Z" * 90]


def test_a_lost_connection_ends_its_calls() -> None:
    client = Client()
    client.h2.send_headers(
        1,
        [
            (":method", "POST"),
            (":path", PATH),
            (":scheme", "http"),
            (":authority", "x"),
            ("content-type", "application/grpc"),
        ],
    )
    client.connection.data_received(client.h2.data_to_send())
    assert not client.connection.is_idle
    client.connection.connection_lost(None)
    assert client.takers[0].is_lost
    assert client.connection.is_idle


def test_the_calls_of_a_connection_that_breaks_the_protocol_end_at_once() -> None:
    """Found by `http2`. It closes only once the client has read what was written, which may be never."""
    client = Client()
    client.begun(prefixed(b"x"))
    client.connection.data_received(frame(FrameType.DATA, 0, 0, b"y"))
    assert client.transport.is_closed and client.takers[0].is_lost
    written = bytes(client.transport.out)
    client.takers[0].call.send(b"what was under way")
    assert client.transport.out == written
    client.connection.connection_lost(None)


def test_bytes_that_are_no_http2_close_the_connection() -> None:
    client = Client()
    client.connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    assert client.transport.is_closed


# -- health checks


@dataclass
class Told:
    """A call's answers."""

    statuses: list[int] = field(default_factory=list)
    status: GrpcStatus | None = None

    def send(self, message: bytes) -> None:
        self.statuses.append(HealthCheckResponse.FromString(message).status)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, message: str = "") -> None:
        self.status = status


SERVING, NOT_SERVING = 1, 2


@pytest.mark.parametrize(
    ("service", "is_ready", "statuses", "status"),
    [
        *[(name, True, [SERVING], GrpcStatus.OK) for name in READY],
        *[(name, False, [NOT_SERVING], GrpcStatus.OK) for name in READY],
        ("liveness", False, [SERVING], GrpcStatus.OK),
        ("another", True, [], GrpcStatus.NOT_FOUND),
    ],
)
def test_checks(service: str, is_ready: bool, statuses: list[int], status: GrpcStatus) -> None:
    told = Told()
    HealthCheck(told, lambda: is_ready).message(HealthCheckRequest(service=service).SerializeToString())  # type: ignore[arg-type]
    assert (told.statuses, told.status) == (statuses, status)


def test_a_message_that_is_none() -> None:
    told = Told()
    HealthCheck(told, lambda: True).message(b"\xff\xff")  # type: ignore[arg-type]
    assert (told.statuses, told.status) == ([], GrpcStatus.INVALID_ARGUMENT)


@pytest.mark.parametrize("ends", ["reset", "connection"])
def test_a_call_that_only_listens_is_told_that_its_peer_has_left_and_keeps_no_server_from_its_end(ends: str) -> None:
    client = Client()
    client.stays = True
    assert client.asked(prefixed(b"x")).messages == [b"X"]  # a gRPC client ends its side behind its one request
    assert client.connection.is_idle
    client.takers[0].call.send(b"more")
    if ends == "reset":
        client.connection.data_received(frame(FrameType.RST_STREAM, 0, 1, bytes(4)))
    else:
        client.connection.connection_lost(None)
    assert client.takers[0].is_lost


def test_the_kernel_ends_the_connection_of_a_gateway_whose_machine_is_gone() -> None:
    transport = Transport()
    with socket.socket() as transport.socket:
        GrpcConnection({}, OpenConnections()).connection_made(transport)  # type: ignore[arg-type]
        assert transport.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert transport.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
