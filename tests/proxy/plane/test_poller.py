"""The poller itself: which sockets it takes, and whom it serves when."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import fcntl
import os
import resource
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ppd.proxy.plane import IS_BUILT
from tests.proxy.plane.transports import (
    BIG,
    SMALL_BYTES,
    Ends,
    Recorder,
    descriptors,
    needs_poller,
    of_the_poller,
    rounds,
    take,
    tcp_pair,
    until,
)

if IS_BUILT:
    from ppd.proxy.plane.poller import Poller, SocketTransport

MADE, DATA, EOF, LOST = "connection_made", "data_received", "eof_received", "connection_lost"
MANY = 2_000


@contextmanager
def in_place_of(taken: socket.socket) -> Iterator[None]:
    """Its number stands for a file, which no epoll takes."""
    kept = os.dup(taken.fileno())
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), taken.fileno())
        try:
            yield
        finally:
            if taken.fileno() >= 0:
                os.dup2(kept, taken.fileno())
            os.close(kept)


# -- which sockets


@of_the_poller
async def test_a_closed_socket_is_refused(over: Ends) -> None:
    await over.pair(Recorder())
    before = descriptors()
    closed = socket.socket()
    closed.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        await over.adopt(closed, protocol := Recorder())
    assert (protocol.told, descriptors()) == ([], before)


@of_the_poller
async def test_what_no_epoll_takes_stays_the_callers(over: Ends) -> None:
    ours, peer = socket.socketpair()
    with ours, peer:
        with in_place_of(ours), pytest.raises(PermissionError):
            await over.adopt(ours, protocol := Recorder())
        assert (protocol.told, ours.fileno() >= 0) == ([], True)
        await over.adopt(ours, protocol)
        peer.send(b"x")
        await until(lambda: protocol.data)


@of_the_poller
async def test_a_socket_that_came_as_no_descriptor_was_left_may_come_again(over: Ends) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ours, peer = tcp_pair()
    with peer:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                await over.adopt(ours, protocol := Recorder())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert protocol.told == []
        await over.adopt(ours, protocol)
        peer.send(b"x")
        await until(lambda: protocol.data)


@of_the_poller
async def test_a_socket_is_adopted_once(over: Ends) -> None:
    transport, peer = await over.pair(protocol := Recorder())
    for turn in (transport.pause_reading, transport.resume_reading):
        turn()
        with pytest.raises(FileExistsError):
            await over.adopt(transport.get_extra_info("socket"), Recorder())
    peer.send(b"x")
    await until(lambda: protocol.data)


@of_the_poller
async def test_a_number_that_a_stranger_closed_is_the_next_sockets(over: Ends) -> None:
    """The kernel gives the lowest that is free, so each new socket would get this one, and none be taken."""
    transport, _ = await over.pair(protocol := Recorder())
    number = transport.get_extra_info("socket").fileno()
    late = Recorder()
    ours, peer = tcp_pair()
    with ours, peer:
        again = socket.socket(fileno=os.dup2(ours.fileno(), number))  # which closes it
        await over.adopt(again, late)
        transport.abort()
        transport.write(b"for the one before")
        peer.send(b"x")
        await until(lambda: late.data and protocol.lost)
        late.transport.write(b"y")
        assert await take(peer, 1) == b"y"
    assert (late.told, protocol.told) == ([MADE, DATA], [MADE, LOST])
    assert [exc.errno for exc in (protocol.lost[0], *over.failures) if isinstance(exc, OSError)] == [errno.EBADF] * 2
    over.failures.clear()


@of_the_poller
async def test_who_looks_at_a_socket_does_not_own_it(over: Ends) -> None:
    ours, peer = tcp_pair()
    number = ours.fileno()
    transport = await over.adopt(ours, protocol := Recorder())
    assert ours.fileno() == -1, "its owner is the transport, which keeps no object for it"
    assert transport.get_extra_info("socket").fileno() == number
    peer.send(b"x")
    await until(lambda: protocol.data)
    transport.abort()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    peer.close()


@of_the_poller
async def test_a_connection_may_be_ended_as_it_is_met(over: Ends) -> None:
    ours, peer = tcp_pair()
    with peer:
        await over.adopt(ours, protocol := Recorder(connection_made=lambda met: met.transport.abort()))
        assert ours.fileno() == -1
        await until(lambda: protocol.lost)
        assert peer.recv(1) == b""


@of_the_poller
async def test_a_protocol_that_fails_as_it_is_met_has_no_connection(over: Ends) -> None:
    def fails(protocol: Recorder) -> None:
        protocol.transport.write(b"head")
        raise RuntimeError("as it is met")

    ours, peer = tcp_pair()
    with peer:
        with pytest.raises(RuntimeError, match="as it is met"):
            await over.adopt(ours, failed := Recorder(connection_made=fails))
        peer.send(b"x")
        await rounds()
        assert failed.told == [MADE]
        failed.transport.write(b"not sent")
        await over.adopt(ours, protocol := Recorder())
        await until(lambda: protocol.data)
        assert await take(peer, 4) == b"head"


@of_the_poller
async def test_a_protocol_that_ends_its_connection_and_then_fails_has_closed_the_socket(over: Ends) -> None:
    """What the caller closes then is no descriptor that another has by now."""

    def ends_and_fails(protocol: Recorder) -> None:
        protocol.transport.abort()
        raise RuntimeError("as it is met")

    ours, peer = tcp_pair()
    with peer:
        with pytest.raises(RuntimeError, match="as it is met"):
            await over.adopt(ours, Recorder(connection_made=ends_and_fails))
        assert ours.fileno() == -1
        assert peer.recv(1) == b""


@pytest.mark.parametrize("how", ["resume", "pause", "write"])
@of_the_poller
async def test_a_connection_that_can_be_watched_no_longer_is_lost(over: Ends, how: str) -> None:
    transport, _ = await over.pair(protocol := Recorder(), buffer_bytes=SMALL_BYTES)
    ours = transport.get_extra_info("socket")
    if how == "resume":
        transport.pause_reading()
    with in_place_of(ours):
        if how == "write":
            transport.write(BIG)
        else:
            getattr(transport, f"{how}_reading")()
        assert protocol.told == [MADE]
        assert transport.is_closing()
        await until(lambda: protocol.lost)
    assert isinstance(protocol.lost[0], OSError)
    assert protocol.told == [MADE, LOST]


@needs_poller
def test_a_transport_that_nobody_made_does_no_harm() -> None:
    transport = SocketTransport()
    transport.write(b"")
    transport.pause_reading()
    transport.abort()
    assert transport.get_write_buffer_size() == 0


# -- a round of events


@pytest.mark.parametrize("has_news", [False, True])
@of_the_poller
async def test_an_event_of_a_closed_socket_is_not_anothers(over: Ends, has_news: bool) -> None:
    """The first of two that are read closes the other one; a third gets the number of that in the same round."""
    third, third_peer = tcp_pair()
    late = Recorder()

    def takes_its_place(protocol: Recorder) -> None:
        if late.told:
            return
        other = transports[protocol is read[0]]
        number = other.get_extra_info("socket").fileno()
        other.abort()
        again = socket.socket(fileno=fcntl.fcntl(third, fcntl.F_DUPFD, number))
        assert again.fileno() == number
        over.poller.adopt(again, late)  # type: ignore[union-attr]

    read = [Recorder(data_received=takes_its_place) for _ in range(2)]
    pairs = [await over.pair(protocol) for protocol in read]
    transports = [transport for transport, _ in pairs]
    with third, third_peer:
        if has_news:
            third_peer.send(b"new")
        for _, peer in pairs:
            peer.send(b"old")
        await until(lambda: late.told)
        await until(lambda: read[0].lost or read[1].lost)
        await rounds()
        assert sorted(bytes(protocol.data) for protocol in read) == [b"", b"old"]
        assert late.told == [MADE, DATA] if has_news else [MADE]
        third_peer.send(b"er")
        await until(lambda: bytes(late.data) == (b"newer" if has_news else b"er"))
        late.transport.abort()


@of_the_poller
async def test_thousands_are_served_and_the_event_loop_between_them(over: Ends) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 3 * MANY)), hard))
    served = 0
    met: list[int] = []

    def serve(_: Recorder) -> None:
        nonlocal served
        if not served:
            asyncio.get_running_loop().call_soon(lambda: met.append(served))
        served += 1

    pairs = [socket.socketpair() for _ in range(MANY)]
    protocols = [Recorder(data_received=serve) for _ in pairs]
    for (ours, _), protocol in zip(pairs, protocols, strict=True):
        over.poller.adopt(ours, protocol)  # type: ignore[union-attr]
    for number, (_, peer) in enumerate(pairs):
        peer.send(b"%d" % number)
        peer.close()
    await until(lambda: all(protocol.lost for protocol in protocols))
    assert [bytes(protocol.data) for protocol in protocols] == [b"%d" % number for number in range(MANY)]
    assert all(protocol.told == [MADE, DATA, EOF, LOST] for protocol in protocols)
    assert 0 < met[0] < MANY / 4


@needs_poller
def test_what_an_exception_leaves_of_a_round_is_served_in_the_next() -> None:
    def exits(_: Recorder) -> None:
        if not exited:
            exited.append(True)
            raise SystemExit

    async def read_all() -> None:
        await until(lambda: all(protocol.data for protocol in protocols))

    async def begin() -> None:
        for (ours, peer), protocol in zip(pairs, protocols, strict=True):
            poller.adopt(ours, protocol)
            peer.send(b"x")
        await read_all()

    exited: list[bool] = []
    pairs = [tcp_pair() for _ in range(5)]
    protocols = [Recorder(data_received=exits) for _ in pairs]
    poller = Poller()
    with asyncio.Runner() as runner:
        with pytest.raises(SystemExit):
            runner.run(begin())
        assert sum(map(len, (protocol.data for protocol in protocols))) == 1
        runner.run(read_all())
        poller.close()
        runner.run(rounds())
    for _, peer in pairs:
        peer.close()


@of_the_poller
async def test_a_copy_of_a_closed_descriptor_wakes_nobody(over: Ends) -> None:
    """As a child process has one until it runs its own program."""
    transport, peer = await over.pair(protocol := Recorder())
    copy = os.dup(transport.get_extra_info("socket").fileno())
    transport.abort()
    await until(lambda: protocol.lost)
    peer.send(b"x")
    await rounds()
    assert over.is_idle()
    os.close(copy)


@of_the_poller
async def test_protocols_are_not_called_in_the_context_of_the_first(over: Ends) -> None:
    variable = contextvars.ContextVar("variable", default="of nobody")
    variable.set("of the first")
    seen: list[str] = []
    _, peer = await over.pair(Recorder(data_received=lambda _: seen.append(variable.get())))
    peer.send(b"x")
    await until(lambda: seen)
    assert seen == ["of nobody"]
