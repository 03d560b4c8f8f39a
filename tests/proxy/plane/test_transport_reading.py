"""What a transport tells its protocol as it reads and as it ends: the poller's as asyncio's own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from tests.proxy.plane.transports import (
    BIG,
    Act,
    Ends,
    Recorder,
    of_the_poller,
    promised,
    reset,
    rounds,
    take,
    tcp_pair,
    until,
)


def ends(peer: socket.socket) -> None:
    peer.send(b"last")
    peer.close()


def half_ends(peer: socket.socket) -> None:
    peer.send(b"last")
    peer.shutdown(socket.SHUT_WR)


def says_and_resets(peer: socket.socket) -> None:
    peer.send(b"last")
    reset(peer)


def closes(protocol: Recorder) -> None:
    protocol.transport.close()


def aborts(protocol: Recorder) -> None:
    protocol.transport.abort()


def fails(_: Recorder) -> None:
    raise RuntimeError("of a protocol")


def is_cancelled(_: Recorder) -> None:
    raise asyncio.CancelledError


MADE, DATA, EOF, LOST = "connection_made", "data_received", "eof_received", "connection_lost"


@pytest.mark.parametrize(
    ("does", "acts", "told", "why"),
    [
        (ends, {}, [MADE, DATA, EOF, LOST], None),
        (half_ends, {}, [MADE, DATA, EOF, LOST], None),
        (half_ends, {EOF: closes}, [MADE, DATA, EOF, LOST], None),
        (half_ends, {EOF: aborts}, [MADE, DATA, EOF, LOST], None),
        (half_ends, {DATA: closes}, [MADE, DATA, LOST], None),
        (half_ends, {DATA: aborts}, [MADE, DATA, LOST], None),
        (reset, {}, [MADE, LOST], ConnectionResetError),
        (says_and_resets, {}, [MADE, DATA, LOST], ConnectionResetError),
        (half_ends, {DATA: fails}, [MADE, DATA, LOST], RuntimeError),
        (half_ends, {EOF: fails}, [MADE, DATA, EOF, LOST], RuntimeError),
        (half_ends, {LOST: fails}, [MADE, DATA, EOF, LOST], None),
        (half_ends, {DATA: is_cancelled}, [MADE, DATA, LOST], asyncio.CancelledError),
        (half_ends, {EOF: is_cancelled}, [MADE, DATA, EOF, LOST], asyncio.CancelledError),
    ],
)
@promised
async def test_a_protocol_is_told_in_order_and_of_the_end_once(
    over: Ends,
    does: Callable[[socket.socket], None],
    acts: dict[str, Act],
    told: list[str],
    why: type[BaseException] | None,
) -> None:
    protocol = Recorder(**acts)
    transport, peer = await over.pair(protocol)
    does(peer)
    await until(lambda: protocol.lost)
    await rounds()
    assert protocol.told == told
    assert [type(exc) for exc in protocol.lost] == [why or type(None)]
    assert bytes(protocol.data) == (b"last" if DATA in told else b"")
    assert transport.is_closing()
    has_failed = not {fails, is_cancelled}.isdisjoint(acts.values())
    assert [type(exc) for exc in over.failures] == ([why or RuntimeError] if has_failed else [])
    over.failures.clear()


@pytest.mark.parametrize("first", ["close", "abort"])
@promised
async def test_the_end_is_told_later_and_once(over: Ends, first: str) -> None:
    protocol = Recorder()
    transport, peer = await over.pair(protocol)
    getattr(transport, first)()
    transport.close()
    transport.abort()
    transport.write(b"x")
    transport.writelines([b"x"])
    transport.pause_reading()
    transport.resume_reading()
    assert protocol.lost == []
    await until(lambda: protocol.lost)
    await rounds()
    assert protocol.lost == [None]
    assert await take(peer) == b""
    assert (transport.is_closing(), transport.is_reading(), transport.get_write_buffer_size()) == (True, False, 0)
    transport.close()
    transport.abort()


@promised
async def test_an_open_half_writes_on(over: Ends) -> None:
    protocol = Recorder(eof_received=lambda _: True)
    transport, peer = await over.pair(protocol)
    half_ends(peer)
    await until(lambda: EOF in protocol.told)
    transport.resume_reading()
    await rounds()
    assert over.is_idle()
    assert protocol.told == [MADE, DATA, EOF]
    transport.write(b"answer")
    transport.write_eof()
    assert await take(peer) == b"answer"
    assert protocol.lost == []


@promised
async def test_what_has_ended_writing_reads_on(over: Ends) -> None:
    protocol = Recorder()
    transport, peer = await over.pair(protocol)
    transport.write(b"question")
    assert transport.can_write_eof()
    transport.write_eof()
    transport.write_eof()
    for write in (transport.write, lambda data: transport.writelines([data])):
        with pytest.raises(RuntimeError, match="write_eof"):
            write(b"more")
    assert await take(peer) == b"question"
    peer.send(b"answer")
    await until(lambda: protocol.data)
    peer.close()
    await until(lambda: protocol.lost)
    assert (bytes(protocol.data), protocol.lost) == (b"answer", [None])


# -- paused


@promised
async def test_what_comes_while_reading_is_paused_is_read_later(over: Ends) -> None:
    protocol = Recorder()
    transport, peer = await over.pair(protocol)
    transport.pause_reading()
    transport.pause_reading()
    half_ends(peer)
    await rounds()
    assert over.is_idle()
    assert (protocol.told, transport.is_reading()) == ([MADE], False)
    transport.resume_reading()
    transport.resume_reading()
    assert transport.is_reading()
    await until(lambda: protocol.lost)
    assert (bytes(protocol.data), protocol.lost) == (b"last", [None])


@promised
async def test_a_protocol_pauses_itself_at_each_part(over: Ends) -> None:
    def pauses(protocol: Recorder) -> None:
        sizes.append(len(protocol.data))
        protocol.transport.pause_reading()

    sizes: list[int] = []
    protocol = Recorder(data_received=pauses, eof_received=lambda _: True)
    transport, peer = await over.pair(protocol)
    left = memoryview(BIG)
    while len(protocol.data) < len(BIG):
        if left:
            left = left[peer.send(left) :]
        before = len(sizes)
        transport.resume_reading()
        await until(lambda before=before: len(sizes) > before)  # type: ignore[misc]
        await rounds()
        assert len(sizes) == before + 1
    assert bytes(protocol.data) == BIG


@promised
async def test_resuming_within_a_part_keeps_all(over: Ends) -> None:
    def turns(protocol: Recorder) -> None:
        protocol.transport.pause_reading()
        protocol.transport.resume_reading()

    protocol = Recorder(data_received=turns)
    _, peer = await over.pair(protocol)
    left = memoryview(BIG)
    while left:
        try:
            left = left[peer.send(left) :]
        except BlockingIOError:
            await asyncio.sleep(0)
    peer.close()
    await until(lambda: protocol.lost)
    assert bytes(protocol.data) == BIG


@pytest.mark.parametrize("does", [reset, says_and_resets])
@promised
async def test_a_reset_while_reading_is_paused_wakes_nobody(over: Ends, does: Callable[[socket.socket], None]) -> None:
    protocol = Recorder()
    transport, peer = await over.pair(protocol)
    transport.pause_reading()
    does(peer)
    await rounds()
    assert over.is_idle()
    assert protocol.told == [MADE]
    transport.resume_reading()
    await until(lambda: protocol.lost)
    assert [type(exc) for exc in protocol.lost] == [ConnectionResetError]
    assert bytes(protocol.data) == (b"last" if does is says_and_resets else b"")


# -- who listens


@promised
async def test_another_protocol_takes_over_within_a_part(over: Ends) -> None:
    def hands_over(protocol: Recorder) -> None:
        protocol.transport.set_protocol(second)
        assert protocol.transport.get_protocol() is second

    first, second = Recorder(data_received=hands_over), Recorder()
    transport, peer = await over.pair(first)
    assert transport.get_protocol() is first
    peer.send(b"preface")
    await until(lambda: first.data)
    ends(peer)
    await until(lambda: second.lost)
    assert (first.told, second.told) == ([MADE, DATA], [DATA, EOF, LOST])
    assert (bytes(first.data), bytes(second.data)) == (b"preface", b"last")


@pytest.mark.parametrize("goes", [ends, reset, says_and_resets])
@promised
async def test_a_peer_that_has_gone_already_is_met_and_lost(over: Ends, goes: Callable[[socket.socket], None]) -> None:
    ours, peer = tcp_pair()
    goes(peer)
    protocol = Recorder()
    await over.adopt(ours, protocol)
    await until(lambda: protocol.lost)
    assert protocol.told[0] == MADE
    assert bytes(protocol.data) == (b"" if goes is reset else b"last")
    assert [type(exc) for exc in protocol.lost] == [type(None) if goes is ends else ConnectionResetError]


@promised
async def test_a_transport_tells_its_addresses(over: Ends) -> None:
    transport, peer = await over.pair(protocol := Recorder())
    assert transport.get_extra_info("peername") == peer.getsockname()
    assert transport.get_extra_info("sockname") == peer.getpeername()
    assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert transport.get_extra_info("cipher") is None
    assert transport.get_extra_info("cipher", "none") == "none"
    transport.abort()
    await until(lambda: protocol.lost)
    assert transport.get_extra_info("cipher", "none") == "none"


@of_the_poller
async def test_an_ended_transport_has_no_addresses_left(over: Ends) -> None:
    transport, _ = await over.pair(Recorder())
    transport.abort()
    assert transport.get_extra_info("peername") is None
    assert transport.get_extra_info("sockname", "gone") == "gone"
    assert transport.get_extra_info("socket").fileno() == -1
