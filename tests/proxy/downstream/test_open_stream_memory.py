"""How much memory an open, silent stream takes, by what Python's allocator gave to the proxy's own code."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import ppd.proxy
from ppd.proxy import plane
from ppd.proxy.assembly import Proxy
from ppd.proxy.config import DataPlane
from tests.support.proxy import running_proxy

MOST_BYTES = 6500  # 6,306 on Python 3.11
STREAMS = 200
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n%b\r\n\r\n"


def event(**delta: str) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    whole = {"id": f"chatcmpl-{7:032x}", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    data = b"data: " + json.dumps(whole | {"choices": [choice]}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Begins each chat's answer, and then is silent."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            if head.startswith(b"POST"):
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
                writer.write(ANSWER % (b"text/event-stream", b"Transfer-Encoding: chunked"))
                writer.write(event(role="assistant", content="") + event(content="word"))
            else:
                body = b'{"data": [{"id": "m"}]}'
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


async def open_streams(port: int, count: int) -> list[socket.socket]:
    loop, opened = asyncio.get_running_loop(), []
    for number in range(count):
        made = socket.socket()
        made.setblocking(False)
        await loop.sock_connect(made, ("127.0.0.1", port))
        said = [{"role": "user", "content": f"hello {number} " + "and again " * 20}]
        body = json.dumps({"model": "m", "stream": True, "messages": said}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        await loop.sock_sendall(made, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = b""
        while b"word" not in answer:
            answer += await loop.sock_recv(made, 65536)
        opened.append(made)
    return opened


def held_bytes() -> int:
    gc.collect()
    own = tracemalloc.Filter(True, str(Path(ppd.proxy.__file__).parent / "*"))
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([own]).traces)


@pytest.mark.skipif(not plane.IS_BUILT, reason="of the compiled plane")
async def test_an_idle_stream_takes_little_memory() -> None:
    async with streaming_proxy() as (proxy, port):
        clients = await open_streams(port, STREAMS // 4)  # what is made once is there
        tracemalloc.start()
        try:
            before = held_bytes()
            clients += await open_streams(port, STREAMS)
            taken = (held_bytes() - before) / STREAMS
        finally:
            tracemalloc.stop()
        assert sum(view.inflight for view in proxy.state.registry.views()) == len(clients), "all are open"
        for client in clients:
            client.close()
    assert taken <= MOST_BYTES, taken
