"""Requests that carry a handoff: sent once, in time, or not at all."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
import uvloop

from ppd.proxy import plane
from ppd.proxy.app.lifespan import UNHEARD_S
from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Phase
from ppd.proxy.upstream.call import Answer, Call, Expiry, Timeouts
from ppd.proxy.upstream.client import Upstream
from tests.support.scripted_workers import HEAD, PATIENT, WHOLE, deaf, read, says, server, worker
from tests.support.serve_program import until

HASTY = Timeouts(connect_s=0.1, first_s=0.1, idle_s=0.1)


async def test_what_must_not_arrive_late_does_not_wait_long_for_a_connection(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppd.proxy.upstream.client.ONCE_CONNECTS_S", 0.1)
    async with deaf() as target:
        with pytest.raises(LegError) as failure:
            await read(upstream, Call(target, once=True))
        assert (failure.value.phase, failure.value.cause) == (Phase.CONNECT, Cause.TIMEOUT)


@pytest.mark.parametrize(
    ("once", "answers", "is_doubted"), [(True, False, True), (False, False, False), (True, True, False)]
)
async def test_a_worker_is_doubted_that_was_sent_what_must_not_arrive_late(
    upstream: Upstream, once: bool, answers: bool, is_doubted: bool
) -> None:
    """Where it gives no sign of life: nothing tells whether the request has arrived, or when it will."""
    async with server(says(HEAD) if answers else says()) as target:
        asking = asyncio.create_task(read(upstream, call := Call(target, once=once)))
        await until(lambda: call.phase is (Phase.HEADERS if answers else Phase.SENT))
        assert upstream.unheard(-1.0) == [target.id] * is_doubted
        assert upstream.unheard(60.0) == [], "not at once"
        upstream.heard(target.id, call.sent_s - 0.001)
        assert upstream.unheard(-1.0) == [target.id] * is_doubted, "the probe was asked before"
        upstream.heard(target.id, call.sent_s)
        assert upstream.unheard(-1.0) == [], "it has answered a probe since, so it has read what came before"
        asking.cancel()


class Readings:
    """A clock that says these times, one after the other, and then goes on saying the last one."""

    def __init__(self, *times_s: float) -> None:
        self._times_s = list(times_s)

    def __call__(self) -> float:
        return self._times_s.pop(0) if len(self._times_s) > 1 else self._times_s[0]


EXPIRY = Expiry(send_by_s=20.0, heard_by_s=28.0)


async def test_a_handoff_that_is_too_old_is_not_sent_and_its_connection_is_kept(upstream: Upstream) -> None:
    served = list[int]()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        served.append(writer.get_extra_info("peername")[1])
        writer.write(WHOLE)

    async with server(script) as target:
        upstream.uptime = Readings(20.0)
        with pytest.raises(LegError) as failure:
            await read(upstream, Call(target, once=True, expiry=EXPIRY))
        assert (failure.value.phase, failure.value.cause) == (Phase.CONNECT, Cause.STALE_HANDOFF)
        (made,) = upstream._pool(target)._idle
        upstream.uptime = Readings(19.9, 19.9)
        assert await read(upstream, Call(target, once=True, expiry=EXPIRY)) == b"hi"
        assert await read(upstream, Call(target)) == b"hi"
        assert len(set(served)) == 1
        assert list(upstream._pool(target)._idle) == [made]


async def test_an_answer_to_a_handoff_that_left_late_is_not_taken(upstream: Upstream) -> None:
    """The loop stood still between the look at the clock and the write."""
    async with server(says(WHOLE)) as target:
        upstream.uptime = Readings(19.9, 28.0)
        with pytest.raises(LegError) as failure:
            await read(upstream, Call(target, once=True, expiry=EXPIRY))
        assert (failure.value.phase, failure.value.cause) == (Phase.SENT, Cause.STALE_HANDOFF)


SOON = Expiry(send_by_s=20.0, heard_by_s=20.1)


class ThreadedWorker:
    """Answers one request while the event loop stands still: `stand_still` returns once the answer lies there."""

    def __init__(self, listening: socket.socket) -> None:
        self.worker = worker(listening.getsockname()[1])
        self._listening = listening
        self._stands_still, self._has_answered = threading.Event(), threading.Event()
        self._answering = asyncio.create_task(asyncio.to_thread(self._answer))

    def stand_still(self, least_s: float = 0.0) -> None:
        self._stands_still.set()
        self._has_answered.wait(60.0)
        time.sleep(least_s)

    async def end(self) -> None:
        (await self._answering).close()

    def _answer(self) -> socket.socket:
        connection, _ = self._listening.accept()
        connection.recv(65536)
        self._stands_still.wait(60.0)
        connection.sendall(WHOLE)
        self._has_answered.set()
        return connection


async def late_answer(expiry: Expiry, found_s: float, *, is_seen_sent: bool) -> LegError:
    """Of an answer that came while the loop stood still: right after the request was written, or later.

    found_s: the time once it is written, and the loop goes on.
    """
    async with AsyncExitStack() as stack:
        upstream = Upstream(keepalive_s=4.0)
        stack.push_async_callback(upstream.close)
        late = ThreadedWorker(stack.enter_context(socket.create_server(("127.0.0.1", 0))))
        stack.push_async_callback(late.end)
        upstream.uptime = Readings(19.9, found_s, expiry.heard_by_s)
        call = Call(late.worker, once=True, expiry=expiry)
        still = None if is_seen_sent else late.stand_still
        asking = asyncio.create_task(upstream.ask(call, "/", timeouts=PATIENT, meanwhile=still))
        if is_seen_sent:
            await until(lambda: call.patience_s < 60.0)
            late.stand_still(expiry.heard_by_s - found_s)
        with pytest.raises(LegError) as failure:
            (await asking).close()
        return failure.value


@pytest.mark.parametrize("make_loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(("expiry", "found_s", "is_seen_sent"), [(EXPIRY, 28.0, False), (SOON, 20.0, True)])
def test_so_it_is_where_the_loop_stood_still_until_the_answer_was_there(
    expiry: Expiry, found_s: float, is_seen_sent: bool, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Who knows when its worker read the handoff? One loop looks at its timers first, the other at its sockets."""
    with asyncio.Runner(loop_factory=make_loop) as loop:
        failure = loop.run(late_answer(expiry, found_s, is_seen_sent=is_seen_sent))
    assert (failure.phase, failure.cause) == (Phase.SENT, Cause.STALE_HANDOFF)


