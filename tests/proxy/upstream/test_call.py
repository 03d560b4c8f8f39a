"""One answer, on a connection of which a test says what comes, and when."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

import pytest

from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Phase
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.upstream.call import Answer, Call, Timeouts
from ppd.proxy.upstream.connection import WorkerConnection
from tests.support.clock import scenario
from tests.support.scripted_workers import Wire

WORKER = Worker(role=Role.DECODE, address="w:1")
PATIENT = Timeouts(connect_s=60.0, first_s=60.0, idle_s=60.0)


def answered(
    limits: Timeouts = PATIENT, head: dict[bytes, bytes] | None = None, wire: Wire | None = None
) -> tuple[Answer, Call]:
    """Whose head has come."""
    call = Call(WORKER)
    call.sent(asyncio.get_running_loop().time())
    answer = Answer(cast(WorkerConnection, wire or Wire()), limits, call, lambda _: None)
    answer.head(200, head or {})
    return answer, call


class Taker:
    """Takes a body as it comes."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def take(self, data: bytes, *, is_last: bool) -> None:
        self.said.append(data + b"." if is_last else data)

    def fail(self, error: LegError) -> None:
        self.said.append((error.phase, error.cause))


BROKEN = Phase.STREAM, Cause.RESET


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (["a"], ["b", "end"], [b"a", b"b", b"."]),
        (["a", "b"], ["end"], [b"ab", b"."]),
        (["a", "end"], [], [b"a."]),
        (["end"], [], [b"."]),
        (["a", "end", "falls silent"], [], [b"a."]),  # its connection serves another by then
        (["a", "breaks"], [], [b"a", BROKEN]),
        (["breaks"], [], [BROKEN]),
        (["a"], ["breaks"], [b"a", BROKEN]),
        ([], ["is no HTTP"], [BROKEN]),  # in mid-stream that is the same
        ([], ["falls silent", "breaks"], [(Phase.STREAM, Cause.TIMEOUT)]),
        (["a"], ["closes", "b"], [b"a"]),
    ],
)
async def test_a_body_goes_on_as_it_comes_and_so_does_its_end(
    before: list[str], after: list[str], said: list[object]
) -> None:
    answer, call = answered()
    taker = Taker()

    def comes(what: str) -> None:
        match what:
            case "end":
                answer.body_came(b"", is_last=True)
            case "breaks" | "is no HTTP":
                answer.broken(is_malformed=what != "breaks")
            case "falls silent":
                answer.give_up_waiting()
            case "closes":
                answer.close()
            case data:
                answer.body_came(data.encode(), is_last=False)

    for what in before:
        comes(what)
    answer.reached_the_client()
    answer.hand_on(taker)
    for what in after:
        comes(what)
    assert taker.said == said
    assert call.on_failure is None


@pytest.mark.parametrize("is_awaited", [False, True])
async def test_what_came_before_an_answer_broke_is_taken_first(is_awaited: bool) -> None:
    answer, _ = answered()

    def come() -> None:
        answer.body_came(b"a", is_last=False)
        answer.broken(is_malformed=True)

    if is_awaited:
        asyncio.get_running_loop().call_soon(come)
    else:
        come()
    assert await answer.chunk() == b"a"
    with pytest.raises(LegError) as failure:
        await answer.chunk()
    assert (failure.value.phase, failure.value.cause) == (Phase.HEADERS, Cause.MALFORMED)


async def test_what_comes_just_as_nobody_waits_any_more_is_no_error() -> None:
    answer, _ = answered()
    waiting = asyncio.create_task(answer.chunk())
    await asyncio.sleep(0)
    waiting.cancel()
    answer.body_came(b"a", is_last=False)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await answer.chunk() == b"a"


@pytest.mark.parametrize(("sizes", "is_taken"), [([4], True), ([2, 2], True), ([5], False), ([2, 3], False)])
@pytest.mark.parametrize("is_whole", [True, False])
async def test_no_answer_is_read_beyond_its_limit(sizes: list[int], is_taken: bool, is_whole: bool) -> None:
    answer, _ = answered()
    for size in sizes:
        answer.body_came(b"x" * size, is_last=False)
    if is_whole:
        answer.body_came(b"", is_last=True)
    else:
        asyncio.get_running_loop().call_soon(partial(answer.body_came, b"", is_last=True))
    if is_taken:
        assert await answer.body(4) == b"x" * sum(sizes)
    else:
        with pytest.raises(LegError) as failure:
            await answer.body(4)
        assert failure.value.cause is Cause.MALFORMED


async def test_a_worker_is_not_read_while_its_answer_is_not_taken() -> None:
    wire = Wire()
    answer, _ = answered(wire=wire)
    for _ in range(2):
        answer.pause()
        assert (wire.is_read, answer.is_paused) == (False, True)
        answer.resume()
        assert (wire.is_read, answer.is_paused) == (True, False)
    answer.close()
    assert wire.is_aborted


@scenario
async def test_each_wait_for_an_answer_has_its_own_limit() -> None:
    """The first one that of the worker's work, the others that of its silence; how long a client takes is neither."""
    limits = Timeouts(connect_s=1.0, first_s=10.0, idle_s=2.0)
    answer, _ = answered(limits, {b"content-encoding": b"identity"})
    assert answer.content_encoding == ""
    for pause_s in (9.0, 1.5, 1.5):
        asyncio.get_running_loop().call_later(pause_s, partial(answer.body_came, b"a", is_last=False))
        assert await answer.chunk() == b"a"
        await asyncio.sleep(100.0)
    begun_s = asyncio.get_running_loop().time()
    with pytest.raises(LegError) as failure:
        await answer.chunk()
    assert failure.value.cause is Cause.TIMEOUT
    assert asyncio.get_running_loop().time() - begun_s == limits.idle_s
