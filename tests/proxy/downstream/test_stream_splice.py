"""Streams handed on piece by piece, and workers' connections that misbehave: nothing of one answer reaches another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from ppd.proxy.downstream.stream_splice import SilenceWatch, Splice
from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Phase
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.routing.stream import Streaming
from ppd.proxy.upstream.call import Answer, Call, Timeouts
from ppd.proxy.upstream.client import Upstream
from ppd.proxy.upstream.connection import WorkerConnection
from ppd.proxy.upstream.pool import connecting
from tests.support.clock import LeapingTime, scenario
from tests.support.scripted_workers import Wire

PATIENT = Timeouts(connect_s=5.0, first_s=5.0, idle_s=5.0)
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


@dataclass
class Stream:
    """A `Streaming` that passes everything on."""

    answer: Answer
    is_over: bool = False
    breaks: bool = False
    is_abandoned: bool = False
    done: list[str] = field(default_factory=list)  # the client's part too, in their order
    cannot_note: bool = False

    def begin(self) -> bytes:
        return b"first "

    def written(self) -> None:
        self.done.append("noted")
        if self.cannot_note:
            raise RuntimeError("a defect")

    def feed(self, data: bytes) -> bytes:
        if self.breaks:
            raise RuntimeError("a defect")
        return data

    def end(self) -> bytes:
        return b"end"

    def fail(self, error: LegError) -> bytes:
        if self.breaks:
            raise RuntimeError("a defect")
        return str(error.cause).encode()

    def abandon(self) -> None:
        self.is_abandoned = True


@dataclass
class Client:
    """Takes `takes` pieces, then tells that it takes no more."""

    takes: int = 1000
    got: list[bytes] = field(default_factory=list)
    is_ended: bool = False
    has_failed: bool = False
    splice: Splice | None = None
    chunked: asyncio.Transport | None = None
    done: list[str] = field(default_factory=list)

    def send(self, data: bytes, *, is_last: bool = False) -> None:
        self.got.append(data)
        self.done.append("sent the last" if is_last else "sent")
        if len(self.got) == self.takes and self.splice is not None:
            self.splice.pause()

    def finish(self) -> None:
        self.is_ended = True
        self.done.append("finished")

    def fail(self) -> None:
        self.has_failed = True
        if self.splice is not None:
            self.splice.abandon()


def spliced(wire: Wire, *, takes: int = 1000, idle_s: float = 5.0) -> tuple[Answer, Stream, Client, Splice]:
    answer = Answer(cast(WorkerConnection, wire), PATIENT, Call(worker(1)), lambda _: None)
    answer.head(200, {})
    stream = Stream(answer)
    client = Client(takes, done=stream.done)
    client.splice = Splice(cast(Streaming, stream), client, asyncio.get_running_loop(), SilenceWatch(idle_s))
    return answer, stream, client, client.splice


def worker(port: int) -> Worker:
    return Worker(role=Role.DECODE, address=f"127.0.0.1:{port}")


async def test_what_came_before_and_after_the_start_goes_on_in_its_order() -> None:
    answer, _, client, splice = spliced(Wire())
    answer.body_came(b"a", is_last=False)
    splice.start()
    answer.body_came(b"b", is_last=False)
    answer.body_came(b"c", is_last=True)
    assert b"".join(client.got) == b"first abcend" and client.is_ended


@pytest.mark.parametrize("cannot_note", [False, True])
@pytest.mark.parametrize("breaks_off", [False, True])
async def test_what_is_noted_waits_until_the_client_has_its_bytes(breaks_off: bool, cannot_note: bool) -> None:
    """But comes before whatever the client asks next on its connection. A defect there costs the client nothing."""
    answer, stream, client, splice = spliced(Wire())
    splice.start()
    stream.cannot_note = cannot_note
    answer.body_came(b"a", is_last=False)
    if breaks_off:
        splice.fail(LegError("", worker="w", phase=Phase.STREAM, cause=Cause.RESET))
    else:
        answer.body_came(b"", is_last=True)
    assert stream.done == ["sent", "noted"] * 2 + ["sent the last", "noted", "finished"]
    assert not client.has_failed


@pytest.mark.parametrize(
    "waits",
    [b"", b"a"],
)
async def test_a_client_that_takes_no_more_than_the_beginning_keeps_its_worker_from_sending(waits: bytes) -> None:
    wire = Wire()
    answer, _, _, splice = spliced(wire, takes=1)
    if waits:
        answer.body_came(waits, is_last=False)
    splice.start()
    assert not wire.is_read
    splice.resume()
    assert wire.is_read


@scenario
async def test_a_pause_of_the_client_is_not_the_workers_silence() -> None:
    _, _, client, splice = spliced(Wire(), idle_s=0.2)
    now = asyncio.get_running_loop().time
    splice.start()
    splice.pause()
    await asyncio.sleep(0.3)
    assert not client.is_ended
    splice.resume()
    resumed_s = now()
    while not client.is_ended:
        await asyncio.sleep(0.005)
    assert client.got[-1] == str(Cause.TIMEOUT).encode()
    assert now() - resumed_s >= 0.19, "its time begins anew"


class Lane:
    """Passes what comes on past the splice."""

    heard_s = 0.0

    def taken(self) -> tuple[str, int]:
        return "", 0

    def disarm(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("has_lane", [False, True])
def test_a_worker_that_speaks_is_not_silent_however_long_its_answer_lasts(has_lane: bool) -> None:
    @scenario
    async def work() -> None:
        answer, _, client, splice = spliced(Wire(), idle_s=5.0)
        now, lane = asyncio.get_running_loop().time, Lane()
        splice.start()
        if has_lane:
            splice._lane = cast(Any, lane)
        for _ in range(10):
            await asyncio.sleep(4.0)
            assert not client.is_ended
            if has_lane:
                lane.heard_s = now()
            else:
                answer.body_came(b"a", is_last=False)
        heard_s = now()
        while not client.is_ended:
            await asyncio.sleep(0.1)
        assert 5.0 <= now() - heard_s <= 6.2, "up to a second longer"

    work()


@scenario
async def test_a_silent_worker_is_given_up_once() -> None:
    answer, _, client, splice = spliced(Wire(), idle_s=0.05)
    splice.start()
    await asyncio.sleep(0.2)
    answer.broken(is_malformed=False)
    assert client.got == [b"first ", str(Cause.TIMEOUT).encode()]


@scenario
async def test_while_this_process_stands_still_no_worker_is_silent() -> None:
    answer, _, client, splice = spliced(Wire(), idle_s=3.0)
    splice.start()
    await asyncio.sleep(1.0)
    LeapingTime.of(asyncio.get_running_loop()).leap(40.0)
    await asyncio.sleep(2.5)
    answer.body_came(b"a", is_last=False)
    assert client.got == [b"first ", b"a"]
    while not client.is_ended:
        await asyncio.sleep(0.1)
    assert client.got[-1] == str(Cause.TIMEOUT).encode(), "it counts again"


@pytest.mark.parametrize("how", ["feed", "fail"])
async def test_a_defect_ends_the_stream_and_frees_what_it_holds(how: str) -> None:
    answer, stream, client, splice = spliced(Wire())
    splice.start()
    stream.breaks = True
    if how == "feed":
        answer.body_came(b"a", is_last=False)
    else:
        answer.broken(is_malformed=False)
    assert client.has_failed and stream.is_abandoned


# -- a worker's connection


class Bad:
    """A worker on a socket that says to each request, by its number from 1, what it is told to."""

    def __init__(self, *says: bytes | None) -> None:
        self.says = says
        self.connections = 0
        self.requests = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
                if size < 100_000:
                    await reader.readexactly(size)
                said = self.says[min(self.requests, len(self.says) - 1)]
                self.requests += 1
                if said is None:
                    writer.close()
                    return
                writer.write(said)
                if size >= 100_000:
                    return  # never to be read
        except (asyncio.IncompleteReadError, ConnectionError):
            pass


@pytest.fixture
async def serve() -> AsyncIterator[Any]:
    servers: list[tuple[asyncio.Server, Bad]] = []

    async def start(*says: bytes | None) -> tuple[Bad, Worker]:
        bad = Bad(*says)
        server = await asyncio.start_server(bad.serve, "127.0.0.1", 0)
        servers.append((server, bad))
        return bad, worker(server.sockets[0].getsockname()[1])

    yield start
    for server, bad in servers:
        server.close()
        for writer in bad.writers:
            writer.transport.abort()


async def asked(upstream: Upstream, call: Call, body: bytes = b"{}", timeouts: Timeouts = PATIENT) -> tuple[Any, bytes]:
    async with upstream.answer(call, "/", body=body, timeouts=timeouts) as answer:
        return answer, await answer.body()


@pytest.mark.parametrize(
    "behind",
    [
        b"HTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\nbad",
        b"HTTP/1.1 500 No\r\nContent-Length: 3\r\n",
        b"HTTP/1.1 200 OK\r\nX: ",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
async def test_what_a_worker_sends_behind_its_answer_is_part_of_none(
    upstream: Upstream, serve: Any, behind: bytes
) -> None:
    bad, target = await serve(WHOLE + behind, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nother")
    try:
        answer, body = await asked(upstream, Call(target), timeouts=Timeouts(1.0, 0.5, 0.5))
    except LegError as exc:
        assert exc.cause is not Cause.TIMEOUT  # else that is an answer to such a worker too
    else:
        assert (answer.status, body) == (200, b"hi")
    answer, body = await asked(upstream, Call(target))
    assert (answer.status, body, bad.connections) == (200, b"other", 2)


async def test_an_answers_trailers_are_not_the_next_ones_headers(upstream: Upstream, serve: Any) -> None:
    trailers = b"Retry-After: 9\r\nContent-Type: x\r\n"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n" + trailers + b"\r\n"
    _, target = await serve(chunked, WHOLE)
    await asked(upstream, Call(target))
    answer, _ = await asked(upstream, Call(target))
    assert (answer.retry_after_s, answer.content_type) == (0.0, "application/json")


async def test_a_connection_on_which_a_request_is_not_wholly_sent_is_not_kept(upstream: Upstream, serve: Any) -> None:
    bad, target = await serve(b"HTTP/1.1 413 No\r\nContent-Length: 2\r\n\r\nno", WHOLE)
    answer, body = await asked(upstream, Call(target), b"x" * 20_000_000)
    assert (answer.status, body) == (413, b"no")
    await asked(upstream, Call(target), timeouts=Timeouts(1.0, 0.5, 0.5))
    assert bad.connections == 2


async def test_a_second_way_is_hung_up_on_too(upstream: Upstream, serve: Any) -> None:
    bad, target = await serve(WHOLE, None, b"")
    await asked(upstream, Call(target))
    call = Call(target)
    asking = asyncio.ensure_future(asked(upstream, call))
    async with asyncio.timeout(60):
        while bad.requests < 3:
            await asyncio.sleep(0.001)
    upstream.hang_up(target.id)
    done, _ = await asyncio.wait({asking}, timeout=0.5)
    asking.cancel()
    assert done and isinstance(asking.exception(), LegError)


async def test_a_worker_found_gone_in_the_moment_of_connecting_is_not_asked() -> None:
    call = Call(worker(1))
    with pytest.raises(LegError) as failure:
        async with connecting(call, 5.0):
            call.give_up()
    assert failure.value.cause is Cause.WORKER_GONE
