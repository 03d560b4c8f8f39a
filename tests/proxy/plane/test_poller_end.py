"""The end of the poller and of its connections: who is told, and what is left."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Callable

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
    reset,
    rounds,
    tcp_pair,
    until,
)

if IS_BUILT:
    from ppd.proxy.plane.poller import Poller, SocketTransport


@needs_poller
@pytest.mark.parametrize("is_first_closed", [False, True], ids=["after its event loop", "within it"])
def test_a_poller_serves_one_event_loop_after_another(is_first_closed: bool) -> None:
    async def serve(again: bool = False) -> None:
        ours, peer = tcp_pair()
        peers.append(peer)
        if again and not is_first_closed:
            with pytest.raises(RuntimeError, match="another event loop"):
                poller.adopt(ours, Recorder())
            poller.close()
        transport = poller.adopt(ours, protocol := Recorder())
        peer.send(b"x")
        await until(lambda: protocol.data)
        if is_first_closed:
            poller.close()
            assert transport.is_closing()
            assert protocol.lost == []
            await until(lambda: protocol.lost)

    before = descriptors()
    peers: list[socket.socket] = []
    poller = Poller()
    poller.close()
    for again in (False, True):
        with asyncio.Runner() as runner:
            runner.run(serve(again))
    poller.close()
    poller.close()
    for peer in peers:
        peer.close()
    assert descriptors() == before


@pytest.mark.parametrize("within", [True, False], ids=["within a round", "between rounds"])
@of_the_poller
async def test_closing_ends_all_connections(over: Ends, within: bool) -> None:
    def close(_: object = None) -> None:
        over.poller.close()  # type: ignore[union-attr]
        assert not any(protocol.lost for protocol in protocols)

    before = descriptors()
    protocols = [Recorder(data_received=close) for _ in range(6)]
    pairs = [await over.pair(protocol, buffer_bytes=SMALL_BYTES) for protocol in protocols]
    pairs[0][0].write(BIG)
    pairs[1][0].pause_reading()
    pairs[2][0].write(BIG)
    pairs[2][0].close()
    for _, peer in pairs if within else ():
        peer.send(b"x")
    if not within:
        close()
    await until(lambda: all(protocol.lost for protocol in protocols))
    await rounds()
    assert [protocol.lost for protocol in protocols] == 6 * [[None]]
    assert sum(map(len, (protocol.data for protocol in protocols))) == within
    for _, peer in pairs:
        peer.close()
    assert descriptors() == before
    _, peer = await over.pair(protocol := Recorder())
    peer.send(b"x")
    await until(lambda: protocol.data)


def closes(transport: asyncio.Transport, peer: socket.socket) -> None:
    transport.write(b"x")
    transport.close()


def aborts(transport: asyncio.Transport, peer: socket.socket) -> None:
    transport.write(BIG)
    transport.abort()


def is_reset(transport: asyncio.Transport, peer: socket.socket) -> None:
    transport.write(BIG)
    reset(peer)


def transports() -> int:
    """How many there are: they have no room for weak references."""
    return sum(type(one) is SocketTransport for one in gc.get_objects())


def is_ended(transport: asyncio.Transport, peer: socket.socket) -> None:
    peer.send(b"x")
    peer.close()


@pytest.mark.parametrize("end", [closes, aborts, is_reset, is_ended])
@of_the_poller
async def test_nothing_refers_to_a_connection_that_is_lost(
    over: Ends, end: Callable[[asyncio.Transport, socket.socket], None]
) -> None:
    async def connection() -> None:
        ours, peer = tcp_pair()
        transport = over.poller.adopt(ours, protocol := Recorder())  # type: ignore[union-attr]
        alive.extend((weakref.ref(protocol), weakref.ref(ours)))
        transport.write(b"x")
        end(transport, peer)
        await until(lambda: protocol.lost)
        peer.close()

    alive: list[weakref.ref[object]] = []
    await connection()
    alive.clear()
    before, transports_before = descriptors(), transports()
    gc.disable()
    try:
        await connection()
        await rounds()
        assert [reference() for reference in alive] == 2 * [None]
        assert transports() == transports_before
    finally:
        gc.enable()
    assert descriptors() == before


@of_the_poller
async def test_connections_leave_nothing_behind(over: Ends) -> None:
    async def serve(count: int) -> None:
        for number in range(count):
            ours, peer = socket.socketpair()
            transport = over.poller.adopt(ours, protocol := Recorder(eof_received=lambda _: True))  # type: ignore[union-attr]
            peer.send(b"x")
            transport.writelines([b"x", bytearray(b"y")])
            await until(lambda protocol=protocol: protocol.data)  # type: ignore[misc]
            transport.abort() if number % 2 else transport.close()
            peer.close()
        await rounds()

    await serve(10)
    gc.collect()
    gc.disable()
    try:
        before, open_before = len(gc.get_objects()), descriptors()
        await serve(1_000)
        assert len(gc.get_objects()) - before < 50
        assert descriptors() == open_before
    finally:
        gc.enable()
