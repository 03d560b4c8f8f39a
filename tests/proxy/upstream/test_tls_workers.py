"""Connections to workers that speak TLS: a layer of the event loop lies between the socket and the connection."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from pathlib import Path

import pytest

from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause
from ppd.proxy.fleet.worker import Worker
from ppd.proxy.runtime.tls import Tls
from ppd.proxy.upstream.call import HELD_BYTES, Answer, Call
from ppd.proxy.upstream.pool import Pool
from tests.support.client_connections import on_both_planes
from tests.support.credentials import Authority, trusting
from tests.support.scripted_workers import PATIENT, worker
from tests.support.serve_program import until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
FIRST = b"x" * 2 * HELD_BYTES
REST = b"y" * HELD_BYTES
TURNS = 100  # of the event loop, in which it would have read what lies there
SIZED = b"Content-Length: %d\r\n\r\n" % len(FIRST + REST)


class Engine:
    """Answers one request over TLS: with `first`, and once it may go on with `rest`. Then it closes its connection."""

    def __init__(self, authority: Authority, first: bytes, rest: bytes, *, says_goodbye: bool) -> None:
        own = authority.issue("engine")
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(own.cert, own.key)
        self._parts = first, rest
        self._says_goodbye = says_goodbye
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.worker: Worker = worker(self._listening.getsockname()[1])
        self.may_go_on = threading.Event()

    def serve(self) -> None:
        first, rest = self._parts
        with self._listening, self._listening.accept()[0] as accepted:
            accepted.settimeout(60)
            with self._context.wrap_socket(accepted, server_side=True) as connection:
                connection.recv(65536)
                connection.sendall(first)
                assert self.may_go_on.wait(60)
                connection.sendall(rest)
                if self._says_goodbye:
                    connection.settimeout(0)
                    with pytest.raises(ssl.SSLWantReadError):  # the proxy's own goodbye, for which it does not wait
                        connection.unwrap()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    folder: Path = tmp_path_factory.mktemp("authority")
    return Authority(folder)


async def answered_late(engine: Engine, authority: Authority) -> bytes:
    """The body, of which nothing is taken before the engine has closed its connection."""
    pool = Pool((engine.worker.address, True), keepalive_s=4.0, tls=Tls(lambda: trusting(authority)))
    serving = asyncio.create_task(asyncio.to_thread(engine.serve))
    call = Call(engine.worker)
    connection = await pool.connect(call, 20.0)
    call.sent(connection.loop.time())
    answer = Answer(connection, PATIENT, call, lambda _: None)
    connection.send(answer, b"GET / HTTP/1.1\r\n\r\n", ())
    await until(lambda: answer.is_paused)
    engine.may_go_on.set()
    await serving
    await _until_lost(pool)
    try:
        return await answer.body()
    finally:
        answer.close()


async def _until_lost(pool: Pool) -> None:
    """uvloop reads on and loses the connection; asyncio's own loop leaves the rest in the socket, and turns in vain."""
    for _ in range(TURNS):
        if not pool.is_used:
            return
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("says_goodbye", [True, False])
@on_both_planes
async def test_an_answer_that_is_not_read_on_is_whole_although_its_worker_closes(
    authority: Authority, says_goodbye: bool
) -> None:
    engine = Engine(authority, HEAD + SIZED + FIRST, REST, says_goodbye=says_goodbye)
    assert await answered_late(engine, authority) == FIRST + REST


@on_both_planes
async def test_an_answer_without_a_size_ends_with_its_workers_goodbye(authority: Authority) -> None:
    engine = Engine(authority, HEAD + b"\r\n" + FIRST, REST, says_goodbye=True)
    assert await answered_late(engine, authority) == FIRST + REST


@pytest.mark.parametrize("says_goodbye", [True, False])
@on_both_planes
async def test_an_answer_that_breaks_off_is_not_taken_for_whole(authority: Authority, says_goodbye: bool) -> None:
    engine = Engine(authority, HEAD + SIZED + FIRST, REST[1:], says_goodbye=says_goodbye)
    with pytest.raises(LegError) as failure:
        await answered_late(engine, authority)
    assert failure.value.cause is Cause.RESET


class Abandoned(Pool):
    """Whoever wants a connection leaves just as it is made."""

    connecting: asyncio.Task[object]

    def made(self) -> None:
        super().made()
        self.connecting.cancel()


@on_both_planes
async def test_a_connection_that_nobody_wants_any_more_once_it_is_made_is_closed(authority: Authority) -> None:
    failures = list[dict[str, object]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
    engine = Engine(authority, b"", b"", says_goodbye=False)
    engine.may_go_on.set()
    pool = Abandoned((engine.worker.address, True), keepalive_s=4.0, tls=Tls(lambda: trusting(authority)))
    serving = asyncio.create_task(asyncio.to_thread(engine.serve))
    pool.connecting = asyncio.create_task(pool.connect(Call(engine.worker), 20.0))
    await asyncio.wait((pool.connecting,))
    assert pool.connecting.cancelled()
    await asyncio.wait((serving,))
    await _until_lost(pool)
    assert (pool.is_used, failures) == (False, [])
