"""A turn is learnt before the next one is read: it may come at once, and where there are more processes, to any."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from ppd.proxy.app.client_routes import create_app
from ppd.proxy.assembly import Proxy, assemble
from ppd.proxy.config import ProxyConfig
from ppd.proxy.downstream.asgi_edge import Edge
from ppd.proxy.downstream.http1_connection import ClientConnection
from ppd.proxy.downstream.http1_server import Http1Server
from ppd.proxy.downstream.limits import ConnectionLimits, Patience
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.settings import Settings
from ppd.proxy.telemetry.access_log import AccessLog
from tests.proxy.telemetry.test_access_log import Kept

PATH = "/v1/chat/completions"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
LAST = b"[DONE]"  # of a stream; of a whole answer its last member is as good
ABORTED = b"aborted"  # in place of what else a client is sent
PAUSE_S = 0.02  # so that a worker's pieces come one by one
Told = list[tuple[bytes, int]]
"""What a client was sent, and how many sessions were known by then."""


def event(**members: object) -> bytes:
    return b"data: " + msgspec.json.encode({"id": "c", "object": "chat.completion.chunk", **members}) + b"\n\n"


STREAM = (
    event(choices=[{"index": 0, "delta": {"role": "assistant", "content": "a"}}]),
    event(choices=[{"index": 0, "delta": {"content": "b"}, "finish_reason": "stop"}]),
    event(choices=[], usage=USAGE),
    b"data: " + LAST + b"\n\n",
)
WHOLE = msgspec.json.encode(
    {
        "id": "c",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"}],
        "usage": USAGE,
        "end": LAST.decode(),
    }
)
STREAMED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWERS = {
    "whole": (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(WHOLE), WHOLE),
    "streamed": (STREAMED, *(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in STREAM), b"0\r\n\r\n"),
    "streamed at once": (STREAMED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(b"".join(STREAM)), b"".join(STREAM)),),
    "ended by its connection": (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n",
        *STREAM[:3],
        STREAM[3][:-1],
    ),
}


class Transport:
    """A client's socket."""

    def __init__(self, told: Callable[[bytes], None]) -> None:
        self.write = told

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.write(ABORTED)

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def write_eof(self) -> None: ...


class Host:
    def opened(self, transport: asyncio.Transport, address: str) -> ConnectionLimits:
        return ConnectionLimits(transport, Patience(60.0, 60.0), lambda: 0.0)

    def closed(self, limits: ConnectionLimits) -> None: ...

    def speak_http2(self, limits: ConnectionLimits, data: bytes) -> None: ...


def request(*bodies: bytes) -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return b"".join(head % (PATH.encode(), len(body)) + body for body in bodies if body)


class Clients:
    """Connections to one server."""

    def __init__(self, proxy: Proxy, log: AccessLog | None = None) -> None:
        config = proxy.settings.config
        self.edge = Edge(cast(Any, create_app(proxy)), config, proxy.drain, proxy.body_memory, access=log)
        self._server = Http1Server(self.edge, proxy.turns, config)

    def connected(self, told: Callable[[bytes], None]) -> ClientConnection:
        client = ClientConnection(self._server, Host(), "a")
        client.connection_made(cast(Any, Transport(told)))
        return client


async def direct(proxy: Proxy, body: bytes, told: Callable[[bytes], None], *, then: bytes = b"") -> None:
    """then: the body of a second turn, which comes in one piece with the first."""
    Clients(proxy).connected(told).data_received(request(body, then))


async def asgi(proxy: Proxy, body: bytes, told: Callable[[bytes], None]) -> None:
    requests, is_over = [{"type": "http.request", "body": body, "more_body": False}], asyncio.Event()

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await is_over.wait()
        return {"type": "http.disconnect"}

    async def send(sent: dict[str, Any]) -> None:
        told(sent.get("body", b""))
        if sent["type"] == "http.response.body" and not sent.get("more_body", False):
            is_over.set()

    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "asgi": {}}
    scope |= {"path": PATH, "raw_path": PATH.encode(), "query_string": b"", "root_path": ""}
    scope |= {"headers": [(b"content-type", b"application/json")]}
    scope |= {"client": None, "server": None, "state": {}, "extensions": {}}
    await create_app(proxy)(cast(Any, scope), cast(Any, receive), cast(Any, send))


@asynccontextmanager
async def fleet(pieces: Sequence[bytes]) -> AsyncIterator[Proxy]:
    """A proxy and its one worker, which answers in these pieces."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(PAUSE_S)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    proxy = assemble(Settings(ProxyConfig(heartbeat_port=0)))
    worker = Worker(role=Role.REPLICA, address=f"127.0.0.1:{server.sockets[0].getsockname()[1]}", models=("m",))
    proxy.state.registry.add_static(worker, 0.0)
    proxy.state.registry.probed(worker.id, worker, None, 0.0)
    try:
        yield proxy
    finally:
        server.close()
        await asyncio.sleep(2 * PAUSE_S)  # for the answer's own end
        await proxy.upstream.close()
        await asyncio.sleep(0)
        proxy.listener.close()


class Others:
    """The sessions' other processes, and how many sessions they were told of."""

    def __init__(self) -> None:
        self.changes = self.known = 0

    def catch_up(self) -> None: ...

    def changed(self, *_: object) -> None:
        self.changes += 1

    def tell(self) -> None:
        self.known = self.changes

    async def told(self) -> None:
        await asyncio.sleep(0)
        self.tell()


