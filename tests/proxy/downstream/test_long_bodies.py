"""Bodies that come in many reads, in place where the sockets are the poller's: whole, in order, nothing behind lost."""

from __future__ import annotations

import asyncio

import pytest

from ppd.proxy import plane
from ppd.proxy.bodies.received import SHORT_BYTES
from ppd.proxy.bodies.shared_bytes import LARGE_BYTES
from tests.support.client_connections import (
    CHUNKED,
    GET,
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


def body(size: int) -> bytes:
    return b"".join(b"%07d " % number for number in range(size // 8 + 1))[:size]


SIZES = [SHORT_BYTES, SHORT_BYTES + 1, 40_000, 700_001, LARGE_BYTES]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cut", [1, 60, 5_000, 33_000, -1, -30])
@on_both_planes
async def test_a_body_arrives_as_it_was_sent_and_so_does_what_follows(size: int, cut: int) -> None:
    sent = body(size)
    first = turn(sent)
    async with site() as at:
        got, is_closed = await heard(at, first[:cut], first[cut:] + turn(b"{1}") + GET)
        assert [len(answer.body) for answer in read_answers(got)] == [size + 2, 5, 2]
        assert at.asked == [sent, b"{1}"] and not is_closed


@on_both_planes
async def test_only_the_first_read_of_a_body_is_copied() -> None:
    sent = turn(body(700_000))
    async with site() as at, connected(at) as (_, writer):
        writer.write(sent[:-1])
        await at.until(lambda: bool(under_way(at)))
        (exchange,) = under_way(at)
        transport = exchange._connection.transport
        if isinstance(transport, plane.SocketTransport):
            await asyncio.sleep(0.05)
            assert 0 < exchange._reading.received.size <= 32 * 1024
        writer.write(sent[-1:])
        await at.until(lambda: at.asked == [body(700_000)])


@on_both_planes
async def test_requests_ahead_with_long_bodies_are_answered_in_their_order() -> None:
    sent = [body(size) for size in (50_000, 60_000, 300_000)]
    async with site() as at:
        got, _ = await heard(at, b"".join(map(turn, sent)))
        assert [answer.body for answer in read_answers(got)] == [b"[%b]" % each for each in sent]


@on_both_planes
async def test_a_long_body_of_no_known_size() -> None:
    sent = body(100_000)
    async with site() as at:
        got, _ = await heard(at, TURN + CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(sent), sent) + turn(b"{1}"))
        assert [answer.body for answer in read_answers(got)] == [b"[%b]" % sent, b"[{1}]"]


@on_both_planes
async def test_a_client_that_leaves_in_mid_body_is_forgotten() -> None:
    async with site() as at:
        async with connected(at) as (_, writer):
            writer.write(turn(body(700_000))[:400_000])
            await at.until(lambda: len(at.open) == 1)
            await asyncio.sleep(0.02)
        await at.until(lambda: not at.open)
        assert at.asked == []


@on_both_planes
async def test_a_body_that_stops_is_refused_and_what_still_comes_is_no_request() -> None:
    async with site(idle_timeout_s=0.1) as at:
        sent = turn(body(700_000))
        async with connected(at) as (reader, writer):
            writer.write(sent[:400_000])
            got = await reader.readuntil(b"within")
            writer.write(sent[400_000:] + turn(b"{1}"))
            got += await reader.read()
        assert statuses(got) == [408] and at.asked == []


@on_both_planes
async def test_room_that_comes_late_is_waited_for() -> None:
    sent = body(300_000)
    async with site() as at:
        assert at.edge is not None
        at.edge.body_memory.limit_bytes = 400_000
        other = at.edge.body_memory.room()
        assert other.want(200_000, lambda: None, lambda _: None)
        async with connected(at) as (reader, writer):
            writer.write(turn(sent))
            await asyncio.sleep(0.02)
            assert at.asked == []
            other.free()
            await reader.readuntil(sent + b"]")
        assert at.asked == [sent]


@on_both_planes
async def test_who_hardly_sends_a_body_makes_room_for_others() -> None:
    sent = body(300_000)
    async with site(room_wait_s=0.2) as at:
        assert at.edge is not None
        at.edge.body_memory.limit_bytes = 400_000
        async with connected(at) as (slow, slow_writer), connected(at) as (reader, writer):
            slow_writer.write(turn(sent)[:20_000])
            await asyncio.sleep(0.02)
            writer.write(turn(sent))
            assert statuses(await slow.read()) == [408]
            await reader.readuntil(sent + b"]")
        assert at.asked == [sent] and at.edge.body_memory.held_bytes == 0


@on_both_planes
async def test_who_waited_for_room_and_then_hardly_sends_makes_room_too() -> None:
    sent = body(300_000)
    async with site(room_wait_s=0.5) as at:
        assert at.edge is not None
        at.edge.body_memory.limit_bytes = 400_000
        other = at.edge.body_memory.room()
        assert other.want(200_000, lambda: None, lambda _: None)
        async with connected(at) as (slow, slow_writer), connected(at) as (reader, writer):
            slow_writer.write(turn(sent)[:20_000])
            await asyncio.sleep(0.02)
            other.free()
            writer.write(turn(sent))
            assert statuses(await slow.read()) == [408]
            await reader.readuntil(sent + b"]")
        assert at.asked == [sent]


@on_both_planes
async def test_who_gets_no_room_for_a_whole_body_may_ask_again() -> None:
    async with site(room_wait_s=0.02) as at:
        assert at.edge is not None
        at.edge.body_memory.limit_bytes = 400_000
        other = at.edge.body_memory.room()
        assert other.want(400_000, lambda: None, lambda _: None)
        async with connected(at) as (reader, writer):
            writer.write(turn(body(12_000)))
            await reader.readuntil(b"body_memory")
            other.free()
            writer.write(turn(b"{1}"))
            await reader.readuntil(b"[{1}]")
        assert at.asked == [b"{1}"]


@on_both_planes
async def test_a_body_that_the_application_leaves_unread_keeps_no_other_request_from_it() -> None:
    sent = b"POST /unread HTTP/1.1\r\nHost: p\r\nContent-Length: 100000\r\n\r\n" + body(100_000)
    async with site(waits=True) as at, connected(at) as (reader, writer):
        writer.write(sent)
        await asyncio.sleep(0.05)
        at.may_answer.set()
        await reader.readuntil(b"/unread")
        writer.write(GET)
        await reader.readuntil(b"/a")
