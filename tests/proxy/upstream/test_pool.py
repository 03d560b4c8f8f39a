"""Connections to workers, against small real servers: kept for the next request, and made ahead of one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Iterable
from contextlib import AsyncExitStack
from typing import cast

import pytest

from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Phase
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.upstream.call import Call, Timeouts
from ppd.proxy.upstream.client import STALE_S, Upstream
from ppd.proxy.upstream.connection import AnswerReceiver, WorkerConnection
from ppd.proxy.upstream.pool import Pool, _socket, connecting
from tests.support.clock import scenario
from tests.support.scripted_workers import PATIENT, WHOLE, Script, deaf, read, says, server

# -- kept connections


def closes_the_second(answer_third: bytes = WHOLE) -> Script:
    """The first request of a connection is answered; as the second one comes, it is closed."""

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        if number == 2:
            writer.close()
        else:
            writer.write(WHOLE if number == 1 else answer_third)

    return script


async def test_a_kept_connection_that_just_closed_is_no_failure(upstream: Upstream) -> None:
    async with server(closes_the_second()) as target:
        assert await read(upstream, Call(target)) == b"hi"
        assert await read(upstream, Call(target)) == b"hi"


async def test_what_is_done_meanwhile_is_done_once_however_often_the_request_is_sent(upstream: Upstream) -> None:
    done = list[Phase]()
    async with server(closes_the_second()) as target:
        assert await read(upstream, Call(target)) == b"hi"
        call = Call(target)
        answer = await upstream.ask(call, "/", timeouts=PATIENT, meanwhile=lambda: done.append(call.phase))
        assert (await answer.body(), done) == (b"hi", [Phase.SENT])


async def test_no_empty_part_is_written(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on, asyncio's own transport would write it for ever."""
    written, send = list[bytes | memoryview](), WorkerConnection.send

    def noted(
        self: WorkerConnection, listener: AnswerReceiver, head: bytes, body: Iterable[bytes | memoryview]
    ) -> None:
        written.extend((head, *body))
        send(self, listener, head, body)

    monkeypatch.setattr(WorkerConnection, "send", noted)
    async with server(says(WHOLE)) as target:
        answer = await upstream.ask(Call(target), "/", timeouts=PATIENT)
        assert await answer.body() == b"hi"
    assert written and all(map(len, written))


@pytest.mark.parametrize(
    ("works_s", "part", "may_resend", "asked"),
    [(0.0, b"", True, 3), (0.0, b"", False, 2), (2 * STALE_S, b"", True, 2), (0.0, b"HTTP/1.1 2", True, 2)],
    ids=["stale", "without budget", "worked on", "begun"],
)
async def test_what_a_worker_may_have_worked_on_is_not_sent_again(
    works_s: float, part: bytes, may_resend: bool, asked: int
) -> None:
    """A kept connection that breaks: at once, or after a while, or within the answer."""
    seen, budget = 0, list[bool]()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        nonlocal seen
        seen = number
        if number != 2:
            writer.write(WHOLE)
            return
        await asyncio.sleep(works_s)
        writer.write(part)
        await writer.drain()
        writer.close()

    def take() -> bool:
        budget.append(may_resend)
        return may_resend

    upstream = Upstream(keepalive_s=4.0, may_resend=take)
    async with server(script) as target:
        await read(upstream, Call(target))
        if asked == 3:
            assert await read(upstream, Call(target)) == b"hi"
        else:
            with pytest.raises(LegError) as failure:
                await read(upstream, Call(target))
            assert (failure.value.phase, failure.value.cause) == (Phase.SENT, Cause.RESET)
        assert seen == asked
        assert budget == ([may_resend] if not works_s and not part else [])
        await upstream.close()


