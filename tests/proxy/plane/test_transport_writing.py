"""What a transport sends, what it keeps, and when it asks its protocol to wait: the poller's as asyncio's own."""

from __future__ import annotations

import socket
from array import array
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import pytest

from tests.proxy.plane.transports import (
    BIG,
    SMALL_BYTES,
    Ends,
    Recorder,
    of_the_poller,
    promised,
    reset,
    rounds,
    take,
    until,
)

Makes = Callable[[bytes], Any]
KINDS: dict[str, Makes] = {
    "bytes": bytes,
    "a bytearray": bytearray,
    "a view": memoryview,
    "a view of a bytearray": lambda data: memoryview(bytearray(data)),
    "a view of numbers": lambda data: memoryview(array("I", data + bytes(-len(data) % 4))),
}


def raw(data: Any) -> bytes:
    return memoryview(data).tobytes()


@pytest.mark.parametrize("buffer_bytes", [0, SMALL_BYTES], ids=["taken", "kept"])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@promised
async def test_any_buffer_is_sent(over: Ends, make: Makes, buffer_bytes: int) -> None:
    if over.poller is None and buffer_bytes and make is KINDS["a view of numbers"]:
        pytest.skip("asyncio takes the bytes that are sent for numbers")
    transport, peer = await over.pair(Recorder(), buffer_bytes=buffer_bytes)
    parts = [
        make(part) for part in (b"first", b"", BIG[: 4 * SMALL_BYTES] if buffer_bytes else b"longer", b"", b"last")
    ]
    for part in parts:
        transport.write(part)
    transport.close()
    assert await take(peer) == b"".join(map(raw, parts))


@pytest.mark.parametrize("size", [1, 700, 9000])
@pytest.mark.parametrize("is_full", [False, True], ids=["nothing unsent", "behind what is unsent"])
@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 300])
@promised
async def test_parts_are_sent_in_order(over: Ends, count: int, is_full: bool, size: int) -> None:
    transport, peer = await over.pair(Recorder(), buffer_bytes=SMALL_BYTES)
    makes = islice(cycle([bytes, bytearray, memoryview, bytes]), count)
    lines = [make(BIG[at : at + (at % 5 and size)]) for at, make in enumerate(makes)]
    before = BIG if is_full else b""
    transport.write(before)
    transport.writelines(iter(lines))
    transport.writelines(lines)
    transport.write(b"last")
    transport.close()
    assert await take(peer) == before + 2 * b"".join(lines) + b"last"


