"""One turn on its connection: what is refused and counted, what it holds of the memory, what its client gets."""

from __future__ import annotations

import asyncio
import json

import pytest

from ppd.proxy.admission.wrong_keys import FREE
from ppd.proxy.telemetry.access_log import AccessLog
from tests.proxy.telemetry.test_access_log import Kept
from tests.support.client_connections import (
    CHUNKED,
    EVENT,
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

BAD = b"Authorization: bad\r\n"
LIMIT = 1000


def chunked(body: bytes, headers: bytes = b"") -> bytes:
    return TURN + headers + CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (turn(b"x" * LIMIT), 200),
        (TURN + b"Content-Length: %d\r\n\r\n" % (LIMIT + 1), 413),  # before any of it has come
        (chunked(b"x" * LIMIT), 200),
        (chunked(b"x" * (LIMIT + 1)), 413),
        (turn(b"x", b"Content-Encoding: gzip\r\n"), 400),
        (turn(b"x", BAD), 401),
    ],
)
@on_both_planes
async def test_what_is_refused_is_counted_once_and_asks_nobody(request_: bytes, status: int) -> None:
    async with site(body_limit_bytes=LIMIT) as at:
        got, _ = await heard(at, request_)
        assert statuses(got) == [status]
        assert at.refused == [status] * (status != 200)
        assert len(at.asked) == (status == 200)
        assert at.edge is not None and at.edge.body_memory.held_bytes == 0


