"""A turn is learnt before its client has the end of the answer: the next turn may come at once, to any process."""

from __future__ import annotations

import asyncio
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

PATH = "/v1/chat/completions"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
LAST = b"[DONE]"  # of a stream; of a whole answer its last member is as good
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

    def abort(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def write_eof(self) -> None: ...


class Host:
    def opened(self, transport: asyncio.Transport, address: str) -> ConnectionLimits:
        return ConnectionLimits(transport, Patience(60.0, 60.0), lambda: 0.0)

    def closed(self, limits: ConnectionLimits) -> None: ...

    def speak_http2(self, limits: ConnectionLimits, data: bytes) -> None: ...


async def direct(proxy: Proxy, body: bytes, told: Callable[[bytes], None]) -> None:
    config = proxy.settings.config
    edge = Edge(cast(Any, create_app(proxy)), config, proxy.drain, proxy.body_memory)
    server = Http1Server(edge, proxy.turns, config)
    client = ClientConnection(server, Host(), "a")
    client.connection_made(cast(Any, Transport(told)))
    head = b"POST %b HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    client.data_received(head % (PATH.encode(), len(body)) + body)


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


@pytest.mark.slow
@pytest.mark.parametrize("plane", [direct, asgi])
@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_turn_is_learnt_before_the_end_of_its_answer_is_sent(
    plane: Callable[[Proxy, bytes, Callable[[bytes], None]], Awaitable[None]], answer: str
) -> None:
    told = Told()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": answer != "whole"}
    async with fleet(ANSWERS[answer]) as proxy, asyncio.timeout(60):
        await plane(proxy, msgspec.json.encode(body), lambda data: told.append((data, len(proxy.state.sessions))))
        while not any(LAST in data for data, _ in told):
            await asyncio.sleep(0.001)
    assert [known for data, known in told if LAST in data] == [1]
    assert answer in ("whole", "streamed at once") or told[0][1] == 0, "the beginning does not wait"