@pytest.mark.skipif(not plane.IS_BUILT, reason="its sockets are closed at once")
async def test_of_a_connection_that_was_just_closed_nothing_is_undelivered() -> None:
    upstream = Upstream(keepalive_s=4.0, poller=plane.Poller())
    async with server(says()) as target:
        connection = await upstream._pool(target).connect(Call(target), 60.0)
        connection.send(Answer(connection, PATIENT, Call(target), lambda _: None), b"POST / HTTP/1.1", ())
        connection.abort()
        assert not connection.has_undelivered
    await upstream.close()


async def test_a_handoff_is_dropped_that_its_worker_may_read_too_late(upstream: Upstream) -> None:
    async with server(says()) as target:
        upstream.uptime = Readings(19.9, 20.0)
        with pytest.raises(LegError) as failure:
            await read(upstream, Call(target, once=True, expiry=SOON))
        assert (failure.value.phase, failure.value.cause) == (Phase.SENT, Cause.STALE_HANDOFF)


async def test_a_worker_that_answers_probes_has_the_handoff_and_may_take_its_time(upstream: Upstream) -> None:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        await asyncio.sleep(0.2)
        writer.write(WHOLE)

    async with server(script) as target:
        upstream.uptime = Readings(19.9, 20.0)
        asking = asyncio.create_task(read(upstream, call := Call(target, once=True, expiry=SOON)))
        await until(lambda: upstream.unheard(UNHEARD_S) == [target.id])  # before it is too late
        assert call.phase is Phase.SENT
        upstream.heard(target.id, call.sent_s)
        assert await asking == b"hi"


async def test_a_handoff_is_dropped_that_does_not_fit_into_its_workers_socket(upstream: Upstream) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # the kernel takes what it can, and nobody reads it
        target = worker(listening.getsockname()[1])
        upstream.uptime = Readings(19.9, 20.0)
        call, body = Call(target, once=True, expiry=SOON), bytes(32 * 1024 * 1024)
        asking = asyncio.create_task(upstream.ask(call, "/", body=body, timeouts=PATIENT))
        await until(lambda: call.phase is Phase.SENT)
        upstream.heard(target.id, call.sent_s)  # a probe says nothing of bytes that are still here
        with pytest.raises(LegError) as failure:
            await asking
        assert failure.value.cause is Cause.STALE_HANDOFF