@pytest.mark.slow
@pytest.mark.parametrize("has_others", [False, True])
@pytest.mark.parametrize("plane", [direct, asgi])
@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_turn_is_learnt_before_its_client_can_send_the_next_one(
    plane: Callable[[Proxy, bytes, Callable[[bytes], None]], Awaitable[None]], answer: str, has_others: bool
) -> None:
    told, others = Told(), Others()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": answer != "whole"}
    async with fleet(ANSWERS[answer]) as proxy, asyncio.timeout(60):
        sessions = proxy.state.sessions
        sessions.replicated = others if has_others else None

        def known() -> int:
            return others.known if has_others else len(sessions)

        await plane(proxy, msgspec.json.encode(body), lambda data: told.append((data, known())))
        while not any(LAST in data for data, _ in told):
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # a round of the loop, in which nothing was read
        assert known() == 1
    is_first = plane is direct and not has_others  # written before it teaches anything
    assert [known for data, known in told if LAST in data] == [0 if is_first else 1]
    assert answer in ("whole", "streamed at once") or told[0][1] == 0, "the beginning does not wait"


@pytest.mark.slow
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("meanwhile", ["nothing", "its client leaves", "the proxy ends", "its client asks elsewhere"])
async def test_an_answer_that_is_written_counts_whatever_comes_before_its_turn_has_ended(
    meanwhile: str, answer: str
) -> None:
    kept, told, loop = Kept(), [], asyncio.get_running_loop()
    said = [{"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "ab"), ("user", "on"))]
    is_stream = answer != "whole"
    first, second = (
        msgspec.json.encode({"model": "m", "messages": said[:count], "stream": is_stream}) for count in (1, 3)
    )
    async with fleet(ANSWERS[answer]) as proxy, asyncio.timeout(60):
        clients = Clients(proxy, AccessLog(as_json=True, lines=kept))

        def happens() -> None:
            match meanwhile:
                case "its client leaves":
                    client.connection_lost(None)
                case "the proxy ends":
                    for exchange in tuple(clients.edge.requests._open):
                        exchange.cut()
                case "its client asks elsewhere":
                    clients.connected(lambda _: None).data_received(request(second))

        def took(data: bytes) -> None:
            told.append(data)
            if LAST in data:
                loop.call_soon(happens)

        client = clients.connected(took)
        client.data_received(request(first))
        expected = 2 if meanwhile == "its client asks elsewhere" else 1
        while len(kept.lines) < expected:
            await asyncio.sleep(0)
        receipts = list(proxy.state.receipts.newest(2))
        assert sum(view.inflight for view in proxy.state.registry.views()) == 0
    assert [(one.turn, one.kind, one.outcome) for one in receipts[::-1]] == [
        (1, "first", "completed"),
        (2, "next", "completed"),
    ][:expected]
    assert [json.loads(line)["outcome"] for line in kept.lines] == ["completed"] * expected
    assert [b"".join(told).count(each) for each in (b"HTTP/1.1 ", b"error", ABORTED)] == [1, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_turn_that_was_sent_ahead_of_the_answer_goes_on_from_it(answer: str) -> None:
    told = Told()
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "on"},
    ]
    is_stream = answer != "whole"
    bodies = [msgspec.json.encode({"model": "m", "messages": said[:count], "stream": is_stream}) for count in (1, 3)]
    async with fleet(ANSWERS[answer]) as proxy, asyncio.timeout(60):
        await direct(proxy, bodies[0], lambda data: told.append((data, 0)), then=bodies[1])
        while sum(LAST in data for data, _ in told) < 2:
            await asyncio.sleep(0)
        receipts = list(proxy.state.receipts.newest(2))
    assert [(one.turn, one.kind, one.outcome) for one in receipts] == [
        (2, "next", "completed"),
        (1, "first", "completed"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_turn_that_cannot_be_ended_loses_neither_its_answer_nor_its_connection(
    answer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told, messages = Told(), [{"role": "user", "content": "hi"}]
    body = msgspec.json.encode({"model": "m", "messages": messages, "stream": answer != "whole"})
    async with fleet(ANSWERS[answer]) as proxy, asyncio.timeout(60):
        monkeypatch.setattr(proxy.learner, "completed", lambda *_: 1 / 0)
        await direct(proxy, body, lambda data: told.append((data, 0)), then=body)
        while sum(LAST in data for data, _ in told) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sum(view.inflight for view in proxy.state.registry.views()) == 0
    assert [data[:12] for data, _ in told if data.startswith(b"HTTP/")] == [b"HTTP/1.1 200"] * 2
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError] * 2