@pytest.mark.parametrize("script", [says(WHOLE), closes_the_second()], ids=["answered", "sent again"])
async def test_what_may_be_done_meanwhile_is_done_once_when_all_is_sent(upstream: Upstream, script: Script) -> None:
    done = list[int]()
    async with server(script) as target:
        for _ in range(2):
            call = Call(target)

            def meanwhile(call: Call = call) -> None:
                assert call.phase is Phase.SENT
                done.append(1)

            async with upstream.answer(call, "/", timeouts=PATIENT, meanwhile=meanwhile) as answer:
                assert await answer.body() == b"hi"
    assert len(done) == 2


async def test_what_fails_meanwhile_closes_the_connection(upstream: Upstream) -> None:
    is_closed = asyncio.Event()

    async def script(reader: asyncio.StreamReader, _: asyncio.StreamWriter, __: int) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        is_closed.set()

    def meanwhile() -> None:
        raise RuntimeError("a fault")

    async with server(script) as target:
        with pytest.raises(RuntimeError, match="a fault"):
            await upstream.ask(Call(target), "/", timeouts=PATIENT, meanwhile=meanwhile)
        async with asyncio.timeout(60):
            await is_closed.wait()


async def test_a_worker_that_broke_off_and_is_gone_was_asked_once(upstream: Upstream) -> None:
    """The failure is that of the request, not that of the connection which would have been the second."""
    async with AsyncExitStack() as stack:

        async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
            if number == 1:
                writer.write(WHOLE)
            else:
                await stack.aclose()
                writer.close()

        target = await stack.enter_async_context(server(script))
        await read(upstream, Call(target))
        with pytest.raises(LegError) as failure:
            await read(upstream, Call(target))
        assert (failure.value.phase, failure.value.cause) == (Phase.SENT, Cause.RESET)
        found = await upstream.examine(failure.value, target)
        assert (found.phase, found.cause) == (Phase.SENT, Cause.WORKER_GONE)


async def test_a_worker_that_takes_connections_is_not_gone(upstream: Upstream) -> None:
    async with server(says(WHOLE)) as target:
        reset = LegError("", worker=target.id, phase=Phase.SENT, cause=Cause.RESET)
        assert await upstream.examine(reset, target) is reset


async def test_a_request_that_must_arrive_once_is_not_sent_again(upstream: Upstream) -> None:
    """A D that has read it may have pulled the KV already, and would pull other KV the second time."""
    async with server(closes_the_second()) as target:
        await read(upstream, Call(target))
        with pytest.raises(LegError) as failure:
            await read(upstream, Call(target, once=True))
        assert (failure.value.phase, failure.value.cause) == (Phase.SENT, Cause.RESET)


async def test_what_follows_an_answer_is_no_part_of_it(upstream: Upstream) -> None:
    async with server(says(WHOLE + b"x")) as target:
        assert await read(upstream, Call(target)) == b"hi"
        (pool,) = upstream._pools.values()
        assert pool.take() is None, "nor of the next"


async def test_a_new_connection_that_closes_is_a_failure(upstream: Upstream) -> None:
    asked = 0

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        nonlocal asked
        asked += 1
        writer.close()

    async with server(script) as target:
        with pytest.raises(LegError) as failure:
            await read(upstream, Call(target))
        assert (failure.value.phase, failure.value.cause, asked) == (Phase.SENT, Cause.RESET, 1)


async def test_the_second_way_begins_with_connecting(upstream: Upstream) -> None:
    """The worker went away while a connection to it was kept, and nobody takes a new one."""
    async with AsyncExitStack() as outer:
        inner = await outer.enter_async_context(AsyncExitStack())

        async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
            if number == 1:
                writer.write(WHOLE)
                return
            await inner.aclose()
            await outer.enter_async_context(deaf(port))
            writer.close()

        target = await inner.enter_async_context(server(script))
        port = int(target.address.rpartition(":")[2])
        await read(upstream, Call(target))
        with pytest.raises(LegError) as failure:
            await read(upstream, Call(target), Timeouts(connect_s=0.1, first_s=20.0, idle_s=20.0))
        assert (failure.value.phase, failure.value.cause) == (Phase.CONNECT, Cause.TIMEOUT)


