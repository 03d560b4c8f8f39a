"""How clients' connections end, over real sockets, on both event loops: in time and whole, leaving nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from ppd.proxy.admission.wrong_keys import FREE
from tests.support.client_connections import (
    CHUNKED,
    EVENT,
    GET,
    TURN,
    Pieces,
    connected,
    heard,
    on_both_planes,
    site,
    statuses,
    turn,
    under_way,
)

# -- nothing is stuck


@pytest.mark.parametrize("before", [b"", turn(b"{0}")], ids=["alone", "behind another request"])
@on_both_planes
async def test_a_body_must_come_in_time(before: bytes) -> None:
    async with site(idle_timeout_s=0.05) as at:
        async with connected(at) as (reader, writer):
            writer.write(before + TURN + b"Content-Length: 100\r\n\r\n{")
            if before:
                await reader.readuntil(b"[{0}]")
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")


@on_both_planes
async def test_a_client_over_tls_that_says_goodbye_while_it_does_not_read_has_left() -> None:
    """The event loop would first wait until it has taken all."""
    async with site(waits=True) as at:
        at.replies[b"{}"] = pieces = Pieces(b"x" * 20_000_000)
        async with connected(at) as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(turn())
            await at.until(lambda: at.asked != [])
            at.may_answer.set()
            await at.until(at.is_stalled)
            (limits,) = at.open
            limits.is_tls = True
            writer.write_eof()
            await at.until(lambda: not under_way(at))
            assert pieces.is_abandoned


@pytest.mark.slow
@on_both_planes
async def test_a_body_behind_an_answer_that_was_taken_slowly_must_come_in_time_too() -> None:
    async with site(idle_timeout_s=0.2, waits=True) as at:
        at.replies[b"{0}"] = b"x" * 20_000_000
        async with connected(at) as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(turn(b"{0}") + TURN + b"Content-Length: 100\r\n\r\n{")
            await at.until(lambda: at.asked != [])
            at.may_answer.set()
            await at.until(at.is_stalled)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert b"HTTP/1.1 408" in await reader.read(-1)


@on_both_planes
async def test_a_body_that_we_do_not_read_is_not_late() -> None:
    async with site(idle_timeout_s=0.05, waits=True) as at:
        async with connected(at) as (reader, writer):
            writer.write(turn(b"{0}") + TURN + b"Content-Length: 3\r\n\r\n{")
            await asyncio.sleep(0.02)
            writer.write(b"1}")
            await asyncio.sleep(0.15)
            at.may_answer.set()
            await reader.readuntil(b"[{0}]")
            await reader.readuntil(b"[{1}]")
            assert at.asked == [b"{0}", b"{1}"]


@on_both_planes
async def test_a_client_that_leaves_is_noticed_also_while_it_is_not_read() -> None:
    async with site(waits=True) as at:
        async with connected(at) as (_, writer):
            writer.write(turn(b"{0}") + GET)
            await at.until(lambda: at.asked != [])
            writer.write(GET)
            await at.until_read(len(turn(b"{0}") + GET + GET))
        await at.until(lambda: at.cancelled == 1)
        assert at.asked == [b"{0}"]


@on_both_planes
async def test_a_client_that_takes_nothing_is_dropped() -> None:
    async with site(idle_timeout_s=0.05) as at:
        stream = at.replies[b"{}"] = Pieces(*[EVENT * 10_000] * 200)
        async with connected(at) as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(turn(b"{}"))
            await at.until(lambda: at.asked != [] and not at.open)
        assert stream.is_abandoned and stream.taken < 200


# -- ends


@pytest.mark.parametrize("moment", ["head", "body", "asking", "streaming", "streaming ahead"])
@pytest.mark.parametrize("half", [False, True])
@on_both_planes
async def test_a_client_that_leaves_leaves_nothing_behind(moment: str, half: bool) -> None:
    async with site(waits=moment == "asking") as at:
        stream = at.replies[b"{}"] = Pieces(EVENT)
        async with connected(at) as (reader, writer):
            sends = {"head": TURN, "body": turn(b"{}")[:-1], "streaming ahead": turn() + turn(b"{1}")}
            sent = sends.get(moment, turn())
            writer.write(sent)
            if moment.startswith("streaming"):
                await reader.readuntil(EVENT)
            elif moment == "asking":
                await at.until(lambda: at.asked != [])
            else:
                await at.until_read(len(sent))
            if half:
                writer.write_eof()
                await at.until(lambda: not at.open)
        await at.until(lambda: not at.open and not under_way(at))
        assert stream.is_abandoned == moment.startswith("streaming")
        assert at.cancelled == (moment == "asking")
        assert b"{1}" not in at.asked


@pytest.mark.parametrize("moment", ["body", "asking", "streaming", "within an event", "a large answer"])
@on_both_planes
async def test_a_drain_cuts_what_is_under_way(moment: str) -> None:
    streams = {"streaming": Pieces(EVENT), "a large answer": Pieces(b"data: {}\n\n", kind="application/json")}
    stream = streams.get(moment, Pieces(b"data: {"))
    async with site(waits=moment == "asking") as at:
        at.replies[b"{}"] = stream
        async with connected(at) as (reader, writer):
            writer.write(turn(b"{}")[: -1 if moment == "body" else None])
            if moment not in ("body", "asking"):
                await reader.readuntil(stream.pieces[0] + b"\r\n")
            elif moment == "asking":
                await at.until(lambda: at.asked != [])
            else:
                await at.until(lambda: len(under_way(at)) == 1)
            assert at.edge is not None
            await at.edge.requests.drained(0.01)
            rest = b""
            with contextlib.suppress(ConnectionResetError):
                rest = await reader.read()
        if moment == "streaming":
            assert b'"code":503' in rest and rest.endswith(b"}\n\n\r\n0\r\n\r\n")
        elif moment in ("body", "asking"):
            assert statuses(rest) == [503] and b"\r\nConnection: close\r\n" in rest
        else:
            assert rest == b"", "an error would not be understood there"
        assert stream.is_abandoned == (moment not in ("body", "asking"))
        assert at.cancelled == (moment == "asking")
        await at.until(lambda: not at.open and not under_way(at))


@pytest.mark.parametrize("leaves", [True, False])
@on_both_planes
async def test_an_answer_that_is_withheld_holds_nothing_up(leaves: bool) -> None:
    """Neither a client that does not wait for it, nor the drain."""
    bad = turn(b"{", b"Authorization: bad\r\n")
    async with site() as at:
        assert at.edge is not None
        wrong_keys = at.edge.requests.wrong_keys
        for _ in range(FREE + 9):
            wrong_keys.withhold("a")
        wrong_keys.withheld = 0
        async with connected(at) as (reader, writer):
            writer.write(bad)
            await at.until(lambda: wrong_keys.withheld == 1)
            writer.write(b"x" * 1000)
            if not leaves:
                await at.edge.requests.drained(0.01)
                assert b"HTTP/1.1 503" in await reader.read()
        await at.until(lambda: not at.open and not under_way(at) and wrong_keys.withheld == 0)


OLD = TURN.replace(b"1.1", b"1.0")


@pytest.mark.parametrize(
    ("request_", "is_stream", "is_kept"),
    [
        (turn(), False, True),
        (turn(), True, True),
        (turn(headers=b"Connection: close\r\n"), False, False),
        (turn(headers=b"Connection: close\r\n"), True, False),
        (turn(start=OLD), False, False),
        (turn(start=OLD), True, False),
        (turn(start=OLD, headers=b"Connection: keep-alive\r\n"), False, True),
        (turn(start=OLD, headers=b"Connection: keep-alive\r\n"), True, False),  # its end is the connection's
        (turn(b"[]", b"Authorization: bad\r\n"), False, False),
    ],
)
@on_both_planes
async def test_a_connection_is_kept_where_the_client_can_tell_an_answers_end(
    request_: bytes, is_stream: bool, is_kept: bool
) -> None:
    async with site() as at:
        stream = at.replies[b"{}"] = Pieces(EVENT) if is_stream else b"whole"
        if isinstance(stream, Pieces):
            stream.more.set()
        got, is_closed = await heard(at, request_)
        head, _, body = got.partition(b"\r\n\r\n")
        assert is_closed == (not is_kept) == (b"\r\nConnection: close" in head)
        is_chunked = is_stream and b" HTTP/1.1\r\n" in request_
        assert (b"chunked" in head) == is_chunked
        if isinstance(stream, Pieces):
            parts = EVENT, b"data: [DONE]\n\n"
            assert body == (b"a\r\n%b\r\ne\r\n%b\r\n0\r\n\r\n" if is_chunked else b"%b%b") % parts
            assert stream.is_abandoned
        if is_kept:
            assert b"Content-Length" in head or is_chunked


@pytest.mark.parametrize(
    ("behind", "status"),
    [
        (b"zz\r\n", 400),  # no size of a chunk
        (b"0\r\n" + b"a: b\r\n" * 500, 431),  # trailers without end
        (b"2;" + b"x" * 3000, 431),  # an extension of a chunk
        (b"fff\r\n" + b"x" * 4095 + b"\r\n", 413),
    ],
)
@on_both_planes
async def test_a_body_that_breaks_is_refused_and_ends_the_connection(behind: bytes, status: int) -> None:
    async with site(head_limit_bytes=2000, body_limit_bytes=2000) as at:
        got, is_closed = await heard(at, TURN + CHUNKED + b"1\r\n{\r\n", behind)
        assert (statuses(got), is_closed, at.asked) == ([status], True, [])
        await at.until(lambda: not under_way(at))


# -- memory


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    yield lambda: tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()


@pytest.mark.slow
@on_both_planes
async def test_a_body_in_tiny_chunks_takes_no_more_memory_than_its_size(traced: Callable[[], int]) -> None:
    size = 100_000
    wire = TURN + CHUNKED + b"2\r\nxx\r\n" * (size // 2)
    async with site(waits=True) as at, connected(at) as (_, writer):
        held = traced()
        writer.write(wire)
        await writer.drain()
        await asyncio.sleep(0.1)
        assert traced() - held - len(wire) < 4 * size


@on_both_planes
async def test_requests_sent_ahead_take_little_memory(traced: Callable[[], int]) -> None:
    async with site(waits=True) as at, connected(at) as (_, writer):
        writer.write(turn(b"{}"))
        await at.until(lambda: at.asked != [])
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        writer.write(GET * 9000)  # one read's
        await asyncio.sleep(0.1)
        assert tracemalloc.get_traced_memory()[0] - before < 4_000_000


@pytest.mark.parametrize("before", [b"", GET, turn(b"{0}")])
@on_both_planes
async def test_a_defect_as_a_request_begins_ends_its_connection_whoever_was_answered_before(before: bytes) -> None:
    async with site(waits=True) as at:
        async with connected(at) as (reader, writer):
            writer.write(before + turn(b"{1}", b"Authorization: defect\r\n"))
            await asyncio.sleep(0.02)
            at.may_answer.set()
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
        await at.until(lambda: not at.open)
        gc.collect()  # of a task that failed
        assert at.failures and not under_way(at)
        at.failures.clear()
