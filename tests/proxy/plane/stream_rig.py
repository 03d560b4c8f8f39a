"""A worker, the proxy between, and a client, on sockets, with a `TextLane` and without."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from ppd.proxy.downstream import response
from ppd.proxy.downstream.stream_splice import SilenceWatch, Splice
from ppd.proxy.errors import LegError
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.openai.answer import AnswerObserver
from ppd.proxy.openai.edits import Edits
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.openai.stream_relay import StreamRelay
from ppd.proxy.plane import Poller
from ppd.proxy.routing.stream import Streaming
from ppd.proxy.upstream.call import Answer, Call, Timeouts
from ppd.proxy.upstream.connection import WorkerConnection

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PATIENT = Timeouts(connect_s=60.0, first_s=60.0, idle_s=60.0)
DONE, END = b"data: [DONE]\n\n", b"0\r\n\r\n"
ROUNDS = 4  # of the event loop, until what was sent over loopback has gone through


def event(text: str, **rest: object) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    whole = {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **rest}
    return b"data: " + json.dumps(whole, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n\n"


def chunks(*events: bytes) -> bytes:
    return b"".join(map(response.chunk, events))


class Owner:
    """Counts what a pool is told."""

    has_answered = False
    frees = losses = 0

    def made(self) -> None: ...

    def free(self, connection: WorkerConnection) -> None:
        self.frees += 1

    def lost(self, connection: WorkerConnection) -> None:
        self.losses += 1


class Text:
    """The sink of an answer."""

    def __init__(self) -> None:
        self.said = ""

    def add_text(self, text: str) -> None:
        self.said += text

    def add_tool_call(self, index: int, id: str | None, name: str | None, arguments: str) -> None: ...

    def add_reasoning(self) -> None: ...


class Stream:
    """A `Streaming` of which only what is relayed and observed counts."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.sink = Text()
        self.observer = AnswerObserver(Endpoint.CHAT, self.sink)
        self.relay = StreamRelay(Endpoint.CHAT, Edits(False, None), self.observer)
        self.long_ways = 0
        self.is_abandoned = False

    @property
    def is_over(self) -> bool:
        return self.observer.summary.ended

    @property
    def plain(self) -> tuple[bytes, bytes] | None:
        return self.relay.plain

    def passed(self, text: str, events: int) -> None:
        self.relay.passed(text, events)

    def begin(self) -> bytes:
        return b": it begins\n\n"

    def written(self) -> None: ...

    def feed(self, data: bytes) -> bytes:
        self.long_ways += 1
        return self.relay.feed(data)

    def end(self) -> bytes:
        return self.relay.finish()

    def fail(self, error: LegError) -> bytes:
        return self.relay.finish()

    def abandon(self) -> None:
        self.is_abandoned = True
        self.answer.close()


class Client(asyncio.Protocol):
    """The client's side, on a socket: `takes_chunks` opens the lane."""

    splice: Splice
    transport: asyncio.Transport

    def __init__(self, *, takes_chunks: bool) -> None:
        self._takes_chunks = takes_chunks
        self.is_ended = False
        self.pauses = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    @property
    def chunked(self) -> asyncio.Transport | None:
        return self.transport if self._takes_chunks else None

    def pause_writing(self) -> None:
        self.pauses += 1
        self.splice.pause()

    def resume_writing(self) -> None:
        self.splice.resume()

    def send(self, data: bytes, *, is_last: bool = False) -> None:
        out = response.chunk(data) if data else b""
        self.transport.write(out + response.END if is_last else out)

    def finish(self) -> None:
        self.is_ended = True

    def fail(self) -> None:
        raise AssertionError("a stream failed")


@dataclass
class Played:
    body: bytes  # what the client got of the answer, out of its chunks
    said: str
    events: int
    finish_reason: str | None
    is_ended: bool
    long_ways: int  # pieces that the lane did not take
    frees: int


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    far.setblocking(False)
    return near, far


def dechunked(data: bytes) -> bytes:
    body = b""
    while data:
        line, _, data = data.partition(b"\r\n")
        size = int(line, 16)
        assert data[size : size + 2] == b"\r\n"
        body, data = body + data[:size], data[size + 2 :]
        if not size:
            assert not data
    return body


async def settle() -> None:
    for _ in range(ROUNDS):
        await asyncio.sleep(0)


class Rig:
    """A worker, the proxy between, and a client."""

    def __init__(self, *, lane: bool) -> None:
        self.poller = Poller()
        near, self.worker = pair()
        to_client, self.client_end = pair()
        self.owner = Owner()
        self.connection = WorkerConnection(self.owner, asyncio.get_running_loop())
        self.poller.adopt(near, self.connection)
        self.client = Client(takes_chunks=lane)
        self.poller.adopt(to_client, self.client)
        call = Call(Worker(role=Role.DECODE, address="127.0.0.1:1"))
        self.answer = Answer(self.connection, PATIENT, call, lambda _: None)
        self.connection.send(self.answer, b"POST / HTTP/1.1\r\n\r\n", ())
        self.stream = Stream(self.answer)
        self.splice = Splice(cast(Streaming, self.stream), self.client, asyncio.get_running_loop(), SilenceWatch(60.0))
        self.client.splice = self.splice
        self.got = b""

    async def begin(self) -> None:
        await self.says(HEAD)
        assert self.answer.status == 200
        self.splice.start()

    async def says(self, *pieces: bytes) -> None:
        for piece in pieces:
            sent = 0
            while sent < len(piece):
                try:
                    sent += self.worker.send(piece[sent:])
                except BlockingIOError:
                    self.read()
                await settle()

    def read(self) -> None:
        try:
            while data := self.client_end.recv(1 << 20):
                self.got += data
        except BlockingIOError:
            pass

    async def end(self) -> None:
        self.splice.abandon()
        self.worker.close()
        self.client_end.close()
        self.poller.close()
        await settle()


async def played(pieces: Iterable[bytes], *, lane: bool) -> Played:
    rig = Rig(lane=lane)
    await rig.begin()
    await rig.says(*pieces)
    while not rig.client.is_ended and rig.client.transport.get_write_buffer_size():
        rig.read()
        await settle()
    rig.read()
    summary = rig.stream.observer.summary
    is_ended = rig.client.is_ended
    await rig.end()
    return Played(
        dechunked(rig.got),
        rig.stream.sink.said,
        summary.events,
        summary.finish_reason,
        is_ended,
        rig.stream.long_ways,
        rig.owner.frees,
    )


async def same(*pieces: bytes) -> Played:
    """What the lane makes of these reads, which is what is made without it."""
    with_lane, without = await played(pieces, lane=True), await played(pieces, lane=False)
    assert with_lane.body == without.body
    for name in ("said", "events", "finish_reason", "is_ended", "frees"):
        assert getattr(with_lane, name) == getattr(without, name), name
    return with_lane
