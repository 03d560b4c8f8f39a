"""Random programs of both ends of several connections: no byte is lost, doubled or out of order."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.plane import IS_BUILT
from tests.proxy.plane.transports import needs_poller, reset, rounds, take, tcp_pair, until

if IS_BUILT:
    from ppd.proxy.plane.poller import Poller

OURS, PEERS = (random.Random(seed).randbytes(8_000_000) for seed in (1, 2))  # what each end says, from its first byte
SLOTS = 3
BUFFER_BYTES = 24 * 1024

SIZES = st.sampled_from([0, 1, 7, 300, 5_000, 20_000, 70_000, 300_000])
MAKES = st.sampled_from([bytes, bytearray, memoryview])
WRITES = st.tuples(st.just("write"), SIZES, MAKES)
LINES = st.tuples(
    st.just("writelines"), st.lists(SIZES, max_size=5) | st.lists(st.just(9), min_size=14, max_size=40), MAKES
)
WITHIN = (
    WRITES | LINES | st.tuples(st.sampled_from(["pause_reading", "resume_reading", "hand_over", "write_eof", "close"]))
)
OPS = (
    WRITES
    | LINES
    | WITHIN
    | st.tuples(st.just("send"), SIZES)
    | st.tuples(st.just("receive"), SIZES)
    | st.tuples(st.just("rounds"), st.integers(1, 4))
    | st.tuples(st.sampled_from(["abort", "shut", "reset", "leave"]))
    | st.tuples(st.just("next"), st.sampled_from(["data_received", "pause_writing", "resume_writing"]), WITHIN)
)
PROGRAMS = st.lists(st.tuples(st.integers(0, SLOTS - 1), OPS), max_size=60)


@dataclass
class Connection:
    """Both ends of one connection, and what each must have seen of the other."""

    peer: socket.socket
    transport: Any = None
    said: int = 0  # bytes that our end has written
    heard: int = 0
    peer_said: int = 0
    peer_heard: int = 0
    is_lossy: bool = False  # an end went without waiting for what was under way
    has_shut: bool = False
    has_ended: bool = False  # our end writes no more
    next: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # what is done within a protocol's method, once
    told: list[str] = field(default_factory=list)

    # -- our end

    def write(self, size: int, make: Callable[[bytes], Any]) -> None:
        if not self.has_ended:
            self.transport.write(make(self._words(size)))

    def writelines(self, sizes: list[int], make: Callable[[bytes], Any]) -> None:
        if not self.has_ended:
            parts = [make(self._words(size)) for size in sizes]
            self.transport.writelines(parts)
            for part in parts:
                if isinstance(part, bytearray):
                    part.clear()

    def _words(self, size: int) -> bytes:
        words = OURS[self.said : self.said + size]
        self.said += size
        return words

    def write_eof(self) -> None:
        self.has_ended = True
        self.transport.write_eof()

    def close(self) -> None:
        self.is_lossy |= self.peer_said > self.heard  # the kernel resets what is closed with bytes unread
        self.has_ended = True
        self.transport.close()

    def abort(self) -> None:
        self.is_lossy = self.has_ended = True
        self.transport.abort()

    def pause_reading(self) -> None:
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        self.transport.resume_reading()

    def hand_over(self) -> None:
        self.transport.set_protocol(Protocol(self))

    # -- the peer's end

    def send(self, size: int) -> None:
        with contextlib.suppress(OSError):
            if not self.has_shut and self.peer.fileno() >= 0:
                self.peer_said += self.peer.send(PEERS[self.peer_said : self.peer_said + size])

    def receive(self, size: int) -> None:
        with contextlib.suppress(OSError):
            self.check_received(self.peer.recv(size))

    def shut(self) -> None:
        self.has_shut = True
        with contextlib.suppress(OSError):
            self.peer.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self.is_lossy = True
        if self.peer.fileno() >= 0:
            reset(self.peer)

    def leave(self) -> None:
        self.is_lossy = True
        self.peer.close()

    # -- what must hold

    def check_received(self, data: bytes) -> None:
        assert data == OURS[self.peer_heard : self.peer_heard + len(data)]
        self.peer_heard += len(data)
        assert self.peer_heard <= self.said

    def tell(self, name: str) -> None:
        assert "connection_lost" not in self.told
        self.told.append(name)
        operation = self.next.pop(name, None)
        if operation is not None:
            self.do(operation)

    def do(self, operation: tuple[Any, ...]) -> None:
        name, *given = operation
        getattr(self, name)(*given)

    async def finish(self) -> None:
        """Both ends say what they still have to, and go."""
        if not self.is_lossy:
            self.transport.resume_reading()
            reading = asyncio.create_task(take(self.peer))
            if not self.transport.is_closing():
                await until(lambda: self.heard == self.peer_said)
            self.transport.close()
            self.check_received(await reading)
            assert self.peer_heard == self.said
        self.transport.abort()
        await until(lambda: "connection_lost" in self.told)
        await rounds(3)
        self.peer.close()
        self.check_order()

    def check_order(self) -> None:
        assert self.told[0] == "connection_made" and self.told.count("connection_made") == 1
        assert self.told[-1] == "connection_lost" and self.told.count("connection_lost") == 1
        _, eof, behind = "".join(f"<{name}>" for name in self.told).partition("<eof_received>")
        assert not eof or ("data_received" not in behind and "eof_received" not in behind)
        waits = [name for name in self.told if name.endswith("_writing")]
        assert waits[:1] in ([], ["pause_writing"])
        assert all(one != other for one, other in pairwise(waits))
        assert self.transport.get_write_buffer_size() == 0


class Protocol(asyncio.Protocol):
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.transport = transport
        self._connection.tell("connection_made")

    def data_received(self, data: bytes) -> None:
        connection = self._connection
        assert connection.transport.is_reading()
        assert data == PEERS[connection.heard : connection.heard + len(data)]
        connection.heard += len(data)
        connection.tell("data_received")

    def eof_received(self) -> bool:
        connection = self._connection
        assert connection.has_shut or connection.is_lossy
        assert connection.heard == connection.peer_said
        connection.tell("eof_received")
        return True

    def pause_writing(self) -> None:
        self._connection.tell("pause_writing")

    def resume_writing(self) -> None:
        self._connection.tell("resume_writing")

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.tell("connection_lost")


async def run(program: list[tuple[int, tuple[Any, ...]]]) -> None:
    def connect() -> Connection:
        ours, peer = tcp_pair(buffer_bytes=BUFFER_BYTES)
        connection = Connection(peer)
        poller.adopt(ours, Protocol(connection))
        return connection

    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    poller = Poller()
    slots = [connect() for _ in range(SLOTS)]
    for slot, (name, *values) in program:
        connection = slots[slot]
        if name == "rounds":
            await rounds(*values)
        elif name == "next":
            when, operation = values
            connection.next[when] = operation
        else:
            connection.do((name, *values))
            if name in ("abort", "reset", "leave"):  # the next one may get its number
                slots[slot] = connect()
                await connection.finish()
    for connection in slots:
        connection.next.clear()
        await connection.finish()
    poller.close()
    assert failures == []


@needs_poller
@pytest.mark.parametrize("make_loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@given(PROGRAMS)
def test_each_end_hears_what_the_other_said(
    make_loop: Callable[[], asyncio.AbstractEventLoop], program: list[tuple[int, tuple[Any, ...]]]
) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(run(program))
