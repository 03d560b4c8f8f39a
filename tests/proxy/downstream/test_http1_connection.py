"""Clients' connections over real sockets, on both event loops: framing, order, and what follows the last answer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import cast

import pytest

from ppd.proxy.downstream.http1_connection import SLICE_BYTES, ClientConnection
from ppd.proxy.downstream.limits import CLOSE_S
from tests.support.client_connections import (
    CHUNKED,
    GET,
    H2C,
    TURN,
    connected,
    heard,
    on_both_planes,
    site,
    statuses,
    turn,
    under_way,
)
from tests.support.raw_http import read_answers

# -- framing


@pytest.mark.parametrize("cut", [0, 1, 40, 115, -30, -1])
@on_both_planes
async def test_requests_in_any_pieces_are_answered_in_their_order(cut: int) -> None:
    chunked = TURN + CHUNKED + b"2\r\n{1\r\n1;x=y\r\n}\r\n0\r\nTrailer: t\r\n\r\n"
    wire = turn(b"{0}") + chunked + GET + turn(b"{3}")
    async with site() as at:
        got, is_closed = await heard(at, *[part for part in (wire[:cut], wire[cut:]) if part])
        assert [a.body for a in read_answers(got)] == [b"[{0}]", b"[{1}]", b"/a", b"[{3}]"]
        assert not is_closed


@on_both_planes
async def test_pieces_of_one_byte() -> None:
    async with site() as at:
        async with connected(at) as (reader, writer):
            for byte in turn(b"{0}") + TURN + CHUNKED + b"2\r\n{1\r\n1\r\n}\r\n0\r\nA: b\r\n\r\n":
                writer.write(bytes([byte]))
                await asyncio.sleep(0)
            await reader.readuntil(b"[{0}]")
            await reader.readuntil(b"[{1}]")
            assert at.asked == [b"{0}", b"{1}"]


@pytest.mark.parametrize("begun", [0, 1, 50])
@on_both_planes
async def test_what_comes_while_a_request_waits_goes_behind_what_came_before_it(begun: int) -> None:
    """The first two requests fill a slice, so what is behind them is kept unread until the second is answered."""
    slow, hidden = turn(b"{1}"), b"\r\n\r\nGET /hidden HTTP/1.1\r\nHost: p\r\n\r\n"
    long = b"x" * 20_000 + hidden * 500
    behind = turn(long)
    start = b"POST /a HTTP/1.1\r\nHost: p\r\n"
    first = turn(b"y" * (16_000 + SLICE_BYTES - begun - len(turn(b"y" * 16_000, start=start) + slow)), start=start)
    async with site(waits=True) as at, connected(at) as (reader, writer):
        writer.write(first + slow + behind[:10_000])
        await reader.readuntil(b"/a" + b"y" * 16_000)
        due_bytes = at.read_bytes + len(behind) - 10_000
        writer.write(behind[10_000:])
        await at.until_read(due_bytes)
        at.may_answer.set()
        await reader.readuntil(b"[{1}]")
        await reader.readuntil(hidden + b"]")
        assert at.asked == [b"{1}", long]


@pytest.mark.parametrize("before", [b"", b"\r\n", GET])
@pytest.mark.parametrize("cut", [0, 30, 75, -60])
@pytest.mark.parametrize("is_chunked", [False, True])
@on_both_planes
async def test_an_offer_of_http2_with_a_body_is_one_request(before: bytes, cut: int, is_chunked: bool) -> None:
    """Java's own client offers HTTP/2 with its first request, whatever that is; and a body is never a request."""
    hidden = b"GET /hidden HTTP/1.1\r\nHost: p\r\n\r\n"
    if is_chunked:
        head, body = TURN + H2C + CHUNKED, b"%x\r\n%b\r\n0\r\n\r\n" % (len(hidden), hidden)
    else:
        head, body = TURN + H2C + b"Content-Length: %d\r\n\r\n" % len(hidden), hidden
    async with site() as at:
        wire = before + head + body
        got, _ = await heard(at, *[part for part in (wire[:cut], wire[cut:]) if part])
        assert [a.body for a in read_answers(got)] == [b"/a"] * (before == GET) + [b"[%b]" % hidden]


