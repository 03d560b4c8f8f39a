"""A body is read from its socket to where it belongs, and the parser knows of every byte."""

from __future__ import annotations

import socket

import pytest

from ppd.proxy.plane import BodyBuffer, RequestParser
from tests.proxy.plane.transports import Ends, Recorder, of_the_poller, rounds, until

BODY = bytes(range(251)) * 2000  # 502,000 bytes
HEAD = b"POST / HTTP/1.1\r\nHost: p\r\nContent-Length: %d\r\n\r\n" % len(BODY)
BEHIND = b"GET / HTTP/1.1\r\nHost: q\r\n\r\n"


class Client(Recorder):
    """Has the rest of a body read in place once a part of it has come."""

    def __init__(self, *, drops_at: int = -1) -> None:
        super().__init__()
        self.parser, self.buffer = RequestParser(self), BodyBuffer(len(BODY))
        self.drops_at = drops_at  # bytes of the body, from which on nobody wants it
        self.heads = 0
        self.added_bytes = self.in_place_bytes = 0
        self.bodies: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.parser.feed(data)
        if 0 < self.added_bytes < len(BODY) and not self.bodies:
            self.buffer.read(self.transport, self.parser)  # type: ignore[arg-type]

    def on_message_begin(self) -> None: ...

    def on_head(self) -> None:
        self.heads += 1

    def on_body(self, data: bytes) -> None:
        if not self.bodies:
            self.buffer.add(data)
            self.added_bytes += len(data)

    def on_body_in_place(self, size: int) -> None:
        self.in_place_bytes += size
        if 0 <= self.drops_at <= self.in_place_bytes and not self.bodies:
            self.bodies.append(self.buffer.taken())

    def on_message_complete(self) -> None:
        if self.heads == 1 and not self.bodies:
            self.bodies.append(self.buffer.taken())


async def send(peer: socket.socket, data: bytes) -> None:
    sent = 0

    def is_sent() -> bool:
        nonlocal sent
        try:
            sent += peer.send(data[sent:])
        except BlockingIOError:
            return False
        return sent == len(data)

    await until(is_sent)


@pytest.mark.parametrize("first", [1, 1000, 40_000, len(BODY) - 1])
@of_the_poller
async def test_all_behind_the_first_read_comes_in_place_and_what_follows_does_not(ends: Ends, first: int) -> None:
    protocol = Client()
    _, peer = await ends.pair(protocol)
    await send(peer, HEAD + BODY[:first])
    await until(lambda: protocol.added_bytes + protocol.in_place_bytes == first)
    await send(peer, BODY[first:] + BEHIND)
    await until(lambda: protocol.heads == 2)
    assert protocol.bodies == [BODY]
    assert protocol.added_bytes <= 64 * 1024 and protocol.added_bytes + protocol.in_place_bytes == len(BODY)
    assert protocol.data.endswith(BEHIND) and len(protocol.data) == len(HEAD) + protocol.added_bytes + len(BEHIND)


@of_the_poller
async def test_a_body_that_nobody_wants_any_more_takes_the_usual_way(ends: Ends) -> None:
    protocol = Client(drops_at=1)
    _, peer = await ends.pair(protocol)
    await send(peer, HEAD + BODY[:100_000])
    await until(lambda: protocol.bodies)
    await send(peer, BODY[100_000:] + BEHIND)
    await until(lambda: protocol.heads == 2)
    assert BODY.startswith(protocol.bodies[0]) and len(protocol.bodies[0]) >= protocol.in_place_bytes > 0
    assert protocol.in_place_bytes < len(BODY)


@of_the_poller
async def test_a_client_that_leaves_in_the_middle_is_told(ends: Ends) -> None:
    protocol = Client()
    transport, peer = await ends.pair(protocol)
    await send(peer, HEAD + BODY[:100_000])
    await until(lambda: protocol.in_place_bytes)
    peer.close()
    await until(lambda: protocol.lost)
    assert transport.is_closing() and protocol.bodies == [] and BODY.startswith(protocol.buffer.taken())


@of_the_poller
async def test_what_fails_in_place_ends_the_connection_and_is_told(ends: Ends) -> None:
    protocol = Client()

    def fails(size: int) -> None:
        raise RuntimeError(size)

    protocol.on_body_in_place = fails  # type: ignore[method-assign]
    _, peer = await ends.pair(protocol)
    await send(peer, HEAD + BODY[:100_000])
    await until(lambda: protocol.lost)
    failure = ends.failures.pop()
    assert isinstance(failure, RuntimeError) and protocol.lost == [failure]


@of_the_poller
async def test_a_paused_transport_reads_nothing_in_place(ends: Ends) -> None:
    protocol = Client()
    transport, peer = await ends.pair(protocol)
    await send(peer, HEAD + BODY[:100_000])
    await until(lambda: protocol.added_bytes + protocol.in_place_bytes == 100_000)
    transport.pause_reading()
    before = protocol.in_place_bytes
    peer.send(BODY[100_000:101_000])
    await rounds()
    assert protocol.in_place_bytes == before
    transport.resume_reading()
    await until(lambda: protocol.in_place_bytes == before + 1000)


def test_no_more_is_added_than_the_body_has() -> None:
    buffer = BodyBuffer(3)
    buffer.add(b"ab")
    with pytest.raises(ValueError, match="size"):
        buffer.add(b"cd")
    assert buffer.taken() == b"ab" and buffer.taken() == b""
    buffer.add(b"")
    with pytest.raises(ValueError, match="size"):
        buffer.add(b"c")
