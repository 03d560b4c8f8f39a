"""Bytes that a worker sends although nobody asked: they are never the answer to the next request."""

from __future__ import annotations

import select
import socket

import pytest

from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Phase
from tests.proxy.upstream.hand_worker import HandWorker, head_of, on_each_plane, request_on
from tests.support.scripted_workers import WHOLE

BIG = bytes(300 * 1024)  # more than the worker's kernel takes, and less than the proxy's
STRAY = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nstray"
TOO_LARGE = b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n"
UNASKED = {
    "an answer": STRAY,
    "a stream": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nstray\r\n0\r\n\r\n",
    "the beginning of an answer": b"HTTP/1.1 200 OK\r\nContent-Le",
    "one byte": b"H",
    "an empty answer": b"HTTP/1.1 204 No Content\r\n\r\n",
    "its word that it goes on": b"HTTP/1.1 100 Continue\r\n\r\n",
    "a line end": b"\r\n",
    "no HTTP": b"\x00",
    "its patience": b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
}


async def answer_one(worker: HandWorker) -> socket.socket:
    asked = worker.ask()
    connection = await worker.accept()
    await request_on(connection)
    connection.sendall(WHOLE)
    assert await asked == (200, b"hi")
    return connection


@pytest.mark.parametrize("unasked", UNASKED)
@on_each_plane
async def test_what_lies_on_a_kept_connection_is_no_answer(worker: HandWorker, unasked: str) -> None:
    connection = await answer_one(worker)
    asked = worker.ask(just_before=lambda: connection.sendall(UNASKED[unasked]))
    fresh = await worker.accept()
    assert await request_on(fresh) == b"{}"
    fresh.sendall(WHOLE)
    assert await asked == (200, b"hi")


@on_each_plane
async def test_a_request_leaves_as_soon_as_that_was_looked_at(worker: HandWorker) -> None:
    """What comes later may be an answer to it. An event loop may keep what is written until the end of its round."""
    connection, left = await answer_one(worker), list[bool]()
    asked = worker.ask(just_after=lambda: left.append(select.select([connection], [], [], 0)[0] == [connection]))
    assert await request_on(connection) == b"{}"
    connection.sendall(WHOLE)
    assert await asked == (200, b"hi")
    assert left == [True]


@pytest.mark.parametrize("unasked", UNASKED)
@on_each_plane
async def test_nor_is_what_comes_while_the_request_is_written(worker: HandWorker, unasked: str) -> None:
    connection = await answer_one(worker)
    asked = worker.ask(BIG)
    await head_of(connection)
    connection.sendall(UNASKED[unasked])
    fresh = await worker.accept()
    assert await request_on(fresh) == BIG
    fresh.sendall(WHOLE)
    assert await asked == (200, b"hi")


@on_each_plane
async def test_a_request_that_must_arrive_once_is_not_sent_again(worker: HandWorker) -> None:
    connection = await answer_one(worker)
    asked = worker.ask(BIG, once=True)
    await head_of(connection)
    connection.sendall(STRAY)
    with pytest.raises(LegError) as failure:
        await asked
    assert (failure.value.phase, failure.value.cause) == (Phase.SENT, Cause.RESET)
    assert (worker.kept, worker.pool.is_used) == (0, False)


@on_each_plane
async def test_a_worker_that_answers_early_is_believed_on_a_new_connection(worker: HandWorker) -> None:
    """It refuses what is too large from the head alone, say."""
    connection = await answer_one(worker)
    asked = worker.ask(BIG)
    await head_of(connection)
    connection.sendall(TOO_LARGE)
    fresh = await worker.accept()
    await head_of(fresh)
    fresh.sendall(TOO_LARGE)
    assert await asked == (413, b"")
    assert worker.kept == 0


@on_each_plane
async def test_a_connection_whose_request_was_not_taken_is_not_kept(worker: HandWorker) -> None:
    asked = worker.ask(BIG)
    connection = await worker.accept()
    await head_of(connection)
    connection.sendall(WHOLE)
    assert await asked == (200, b"hi")
    assert worker.kept == 0