@pytest.mark.parametrize("size", range(SMALL_BYTES - 2, 12 * SMALL_BYTES, SMALL_BYTES // 3 + 1))
@promised
async def test_what_the_kernel_takes_in_part_is_sent_whole(over: Ends, size: int) -> None:
    transport, peer = await over.pair(Recorder(), buffer_bytes=SMALL_BYTES)
    half = memoryview(BIG)[: size // 2]
    transport.writelines([half, bytes(half), bytearray(half)])
    transport.write(half)
    transport.write_eof()
    assert await take(peer) == 4 * bytes(half)
    assert transport.get_write_buffer_size() == 0


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("is_in_lines", [False, True])
@promised
async def test_a_buffer_may_change_once_it_is_written(over: Ends, is_full: bool, is_in_lines: bool) -> None:
    transport, peer = await over.pair(Recorder(), buffer_bytes=SMALL_BYTES)
    if is_full:
        transport.write(BIG)
    mutable = bytearray(BIG)
    transport.writelines([b"head", mutable]) if is_in_lines else transport.write(mutable)
    mutable[:] = b"changed"  # which a view of it that is still held would not allow
    transport.close()
    assert await take(peer) == (BIG if is_full else b"") + (b"head" if is_in_lines else b"") + BIG


@pytest.mark.parametrize("is_full", [False, True])
@promised
async def test_what_is_no_buffer_is_refused_and_nothing_of_it_sent(over: Ends, is_full: bool) -> None:
    before = BIG if is_full else b""
    transport, peer = await over.pair(protocol := Recorder(), buffer_bytes=SMALL_BYTES)
    transport.write(before)
    for wrong in ("text", 7, None):
        with pytest.raises(TypeError):
            transport.write(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            transport.writelines([b"part", wrong])  # type: ignore[list-item]
    assert (protocol.lost, transport.is_closing()) == ([], False)
    transport.write(b"last")
    transport.close()
    assert await take(peer) == before + b"last"


# -- flow control


@promised
async def test_a_protocol_is_paused_once_and_resumed_once(over: Ends) -> None:
    transport, peer = await over.pair(protocol := Recorder(), buffer_bytes=SMALL_BYTES)
    for _ in range(3):
        transport.write(BIG)
        transport.write(b"more")
        assert transport.get_write_buffer_size() > 64 * 1024
        await take(peer, len(BIG) + 4)
        await until(lambda: not transport.get_write_buffer_size())
    assert protocol.told == ["connection_made", *3 * ["pause_writing", "resume_writing"]]
    assert over.is_idle()


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("says", ["pause_writing", "resume_writing"])
@promised
async def test_what_is_written_as_one_is_told_to_wait_comes_behind(over: Ends, says: str, lines: bool) -> None:
    def writes(protocol: Recorder) -> None:
        protocol.acts.clear()
        protocol.transport.writelines([b"<", says.encode(), b">"]) if lines else protocol.transport.write(says.encode())
        protocol.transport.write(b"[end]")

    transport, peer = await over.pair(Recorder(**{says: writes}), buffer_bytes=SMALL_BYTES)
    transport.writelines([BIG, b"|", BIG]) if lines else transport.write(BIG)
    said = b"<" + says.encode() + b">" if lines else says.encode()
    whole = (BIG + b"|" + BIG if lines else BIG) + said + b"[end]"
    assert await take(peer, len(whole)) == whole


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("says", ["pause_writing", "resume_writing"])
@promised
async def test_an_end_as_one_is_told_to_wait(over: Ends, says: str, lines: bool, how: str) -> None:
    if over.poller is None and says == "resume_writing":
        pytest.skip("asyncio may tell the end twice")
    transport, peer = await over.pair(
        protocol := Recorder(**{says: lambda protocol: getattr(protocol.transport, how)()}), buffer_bytes=SMALL_BYTES
    )
    transport.writelines([BIG, b"|", BIG]) if lines else transport.write(BIG)
    taken = await take(peer)
    await until(lambda: protocol.lost)
    await rounds()
    whole = BIG + b"|" + BIG if lines else BIG
    assert whole.startswith(taken)
    assert how == "abort" or taken == whole
    assert (protocol.lost, transport.get_write_buffer_size()) == ([None], 0)
    assert protocol.told.count("connection_lost") == protocol.told.count("pause_writing") == 1


@pytest.mark.parametrize("says", ["pause_writing", "resume_writing"])
@promised
async def test_a_protocol_that_fails_to_wait_is_reported_and_served_on(over: Ends, says: str) -> None:
    def fails(_: Recorder) -> None:
        raise RuntimeError(says)

    transport, peer = await over.pair(protocol := Recorder(**{says: fails}), buffer_bytes=SMALL_BYTES)
    transport.write(BIG)
    transport.close()
    assert await take(peer) == BIG
    await until(lambda: protocol.lost)
    assert protocol.lost == [None]
    assert [str(exc) for exc in over.failures] == [says]
    over.failures.clear()


# -- the end


@promised
async def test_closing_sends_first_and_resumes_who_waits(over: Ends) -> None:
    transport, peer = await over.pair(protocol := Recorder(), buffer_bytes=SMALL_BYTES)
    transport.write(BIG)
    transport.close()
    assert (transport.is_closing(), protocol.lost) == (True, [])
    assert await take(peer, len(BIG)) == BIG
    await until(lambda: protocol.lost)
    assert protocol.lost == [None]
    assert protocol.told == ["connection_made", "pause_writing", "resume_writing", "connection_lost"]


@promised
async def test_aborting_drops_what_is_unsent(over: Ends) -> None:
    transport, peer = await over.pair(protocol := Recorder(), buffer_bytes=SMALL_BYTES)
    transport.write(BIG)
    transport.abort()
    assert (transport.get_write_buffer_size(), protocol.lost) == (0, [])
    taken = await take(peer)
    assert BIG.startswith(taken) and len(taken) < len(BIG)
    assert protocol.lost == [None]


@promised
async def test_a_closing_transport_reads_no_more(over: Ends) -> None:
    transport, peer = await over.pair(protocol := Recorder(), buffer_bytes=SMALL_BYTES)
    transport.write(BIG)
    transport.close()
    peer.send(b"not read")
    await rounds()
    assert (protocol.told, transport.is_reading()) == (["connection_made", "pause_writing"], False)
    transport.resume_reading()
    await rounds()
    assert protocol.told == ["connection_made", "pause_writing"]


@of_the_poller
async def test_what_is_written_to_a_closing_transport_is_dropped(over: Ends) -> None:
    transport, peer = await over.pair(Recorder(), buffer_bytes=SMALL_BYTES)
    transport.write(BIG)
    transport.close()
    transport.write(b"x")
    transport.writelines([b"x"])
    assert await take(peer) == BIG


@promised
async def test_an_aborted_closing_drops_what_is_unsent(over: Ends) -> None:
    transport, peer = await over.pair(protocol := Recorder(), buffer_bytes=SMALL_BYTES)
    transport.write(BIG)
    transport.close()
    transport.abort()
    assert len(await take(peer)) < len(BIG)
    assert protocol.lost == [None]


@promised
async def test_a_peer_that_ends_is_sent_the_rest(over: Ends) -> None:
    transport, peer = await over.pair(protocol := Recorder(), buffer_bytes=SMALL_BYTES)
    transport.write(BIG)
    peer.shutdown(socket.SHUT_WR)
    assert await take(peer) == BIG
    await until(lambda: protocol.lost)
    assert protocol.lost == [None]


@pytest.mark.parametrize("reads", [True, False], ids=["reading", "paused"])
@promised
async def test_a_reset_ends_what_is_unsent(over: Ends, reads: bool) -> None:
    transport, peer = await over.pair(protocol := Recorder(), buffer_bytes=SMALL_BYTES)
    if not reads:
        transport.pause_reading()
    transport.write(BIG)
    peer.send(b"last")
    reset(peer)
    await until(lambda: protocol.lost)
    assert len(protocol.lost) == 1 and isinstance(protocol.lost[0], ConnectionError)
    assert bytes(protocol.data) == (b"last" if reads else b"")
    transport.write(b"x")
    transport.writelines([b"x"])
    await rounds()
    assert len(protocol.lost) == 1


@pytest.mark.parametrize("size", [5, len(BIG)], ids=["little", "several reads"])
@promised
async def test_an_answer_before_a_reset_is_read_although_writing_fails(over: Ends, size: int) -> None:
    if over.poller is None and size > 5:
        pytest.skip("asyncio reads once only")
    transport, peer = await over.pair(protocol := Recorder(), buffer_bytes=SMALL_BYTES)
    transport.write(BIG)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * len(BIG))
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * len(BIG))
    sent = peer.send(BIG[:size])
    reset(peer)
    await until(lambda: protocol.lost)
    assert len(protocol.data) == sent
    assert isinstance(protocol.lost[0], ConnectionError)


@pytest.mark.parametrize("lines", [False, True])
@promised
async def test_a_failing_write_tells_the_end_later(over: Ends, lines: bool) -> None:
    transport, peer = await over.pair(protocol := Recorder())
    reset(peer)
    transport.write(b"")
    transport.writelines([b"", b""])
    assert not transport.is_closing()
    for _ in range(3):
        transport.writelines([b"x", b"y"]) if lines else transport.write(b"x")
    assert protocol.lost == []
    await until(lambda: protocol.lost)
    await rounds()
    assert len(protocol.lost) == 1 and isinstance(protocol.lost[0], ConnectionError)