@pytest.mark.parametrize(
    ("size", "status"),
    [
        (b"2", 200),
        (b"0" * 5000 + b"2", 200),  # `int` alone takes no more than 4,300 digits
        (b"%d" % (2**63 - 1), 413),
        (b"%d" % (2**64 - 1), 413),
        (b"%d" % 2**64, 400),
        (b"9" * 5000, 400),
        (b"+2", 400),
        (b"-2", 400),
        (b"2,2", 400),
        (b"", 400),
    ],
)
@on_both_planes
async def test_a_size_is_any_digits_and_nothing_else(size: bytes, status: int) -> None:
    async with site() as at:
        got, is_closed = await heard(at, TURN + b"Content-Length: %b\r\n\r\n{}" % size + GET)
        assert (statuses(got), is_closed) == ([200, 200] if status == 200 else [status], status != 200)
        got, is_closed = await heard(at, b"POST /a HTTP/1.1\r\nHost: p\r\nContent-Length: %b\r\n\r\n{}" % size)
        assert statuses(got) == [status] or (status == 413 and not got and not is_closed)  # the application reads on


@on_both_planes
async def test_a_tunnel_is_refused_and_what_follows_is_no_request() -> None:
    async with site() as at:
        got, is_closed = await heard(at, b"CONNECT /a HTTP/1.1\r\nHost: p\r\nContent-Length: 29\r\n\r\n" + GET)
        assert len(read_answers(got)) == 1 and is_closed


@pytest.mark.parametrize(
    "version",
    [
        b"3.0",
        b"1.2",
        b"2.0",
        b"0.9",
    ],
)
@on_both_planes
async def test_other_versions_are_refused(version: bytes) -> None:
    async with site() as at:
        got, is_closed = await heard(at, GET.replace(b"1.1", version))
        assert got.startswith((b"HTTP/1.1 400", b"HTTP/1.1 505")) and is_closed


