"""How much memory an open, silent stream takes, by what Python's allocator gave to the proxy's own code."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import ppd.proxy
from ppd.proxy import plane
from ppd.proxy.assembly import Proxy
from ppd.proxy.config import DataPlane
from tests.support.proxy import running_proxy

MOST_BYTES = {1: 5700, 2: 6120}  # of a first turn and of a later one; 5,620 and 6,050 on Python 3.11
STREAMS = 200
ORDERS = "You are a harbour master's assistant. Answer briefly, and say so when you do not know."
WHOLE = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "aye"}, "finish_reason": "stop"}]}
USAGE = {"prompt_tokens": 200, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n%b\r\n\r\n"


def event(**delta: str) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    whole = {"id": f"chatcmpl-{7:032x}", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    data = b"data: " + json.dumps(whole | {"choices": [choice]}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Begins the answer of each chat that is streamed, and then is silent."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
            if b'"stream"' in await reader.readexactly(size):
                writer.write(ANSWER % (b"text/event-stream", b"Transfer-Encoding: chunked"))
                writer.write(event(role="assistant", content="") + event(content="word"))
            else:
                body = json.dumps(WHOLE | {"usage": USAGE, "data": [{"id": "m"}]}).encode()
                writer.write(ANSWER % (b"application/json", b"Content-Length: %d" % len(body)) + body)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


@asynccontextmanager
async def streaming_proxy() -> AsyncIterator[tuple[Proxy, int]]:
    """A proxy before one such worker, and its port."""
    server = await asyncio.start_server(work, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    more: dict[str, Any] = {"max_inflight": 2 * STREAMS, "max_worker_inflight": 2 * STREAMS, "idle_timeout_s": 600.0}
    async with running_proxy(workers=(f"R={address}",), data_plane=DataPlane.NATIVE, **more) as (proxy, url, _):
        while not any(view.up for view in proxy.state.registry.views()):
            await asyncio.sleep(0.01)
        yield proxy, int(url.rpartition(":")[2])
    server.close()


async def asked(client: socket.socket, number: int, turn: int, **more: Any) -> None:
    """Sends one turn of a conversation, and waits for the beginning of its answer."""
    loop = asyncio.get_running_loop()
    said = [{"role": "system", "content": ORDERS}, {"role": "user", "content": f"hello {number} " + "and again " * 20}]
    if turn > 1:
        said += [{"role": "assistant", "content": "aye"}, {"role": "user", "content": "go on " * 20}]
    body = json.dumps({"model": "m", "messages": said} | more).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    await loop.sock_sendall(client, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    answer = b""
    while b'"content"' not in answer:
        answer += await loop.sock_recv(client, 65536)


async def open_streams(port: int, numbers: Iterable[int], turn: int) -> list[socket.socket]:
    opened = []
    for number in numbers:
        made = socket.socket()
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
        await asked(made, number, turn, stream=True)
        opened.append(made)
    return opened


def held_bytes() -> int:
    gc.collect()
    own = tracemalloc.Filter(True, str(Path(ppd.proxy.__file__).parent / "*"))
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([own]).traces)


@pytest.mark.skipif(not plane.IS_BUILT, reason="of the compiled plane")
@pytest.mark.parametrize("turn", list(MOST_BYTES))
async def test_an_idle_stream_takes_little_memory(turn: int) -> None:
    async with streaming_proxy() as (proxy, port):
        first, others = range(STREAMS // 4), range(STREAMS // 4, STREAMS // 4 + STREAMS)
        if turn > 1:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.setblocking(False)
                for number in (*first, *others):
                    await asked(client, number, 1)
        clients = await open_streams(port, first, turn)  # what is made once is there
        tracemalloc.start()
        try:
            before = held_bytes()
            clients += await open_streams(port, others, turn)
            taken = (held_bytes() - before) / STREAMS
        finally:
            tracemalloc.stop()
        assert sum(view.inflight for view in proxy.state.registry.views()) == len(clients), "all are open"
        newest = proxy.state.receipts.newest(len(clients))
        assert {(receipt.turn, receipt.waited_s) for receipt in newest} == {(turn, 0.0)}
        for client in clients:
            client.close()
    assert taken <= MOST_BYTES[turn], taken