async def test_a_connection_that_was_kept_for_too_long_is_not_taken(upstream: Upstream) -> None:
    """Its worker may be about to close it; the timer that closes it first can be late."""
    async with server(says(WHOLE)) as target:
        await read(upstream, Call(target))
        (pool,) = upstream._pools.values()
        (kept,) = pool._idle
        kept.free_s -= 4.0
        assert pool.take() is None
        assert not kept.is_open


# -- connections made ahead


async def test_a_spare_connection_is_there_before_the_first_request(upstream: Upstream) -> None:
    async with server(says(WHOLE)) as target:
        await upstream.warm([target], 2, 20.0)
        (pool,) = upstream._pools.values()
        spares = set(pool._idle)
        assert await read(upstream, Call(target)) == b"hi"
        assert set(pool._idle) == spares, "no other was made, and the one that was used is kept"
        await upstream.warm([target], 2, 20.0)
        assert set(pool._idle) == spares, "two are at hand"


async def test_a_spare_connection_that_its_worker_closes_is_no_failure(upstream: Upstream) -> None:
    def closes_the_first(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> Awaitable[None]:
        writer.close() if number == 1 else writer.write(WHOLE)
        return asyncio.sleep(0)

    async with server(closes_the_first) as target:
        await upstream.warm([target], 1, 20.0)
        assert await read(upstream, Call(target)) == b"hi"


async def test_a_spare_connection_grows_old_like_any_other(upstream: Upstream) -> None:
    async with server(says(WHOLE)) as target:
        await upstream.warm([target], 1, 20.0)
        (pool,) = upstream._pools.values()
        (spare,) = pool._idle
        spare.free_s -= 4.0
        assert pool.take() is None
        assert not spare.is_open


async def test_workers_that_take_no_connection_keep_nobody_waiting(upstream: Upstream) -> None:
    async with server(says(WHOLE)) as gone:
        pass
    async with deaf() as silent, server(says(WHOLE)) as good:
        await upstream.warm([gone, silent, good], 1, 0.1)
        assert [len(pool._idle) for pool in upstream._pools.values()] == [0, 0, 1]


class Kept:
    """An idle connection."""

    is_quiet = True
    free_s = 0.0
    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


@scenario
async def test_idle_connections_are_closed_as_each_grows_old() -> None:
    pool = Pool(("127.0.0.1:1", False), keepalive_s=10.0, tls=None)
    first, second, third = kept = [Kept(), Kept(), Kept()]

    def keep(one: Kept) -> None:
        pool.free(cast(WorkerConnection, one))

    async def closed_after(pause_s: float) -> list[bool]:
        await asyncio.sleep(pause_s)
        for one in kept:
            if one.is_aborted:
                pool._idle.pop(cast(WorkerConnection, one), None)
        return [one.is_aborted for one in kept]

    keep(first)
    await asyncio.sleep(5.0)
    keep(second)
    assert await closed_after(5.5) == [True, False, False]
    assert await closed_after(5.0) == [True, True, False]
    await asyncio.sleep(100.0)
    keep(third)
    assert await closed_after(10.5) == [True, True, True]


def test_what_was_given_up_is_not_sent_any_more_and_small_requests_leave_at_once() -> None:
    with _socket(socket.AF_INET) as made:
        assert struct.unpack("ii", made.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)) == (1, 0)
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("fails", "is_gone", "cause"),
    [
        (None, True, Cause.WORKER_GONE),  # just as the connection was made
        (OSError("refused"), False, Cause.REFUSED),
        (OSError("refused"), True, Cause.WORKER_GONE),
        (UnicodeError("no such label"), False, Cause.REFUSED),
    ],
)
async def test_why_no_connection_was_made(fails: Exception | None, is_gone: bool, cause: Cause) -> None:
    call = Call(Worker(role=Role.DECODE, address="w:1"))
    with pytest.raises(LegError) as failure:
        async with connecting(call, 60.0):
            call.is_gone = is_gone
            if fails is not None:
                raise fails
    assert (failure.value.phase, failure.value.cause) == (Phase.CONNECT, cause)
    assert call.on_failure is None