@on_both_planes
async def test_values_are_without_the_space_around_them() -> None:
    async with site() as at:
        async with connected(at) as (reader, writer):
            writer.write(TURN + b"Expect: 100-continue \r\nContent-Length: 2\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"


@pytest.mark.parametrize("cut", [3, 11])
@on_both_planes
async def test_http2_is_noticed_in_pieces_too(cut: int) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    async with site() as at:
        got, _ = await heard(at, preface[:cut], preface[cut:])
        assert got.startswith(b"HTTP/2 ")


# -- after the last answer


@on_both_planes
async def test_who_is_refused_is_asked_for_nothing_more() -> None:
    """What is behind a refused request on the connection is not begun, even if it came in the same read."""
    async with site() as at:
        got, is_closed = await heard(at, turn(b"{0}", b"Authorization: bad\r\n") + turn(b"{1}"))
        assert (statuses(got), is_closed, at.asked) == ([401], True, [])


@pytest.mark.parametrize(
    "behind", [b"X", GET.replace(b"Host: p", b"Host: p\r\nHost: q"), turn(b"", b"Authorization: bad\r\n"), GET]
)
@on_both_planes
async def test_nothing_is_written_behind_the_last_answer(behind: bytes) -> None:
    async with site() as at:
        got, is_closed = await heard(at, turn(b"{0}", b"Authorization: bad\r\n") + behind)
        assert (statuses(got), is_closed) == ([401], True)


@on_both_planes
async def test_what_came_before_garbage_is_answered_and_garbage_is_refused() -> None:
    async with site() as at:
        got, is_closed = await heard(at, GET + turn(b"{1}") + b"\0\0")
        assert (statuses(got), is_closed) == ([200, 200, 400], True)


@on_both_planes
async def test_a_client_that_still_sends_a_refused_body_gets_the_answer() -> None:
    async with site(body_limit_bytes=1000) as at:
        async with connected(at) as (reader, writer):
            writer.write(TURN + b"Content-Length: 5000000\r\n\r\n")
            for _ in range(50):
                writer.write(b"x" * 100_000)
                await asyncio.sleep(0)
            assert (await reader.read()).startswith(b"HTTP/1.1 413")
        await at.until(lambda: not at.open)


@pytest.mark.parametrize("is_slow", [False, True])
@on_both_planes
async def test_a_slow_client_gets_all_of_its_last_answer(is_slow: bool) -> None:
    """What it has `idle_timeout_s` to take on a connection that is kept, it must not have `CLOSE_S` for on another."""
    large = b"x" * 12_000_000
    async with site() as at:
        at.replies[b"{}"] = large
        async with connected(at) as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(turn(b"{}", b"Connection: close\r\n"))
            await at.until(lambda: at.asked != [])
            if is_slow:
                await at.until(lambda: at.is_stalled() and not under_way(at))
                at.advance(2 * CLOSE_S)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert len(read_answers(await reader.read())[0].body) == len(large)


@on_both_planes
async def test_a_slow_client_gets_all_of_an_answer_on_a_kept_connection() -> None:
    large = b"x" * 12_000_000
    async with site() as at:
        at.replies[b"{}"] = large
        async with connected(at) as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(turn(b"{}"))
            await at.until(lambda: at.is_stalled() and not under_way(at))
            at.advance(at.patience.idle_s + 2 * CLOSE_S)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert len(read_answers(await reader.read())[0].body) == len(large)


@on_both_planes
async def test_what_came_in_time_is_not_late_later() -> None:
    """Neither a body in several reads nor an answer that was taken slowly limits the connection's next request."""
    async with site() as at, connected(at) as (reader, writer):
        at.replies[b"{}"] = large = b"x" * 12_000_000
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(turn()[:-1])
        await at.until_read(len(turn()) - 1)
        (limits,) = at.open
        connection = cast(ClientConnection, limits.transport.get_protocol())
        assert connection._body_timer is not None
        writer.write(turn()[-1:])
        await at.until(lambda: connection._stall_timer is not None)
        stalled = connection._stall_timer
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        await reader.readuntil(large)
        await at.until(lambda: not limits.is_stalled)
        assert connection._body_timer is connection._stall_timer is None
        assert stalled is not None and stalled._timer.cancelled()


@on_both_planes
async def test_a_head_that_has_begun_must_come_in_time() -> None:
    async with site() as at, connected(at) as (reader, writer):
        writer.write(GET)
        await reader.readuntil(b"/a")
        writer.write(TURN)
        await at.until_read(len(GET + TURN))
        at.advance(at.patience.head_s)
        assert statuses(await reader.read()) == [408]


@on_both_planes
async def test_a_target_may_be_a_whole_url() -> None:
    async with site() as at:
        got, _ = await heard(at, turn(start=TURN.replace(b" /v1", b" http://p/v1")))
        assert (statuses(got), at.asked) == ([200], [b"{}"])


@on_both_planes
async def test_an_empty_line_behind_a_body_is_no_request() -> None:
    """Some clients send one; the connection is as idle after it as before. RFC 9112, 2.2."""
    async with site() as at:
        async with connected(at) as (reader, writer):
            writer.write(GET)
            await reader.readuntil(b"/a")
            writer.write(b"\r\n")
            await asyncio.sleep(0.02)
            at.advance(2 * at.patience.head_s)
            writer.write(turn(b"{1}"))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")


@on_both_planes
async def test_a_body_that_breaks_is_refused_also_where_it_is_no_turns() -> None:
    async with site() as at:
        got, is_closed = await heard(at, b"POST /a HTTP/1.1\r\nHost: p\r\n" + CHUNKED, b"zz\r\n")
        assert (statuses(got), is_closed) == ([400], True)


@on_both_planes
async def test_a_body_that_breaks_is_refused_in_its_turn() -> None:
    async with site(waits=True) as at:
        async with connected(at) as (reader, writer):
            writer.write(turn(b"{0}") + b"POST /a HTTP/1.1\r\nHost: p\r\n" + CHUNKED + b"zz\r\n")
            await at.until(lambda: at.asked != [])
            at.may_answer.set()
            assert statuses(await reader.read()) == [200, 400]


@on_both_planes
async def test_what_was_sent_ahead_of_the_last_answer_costs_none_of_it() -> None:
    """The kernel drops what it has not sent yet where a connection is closed before all of it was read."""
    large = b"x" * 2_500_000
    async with site(waits=True) as at:
        at.replies[b"{}"] = large
        async with connected(at) as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(turn(b"{}") + GET)
            await at.until(lambda: at.asked != [])
            for _ in range(3):
                writer.write(GET)
                await asyncio.sleep(0.02)
            for exchange in under_way(at):
                exchange.is_draining = True
            at.may_answer.set()
            await asyncio.sleep(0.05)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            data = b""
            with contextlib.suppress(ConnectionResetError):
                while part := await reader.read(2**20):
                    data += part
            assert data.endswith(large)