@pytest.mark.parametrize(
    ("start", "before", "is_asked_for"),
    [
        (TURN, b"", True),
        (TURN.replace(b"1.1", b"1.0"), b"", False),  # which knows no such answer
        (TURN, turn(b"{0}"), False),  # when it is its turn, some of it is there
    ],
)
@on_both_planes
async def test_a_client_that_waits_to_be_asked_for_its_body_is(start: bytes, before: bytes, is_asked_for: bool) -> None:
    async with site(waits=True) as at, connected(at) as (reader, writer):
        writer.write(before + start + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{")
        await at.until(lambda: len(at.asked) == bool(before) and bool(under_way(at)))
        at.may_answer.set()
        await asyncio.sleep(0.02)
        writer.write(b"}")
        got = await reader.readuntil(b"[{}]")
        assert (b"100 Continue" in got) == is_asked_for


@on_both_planes
async def test_a_request_that_breaks_while_it_waits_is_refused_in_its_turn() -> None:
    async with site(waits=True) as at, connected(at) as (reader, writer):
        writer.write(turn(b"{0}") + TURN + CHUNKED + b"zz\r\n")
        await at.until(lambda: at.asked != [])
        at.may_answer.set()
        assert statuses(await reader.read()) == [200, 400]
        assert at.asked == [b"{0}"] and at.refused == [400]
        await at.until(lambda: not under_way(at))
        assert at.edge is not None and at.edge.body_memory.held_bytes == 0


@on_both_planes
async def test_a_body_that_came_while_its_request_waited_takes_its_memory() -> None:
    """And gives it back once an answer has begun, which may last."""
    body = b"x" * 10_000
    async with site(waits=True) as at, connected(at) as (reader, writer):
        assert at.edge is not None
        memory = at.edge.body_memory
        at.replies[body] = Pieces(EVENT)
        writer.write(turn(b"{0}"))
        await at.until(lambda: at.asked != [])
        writer.write(chunked(body))
        await at.until_read(len(turn(b"{0}")) + len(chunked(body)))
        at.may_answer.set()
        at.may_answer = asyncio.Event()
        await at.until(lambda: at.asked == [b"{0}", body])
        assert memory.held_bytes == len(body)
        at.may_answer.set()
        await reader.readuntil(EVENT)
        assert memory.held_bytes == 0


@pytest.mark.parametrize("headers", [b"", b"Expect: 100-continue\r\n"])
@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("is_late", [False, True])
@on_both_planes
async def test_a_body_that_waited_for_room_is_answered(is_chunked: bool, headers: bytes, is_late: bool) -> None:
    body = b"x" * 12_000
    async with site() as at, connected(at) as (reader, writer):
        assert at.edge is not None
        at.edge.body_memory.limit_bytes = 20_000
        other = at.edge.body_memory.room()
        assert other.want(20_000, lambda: None, lambda _: None)
        sent = chunked(body, headers) if is_chunked else turn(body, headers)
        writer.write(sent[:-3] if is_late else sent)
        await asyncio.sleep(0.02)
        assert at.asked == []
        other.free()
        if is_late:
            await asyncio.sleep(0.02)
            writer.write(sent[-3:])
        got = await reader.readuntil(body + b"]")
        assert got.count(b"100 Continue") <= 1


@on_both_planes
async def test_a_client_whose_body_waits_for_room_is_not_read() -> None:
    sent = turn(b"x" * 1_000_000)
    async with site(room_wait_s=60.0) as at, connected(at) as (_, writer):
        assert at.edge is not None
        at.edge.body_memory.limit_bytes = 1_200_000
        other = at.edge.body_memory.room()
        assert other.want(600_000, lambda: None, lambda _: None)
        writer.write(sent)
        await asyncio.sleep(0.05)
        assert at.read_bytes < len(sent) / 2
        other.free()
        await at.until(lambda: at.asked != [])


@on_both_planes
async def test_a_body_that_no_room_would_take_is_refused_at_once() -> None:
    async with site() as at:
        assert at.edge is not None
        at.edge.body_memory.limit_bytes = 10_000
        got, _ = await heard(at, TURN + b"Content-Length: 20000\r\n\r\n")
        assert statuses(got) == [413]


@on_both_planes
async def test_of_a_request_with_a_wrong_key_nothing_more_is_kept() -> None:
    async with site() as at:
        assert at.edge is not None
        wrong_keys = at.edge.requests.wrong_keys
        for _ in range(FREE + 9):
            wrong_keys.withhold("a")
        wrong_keys.withheld = 0
        async with connected(at) as (_, writer):
            sent = chunked(b"x" * 100_000, BAD)
            writer.write(sent)
            await at.until_read(len(sent))
            (exchange,) = under_way(at)
            assert exchange._reading.received.size == 0
            assert at.asked == []


@on_both_planes
async def test_a_defect_in_an_answer_ends_its_connection() -> None:
    async with site() as at:
        at.replies[b"{}"] = RuntimeError("a defect")
        got, is_closed = await heard(at, turn())
        assert (got, is_closed) == (b"", True)
        await at.until(lambda: not at.open and not under_way(at))
        assert len(at.failures) == 1
        at.failures.clear()


@on_both_planes
async def test_a_stream_that_comes_after_its_client_has_left_is_abandoned() -> None:
    async with site(waits=True) as at:
        at.answers_those_who_left = True
        stream = at.replies[b"{}"] = Pieces(EVENT)
        async with connected(at) as (_, writer):
            writer.write(turn())
            await at.until(lambda: at.asked != [])
        await at.until(lambda: at.cancelled == 1 and not at.open)
        assert stream.is_abandoned and stream.taken == 0


@on_both_planes
async def test_a_turn_whose_answer_comes_after_its_client_has_left_is_ended() -> None:
    async with site(waits=True) as at:
        at.answers_those_who_left = True
        async with connected(at) as (_, writer):
            writer.write(turn())
            await at.until(lambda: at.asked != [])
        await at.until(lambda: at.cancelled == 1 and not at.open)
        assert at.unended == 0


@on_both_planes
async def test_a_slow_client_gets_all_of_an_answer_in_pieces() -> None:
    """Which is not made faster than it is taken."""
    async with site() as at:
        stream = at.replies[b"{}"] = Pieces(*[b"~" * 500_000] * 40)
        async with connected(at) as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(turn())
            await at.until(at.is_stalled)
            await asyncio.sleep(0.02)
            assert stream.taken < 40
            stream.more.set()
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            got = await reader.readuntil(b"[DONE]")
            assert got.count(b"~") == 40 * 500_000


@pytest.mark.parametrize(
    ("moment", "status", "outcome"),
    [
        ("whole", 200, "completed"),
        ("refused", 401, "rejected"),
        ("left", 499, "left"),
        ("cut while it is asked", 503, "failed"),
        ("cut", 200, "cut"),
        ("cut within an event", 200, "cut"),
    ],
)
@on_both_planes
async def test_each_turn_has_one_line_in_the_access_log(moment: str, status: int, outcome: str) -> None:
    kept = Kept()
    is_stream = moment in ("cut", "cut within an event")
    async with site(waits=not is_stream, log=AccessLog(as_json=True, lines=kept)) as at:
        assert at.edge is not None
        at.replies[b"{}"] = Pieces(EVENT if moment == "cut" else b"data: {") if is_stream else b"[]"
        async with connected(at) as (reader, writer):
            writer.write(turn(headers=BAD if moment == "refused" else b""))
            if is_stream:
                await reader.readuntil(b"data: {")
            elif moment != "refused":
                await at.until(lambda: at.asked != [])
            if "cut" in moment:
                await at.edge.requests.drained(0.01)
            elif moment != "left":
                at.may_answer.set()
                await reader.readline()
        await at.until(lambda: not at.open and not under_way(at))
    (line,) = [json.loads(each) for each in kept.lines]
    assert (line["status"], line["outcome"]) == (status, outcome)
    assert line.get("id") == (None if moment == "refused" else "id")
