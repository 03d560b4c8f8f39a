"""Requests to workers, against small real servers: phases, time-outs, broken connections, and hanging up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import cast

import pytest

from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Phase
from ppd.proxy.upstream.call import ANSWER_LIMIT_BYTES, GONE, Answer, Call, Timeouts
from ppd.proxy.upstream.client import Upstream
from ppd.proxy.upstream.connection import WorkerConnection
from ppd.proxy.upstream.pool import connecting
from tests.support.clock import LeapingTime, scenario
from tests.support.scripted_workers import HEAD, PATIENT, WHOLE, Wire, close, deaf, read, says, server, worker
from tests.support.serve_program import until

HASTY = Timeouts(connect_s=0.1, first_s=0.1, idle_s=0.1)


async def test_a_whole_answer(upstream: Upstream) -> None:
    async with server(says(WHOLE)) as target:
        call = Call(target)
        assert await read(upstream, call) == b"hi"
        assert call.phase is Phase.HEADERS


async def test_any_zeros_may_be_before_the_size_of_an_answer(upstream: Upstream) -> None:
    async with server(says(b"HTTP/1.1 200 OK\r\nContent-Length: %b2\r\n\r\n" % (b"0" * 5000), b"hi")) as target:
        assert await read(upstream, Call(target)) == b"hi"


CHUNK = b"2\r\nhi\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (ANSWER_LIMIT_BYTES + 1)
FAILURES = {
    "not HTTP": (says(b"SSH-2.0\r\n\r\n", then=close), Phase.SENT, Cause.MALFORMED),
    "closed before its head": (says(then=close), Phase.SENT, Cause.RESET),
    "closed within its head": (says(b"HTTP/1.1 200", then=close), Phase.SENT, Cause.RESET),
    "silent": (says(), Phase.SENT, Cause.TIMEOUT),
    "silent after its head": (says(HEAD), Phase.HEADERS, Cause.TIMEOUT),
    "silent within its body": (says(HEAD, CHUNK), Phase.HEADERS, Cause.TIMEOUT),
    "closed within its body": (says(HEAD, CHUNK, then=close), Phase.HEADERS, Cause.RESET),
    "broken framing": (says(HEAD, CHUNK, b"zz\r\n"), Phase.HEADERS, Cause.MALFORMED),
    "endless": (says(ENDLESS), Phase.HEADERS, Cause.MALFORMED),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_what_goes_wrong_is_told_with_its_phase(upstream: Upstream, name: str) -> None:
    script, phase, cause = FAILURES[name]
    async with server(script) as target:
        with pytest.raises(LegError) as failure:
            await read(upstream, Call(target), HASTY if cause is Cause.TIMEOUT else PATIENT)
    assert (failure.value.phase, failure.value.cause, failure.value.worker) == (phase, cause, target.id)
    assert target.address not in failure.value.message


async def test_a_closed_port_refuses(upstream: Upstream) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        target = worker(nobody.getsockname()[1])
        with pytest.raises(LegError) as failure:
            await read(upstream, Call(target))
    assert (failure.value.phase, failure.value.cause) == (Phase.CONNECT, Cause.REFUSED)
    assert not upstream.waits_for(target.id)


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_worker_is_waited_for_until_its_answer_has_gone_on(upstream: Upstream, is_read: bool) -> None:
    async with server(says(HEAD, CHUNK, b"0\r\n\r\n" if is_read else b"")) as target:
        async with upstream.answer(Call(target), "/", timeouts=PATIENT) as answer:
            assert upstream.waits_for(target.id)
            if is_read:
                await answer.body()
        assert not upstream.waits_for(target.id)
        assert upstream._pool(target).take() is None or is_read, "what was not read to its end is not kept"
        await until(lambda: is_read or not upstream._pool(target).is_used)


async def test_a_worker_that_was_gone_is_looked_at_anew(upstream: Upstream) -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(server(says(WHOLE)))
        broken = LegError("", worker=target.id, phase=Phase.SENT, cause=Cause.RESET)
        assert (await upstream.examine(broken, target)).cause is Cause.RESET
        await stack.aclose()
        assert (await upstream.examine(broken, target)).cause is Cause.WORKER_GONE


async def test_connecting_has_a_limit_of_its_own(upstream: Upstream) -> None:
    async with deaf() as target:
        with pytest.raises(LegError) as failure:
            await read(upstream, Call(target), Timeouts(connect_s=0.1, first_s=20.0, idle_s=20.0))
    assert (failure.value.phase, failure.value.cause) == (Phase.CONNECT, Cause.TIMEOUT)


@scenario
async def test_the_time_of_an_answer_begins_anew_when_this_process_has_stood_still() -> None:
    call = Call(worker(1))
    answer = Answer(cast(WorkerConnection, Wire()), Timeouts(5.0, 20.0, 5.0), call, lambda _: None)
    asking = asyncio.create_task(answer.begun())
    await asyncio.sleep(1.0)
    LeapingTime.of(asyncio.get_running_loop()).leap(40.0)
    await asyncio.sleep(15.0)
    answer.head(200, {})
    await asking
    rest = asyncio.create_task(answer.chunk())
    with pytest.raises(LegError) as failure:
        await rest
    assert failure.value.cause is Cause.TIMEOUT, "it counts again"
    answer.close()


@scenario
async def test_so_does_that_of_a_whole_answer_of_which_a_part_has_come_meanwhile() -> None:
    loop = asyncio.get_running_loop()
    call = Call(worker(1))
    call.sent_s = loop.time()
    answer = Answer(cast(WorkerConnection, Wire()), Timeouts(5.0, 20.0, 5.0), call, lambda _: None)
    answer.head(200, {})
    reading = asyncio.create_task(answer.body())
    await asyncio.sleep(1.0)
    LeapingTime.of(loop).leap(40.0)
    answer.body_came(b"{", is_last=False)
    await asyncio.sleep(4.0)
    assert not reading.done()
    with pytest.raises(LegError) as failure:
        await reading
    assert failure.value.cause is Cause.TIMEOUT, "it counts again"
    answer.close()


async def test_a_worker_found_dead_as_its_answer_begins_has_broken_the_stream() -> None:
    call = Call(worker(1))
    answer = Answer(cast(WorkerConnection, Wire()), Timeouts(5.0, 20.0, 5.0), call, lambda _: None)
    answer.head(200, {})
    answer.body_came(b"hi", is_last=False)
    assert call.on_failure is not None
    call.on_failure(GONE)
    assert await answer.chunk() == b"hi"
    answer.reached_the_client()
    with pytest.raises(LegError) as failure:
        await answer.chunk()
    assert (failure.value.phase, failure.value.cause) == (Phase.STREAM, Cause.RESET)
    answer.close()


async def test_after_its_first_byte_an_answer_is_read_with_the_idle_limit(upstream: Upstream) -> None:
    async with server(says(HEAD, CHUNK)) as target:
        call = Call(target)
        answer = await upstream.ask(call, "/", timeouts=Timeouts(20.0, 20.0, idle_s=0.1))
        assert await answer.chunk() == b"hi"
        answer.reached_the_client()
        with pytest.raises(LegError) as failure:
            await answer.chunk()
        answer.close()
    assert (failure.value.phase, failure.value.cause) == (Phase.STREAM, Cause.TIMEOUT)


async def test_the_end_of_an_answer_that_is_over_is_not_awaited_for_long(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppd.proxy.upstream.call.END_S", 0.01)
    async with server(says(HEAD, CHUNK)) as target:
        answer = await upstream.ask(Call(target), "/", timeouts=PATIENT)
        await answer.chunk()
        async with asyncio.timeout(60):
            with pytest.raises(LegError):
                await answer.chunk(is_over=True)
        answer.close()


async def test_an_answer_that_keeps_talking_can_have_a_limit_as_a_whole(upstream: Upstream) -> None:
    async with server(says(HEAD, CHUNK)) as target:
        answer = await upstream.ask(Call(target), "/", timeouts=PATIENT)
        now = asyncio.get_running_loop().time
        assert await answer.chunk(by_s=now() + 60) == b"hi"
        async with asyncio.timeout(60):
            with pytest.raises(LegError) as failure:
                await answer.chunk(by_s=now() + 0.05)
        answer.close()
    assert failure.value.cause is Cause.TIMEOUT


async def test_a_whole_answer_that_comes_in_drops_has_one_time_limit(upstream: Upstream) -> None:
    async def trickles(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write(HEAD)
        while not writer.is_closing():
            writer.write(CHUNK)
            await writer.drain()
            await asyncio.sleep(0.005)

    async with server(trickles) as target, asyncio.timeout(60):
        with pytest.raises(LegError) as failure:
            await read(upstream, Call(target), Timeouts(connect_s=20.0, first_s=0.1, idle_s=20.0))
    assert (failure.value.phase, failure.value.cause) == (Phase.HEADERS, Cause.TIMEOUT)


# -- hanging up


async def at_connect(upstream: Upstream, call: Call, _: asyncio.Event) -> None:
    await upstream.ask(call, "/", timeouts=PATIENT)


async def at_head(upstream: Upstream, call: Call, _: asyncio.Event) -> None:
    await upstream.ask(call, "/", timeouts=PATIENT)


async def opened(upstream: Upstream, call: Call) -> Answer:
    return await upstream.ask(call, "/", timeouts=PATIENT)


async def at_body(upstream: Upstream, call: Call, _: asyncio.Event) -> None:
    answer = await opened(upstream, call)
    try:
        await answer.body()
    finally:
        answer.close()


async def at_stream(upstream: Upstream, call: Call, _: asyncio.Event) -> bytes:
    answer, read = await opened(upstream, call), b""
    answer.reached_the_client()
    try:
        while chunk := await answer.chunk():
            read += chunk
        return read
    finally:
        answer.close()


async def between_two_reads(upstream: Upstream, call: Call, hung_up: asyncio.Event) -> bytes:
    answer = await opened(upstream, call)
    answer.reached_the_client()
    read = await answer.chunk()
    await hung_up.wait()
    try:
        return read + await answer.chunk()
    finally:
        answer.close()


@pytest.mark.parametrize(
    ("waits", "phase"),
    [
        (at_connect, Phase.CONNECT),
        (at_head, Phase.SENT),
        (at_body, Phase.HEADERS),
    ],
)
async def test_hanging_up_ends_every_wait_for_an_answer(
    upstream: Upstream, waits: Callable[[Upstream, Call, asyncio.Event], Awaitable[None]], phase: Phase
) -> None:
    async with AsyncExitStack() as stack:
        script = says() if phase is Phase.SENT else says(HEAD, CHUNK)
        target = await stack.enter_async_context(deaf() if phase is Phase.CONNECT else server(script))
        other = await stack.enter_async_context(server(says()))
        hung_up, call = asyncio.Event(), Call(target)
        waiting = asyncio.ensure_future(waits(upstream, call, hung_up))
        bystander = asyncio.ensure_future(read(upstream, Call(other)))
        await until(lambda: call.phase is phase)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        upstream.hang_up(target.id)
        hung_up.set()
        async with asyncio.timeout(60):
            with pytest.raises(LegError) as failure:
                await waiting
        assert (failure.value.phase, failure.value.cause) == (phase, Cause.WORKER_GONE)
        assert not bystander.done(), "other workers' legs go on"
        bystander.cancel()
        await asyncio.wait({bystander})


@pytest.mark.parametrize("reads", [at_stream, between_two_reads])
async def test_hanging_up_ends_no_stream_that_runs(
    upstream: Upstream, reads: Callable[[Upstream, Call, asyncio.Event], Awaitable[bytes]]
) -> None:
    is_hung_up = asyncio.Event()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write(HEAD + CHUNK)
        await is_hung_up.wait()
        writer.write(CHUNK + b"0\r\n\r\n")

    async with server(script) as target:
        reading = asyncio.ensure_future(reads(upstream, call := Call(target), is_hung_up))
        await until(lambda: call.phase is Phase.STREAM)
        upstream.hang_up(target.id)
        is_hung_up.set()
        async with asyncio.timeout(60):
            assert await reading == b"hihi", "both chunks"


async def test_only_what_may_arrive_late_is_ended_on_a_worker_that_lives(upstream: Upstream) -> None:
    async with server(says()) as target:
        plain, handoff = Call(target), Call(target, once=True)
        waiting = [asyncio.ensure_future(read(upstream, call)) for call in (plain, handoff)]
        await until(lambda: plain.phase is handoff.phase is Phase.SENT)
        upstream.hang_up(target.id, only_handoffs=True)
        async with asyncio.timeout(60):
            with pytest.raises(LegError):
                await waiting[1]
        assert not waiting[0].done()
        waiting[0].cancel()


@pytest.mark.parametrize(("status", "is_life"), [(200, True), (429, True), (500, False), (503, False)])
async def test_an_answer_is_a_sign_of_life_unless_it_is_a_servers_error(
    upstream: Upstream, status: int, is_life: bool
) -> None:
    async with server(says(WHOLE.replace(b"200", b"%d" % status))) as target:
        assert (upstream.count_answers(), upstream.answers(target.id)) == ([], 0)
        for number in (1, 2):
            await read(upstream, Call(target))
            assert upstream.count_answers() == [target.id] * is_life
            assert upstream.count_answers() == []
            assert upstream.answers(target.id) == number * is_life


async def test_a_machine_that_vanishes_is_noticed_by_the_kernel(upstream: Upstream) -> None:
    """Nothing is sent on a stream that runs: without keepalive its connection would stand for ever."""
    async with server(says(HEAD)) as target:
        answer = await upstream.ask(Call(target), "/", timeouts=PATIENT)
        assert answer._connection is not None and answer._connection._transport is not None
        made = answer._connection._transport.get_extra_info("socket")
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            idle_s, every_s, probes = (made.getsockopt(socket.IPPROTO_TCP, option) for option in options)
            assert idle_s + every_s * probes <= 30
        answer.close()


async def test_hanging_up_at_the_very_moment_of_a_time_out_is_no_error() -> None:
    call, failures = Call(worker(1)), list[object]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    with pytest.raises(LegError) as failure:
        async with connecting(call, 0.0):
            loop.call_soon(call.give_up)  # behind the timer that has run out
            await asyncio.sleep(10)
    assert (failure.value.cause, failures) == (Cause.WORKER_GONE, [])


async def test_a_worker_that_is_back_is_asked_as_before(upstream: Upstream) -> None:
    async with server(says(WHOLE)) as target:
        upstream.hang_up(target.id)
        assert await read(upstream, Call(target)) == b"hi"


async def test_an_answer_that_nobody_takes_is_not_read_on(upstream: Upstream) -> None:
    size, writers = 16 * 1024 * 1024, list[asyncio.StreamWriter]()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writers.append(writer)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)

    async with server(script) as target:
        answer = await upstream.ask(Call(target), "/", timeouts=PATIENT)
        await asyncio.sleep(0.1)
        assert writers[0].transport.get_write_buffer_size() > size / 2
        assert len(await answer.body(size)) == size


@pytest.mark.parametrize(
    ("given", "seconds"), [(b"7", 7.0), (b"0", 0.0), (b"Wed, 21 Oct 2015 07:28:00 GMT", 0.0), (b"-1", 0.0), (b"", 0.0)]
)
async def test_retry_after_is_in_seconds(upstream: Upstream, given: bytes, seconds: float) -> None:
    head = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nRetry-After: %s\r\n\r\n" % given
    async with (
        server(says(head)) as target,
        upstream.answer(Call(target), "/", body=b"{}", timeouts=PATIENT) as answer,
    ):
        assert (answer.status, answer.retry_after_s) == (503, seconds)
