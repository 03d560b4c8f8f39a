"""An engine that speaks HTTP as few do: answers of any framing, and bytes, ends and silences that nobody asked for.

What it does with a request is chosen by a seed, the turn's id and how often it was asked. What it says unasked it says
only while nothing of a next request has come, so that it cannot be an answer to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import random
import re
import select
import socket
import ssl
import struct
import termios
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise

LIMIT_BYTES = 256 * 1024  # of a head that the proxy reads
RECEIVED_BYTES = 16 * 1024  # of a request, in the engine's kernel: a long one is still with the proxy meanwhile
STRAY = b'{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"stray"},"finish_reason":"stop"}]}'
SIZED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(STRAY), STRAY)
EVENT = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"stray"}}]}\n\n'
UNASKED = (
    SIZED,
    SIZED * 3,
    SIZED[:17],
    SIZED[:-9],
    b"H",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + EVENT,
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n"
    % (len(EVENT), EVENT),
    b"%x\r\n%b\r\n0\r\n\r\n" % (len(EVENT), EVENT),
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\nstray",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 5\r\n\r\nstray",
    b"\x16\x03\x01stray",
)
INFORMATIONAL = (
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 102 Processing\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nLink: </stray>\r\nContent-Length: 3\r\n\r\n",
)
ODD_HEADS = (
    b"SSH-2.0-stray\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nstray",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nstray",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nstray",
    b"HTTP/1.1 200 OK\r\nX: " + b"x" * 4 * LIMIT_BYTES,
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=" + b"x" * 4 * LIMIT_BYTES,
    b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nstray",
    b"HTTP/1.1 304 Not Modified\r\n\r\nstray",
    INFORMATIONAL[0] * 20_000,
)
TURN = re.compile(rb'"user": ?"([\w-]+)"')  # comes first in a body
ONE_WRITE_BYTES = 64 * 1024  # the kernel takes them whole
SMALL_PARTS = 400  # in bytes: what is shorter may go out byte by byte


def text_of(turn: str) -> str:
    return "".join(f"{turn}.{number} " for number in range(zlib.crc32(turn.encode()) % 12 + 1))


class Link:
    """The engine's end of one connection. TLS is done here by hand, so that what is said leaves at once."""

    def __init__(self, made: socket.socket, context: ssl.SSLContext | None) -> None:
        self.held = b""  # read, and not taken
        self._loop = asyncio.get_running_loop()
        self._socket = made
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True) if context else None

    async def start(self) -> None:
        while self._tls is not None:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                self._in.write(await self._received())
        await self._flush()

    @property
    def has_news(self) -> bool:
        """Anything of a next request, or of the end."""
        try:
            return bool(self.held) or isinstance(self._socket.recv(1, socket.MSG_PEEK), bytes)
        except BlockingIOError:
            return False

    @property
    def is_over(self) -> bool:
        """The proxy has ended it, or reset it."""
        news = select.poll()
        news.register(self._socket.fileno(), select.POLLRDHUP)
        return bool(news.poll(0))

    @property
    def is_delivered(self) -> bool:
        """What was said, to the proxy's kernel: a reset loses what is still in this one."""
        return not any(fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4)))

    async def say(self, data: bytes) -> None:
        if self._tls is None:
            await self._loop.sock_sendall(self._socket, data)
        else:
            self._tls.write(data)
            await self._flush()

    def slip_in(self, data: bytes) -> bool:
        """Says it now or never; whether it did."""
        if self.has_news:
            return False
        if self._tls is not None:
            self._tls.write(data)
            data = self._out.read()
        self._socket.send(data)
        return True

    async def read(self) -> bool:
        """Takes more into `held`; whether anything came."""
        if self._tls is None:
            data = await self._received()
        else:
            data = b""
            while not data:
                try:
                    data = self._tls.read(65536)
                    break
                except ssl.SSLWantReadError:
                    came = await self._received()
                    if not came:
                        return False
                    self._in.write(came)
        self.held += data
        return bool(data)

    def end(self, *, is_reset: bool = False) -> None:
        if self._tls is not None and not is_reset:
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
            with contextlib.suppress(OSError):
                self._socket.send(self._out.read())
        if is_reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    async def _received(self) -> bytes:
        return await self._loop.sock_recv(self._socket, 65536)

    async def _flush(self) -> None:
        if data := self._out.read():
            await self._loop.sock_sendall(self._socket, data)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    turn: str
    size: int  # of its body
    head_bytes: int


@dataclass
class OddEngine:
    """broken: turns of which it has spoiled an answer. misuses: requests on a connection that is good for none.

    did: what it answered, by turn.
    """

    seed: int
    context: ssl.SSLContext | None = None
    broken: set[str] = field(default_factory=set)
    asked: Counter[str] = field(default_factory=Counter)
    did: defaultdict[str, list[tuple[object, ...]]] = field(default_factory=lambda: defaultdict(list))
    misuses: list[str] = field(default_factory=list)
    links: dict[asyncio.Task[None], Link] = field(default_factory=dict)
    address: str = ""

    def __post_init__(self) -> None:
        self._listening = socket.socket()
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED_BYTES)
        self._listening.bind(("127.0.0.1", 0))
        self._listening.listen(128)
        self._listening.setblocking(False)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        asyncio.get_running_loop().add_reader(self._listening, self._accept)

    async def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listening)
        for task in (links := [*self.links]):
            task.cancel()
        await asyncio.gather(*links, return_exceptions=True)
        self._listening.close()

    def _accept(self) -> None:
        """In one step: a task that is cancelled as `sock_accept` returns would lose a connection, and leave it open."""
        made, _ = self._listening.accept()
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = Link(made, self.context)
        task = asyncio.create_task(self._serve(link))
        self.links[task] = link
        task.add_done_callback(lambda task: self.links.pop(task).end())  # also of one that never ran

    async def _serve(self, link: Link) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            try:
                await link.start()
                why = ""
                while (request := await self._next(link)) is not None:
                    if why:
                        self.misuses.append(f"{request.turn or request.path} after {why}")
                    why = await self._answer(link, request)
            finally:
                link.end()

    async def _next(self, link: Link) -> Request | None:
        """The next request, of which the head and the beginning of its body stay in `held`."""
        while b"\r\n\r\n" not in link.held:
            if not await link.read():
                return None
        head = link.held.partition(b"\r\n\r\n")[0].decode("latin-1")
        method, path, _ = head.split(" ", 2)
        fields = dict(re.findall(r"(?im)^([\w-]+): (.*?)\r?$", head.lower()))
        turn = None
        while method == "POST" and (turn := TURN.search(link.held)) is None:
            if not await link.read():
                return None
        return Request(
            method, path, turn[1].decode() if turn else "", int(fields.get("content-length", 0)), len(head) + 4
        )

    async def _read_body(self, link: Link, request: Request) -> bytes:
        whole = request.head_bytes + request.size
        while len(link.held) < whole:
            if not await link.read():
                raise ConnectionError
        body, link.held = link.held[request.head_bytes : whole], link.held[whole:]
        return body

    async def _answer(self, link: Link, request: Request) -> str:
        """Why the connection is good for no other request; empty if it is."""
        if request.method != "POST":
            await self._read_body(link, request)
            body = b'{"data":[{"id":"sim"}]}' if request.path == "/v1/models" else b""
            head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            await link.say(head % len(body) + body)
            raise ConnectionError
        self.asked[request.turn] += 1
        rng = random.Random(f"{self.seed} {request.turn} {self.asked[request.turn]}")
        is_stream = request.turn.endswith("s")
        if request.size > 200_000 and rng.random() < 0.5:
            return await self._answer_early(link, request, rng, is_stream=is_stream)
        body = await self._read_body(link, request)
        assert json.loads(body)["messages"], "whole"
        if rng.random() < 0.12:
            self.broken.add(request.turn)
            return await self._spoil(link, rng, said(rng, request.turn, is_stream=is_stream)[0])
        answer, why = said(rng, request.turn, is_stream=is_stream)
        self.did[request.turn].append((why, answer[:60], answer[-60:]))
        return await self._say_and_go_on(link, rng, answer, why)

    async def _answer_early(self, link: Link, request: Request, rng: random.Random, *, is_stream: bool) -> str:
        answer, why = said(rng, request.turn, is_stream=is_stream)
        what = rng.choice(["ends", "reads on", "is silent"])
        self.did[request.turn].append(("early", what, why, answer[:60], answer[-60:]))
        await in_parts(link, rng, answer)
        for _ in range(rng.randrange(9)):
            await asyncio.sleep(0)
        if what == "ends" or why == "its end":
            self.broken.add(request.turn)  # the reset that follows unread bytes may overtake the answer
            raise ConnectionError
        if what == "reads on":
            await self._read_body(link, request)
            return why
        while not link.is_over:  # without a byte of it being read
            await asyncio.sleep(0)
        raise ConnectionError

    async def _spoil(self, link: Link, rng: random.Random, answer: bytes) -> str:
        what = rng.choice(["cut", "reset", "odd", "odd and cut", "nothing"])
        part = rng.choice(ODD_HEADS) if what.startswith("odd") else answer[: rng.randrange(len(answer))]
        if what != "nothing":
            await in_parts(link, rng, part)
        if what == "odd":
            return "what is not HTTP"
        link.end(is_reset=what == "reset")
        raise ConnectionError

    async def _say_and_go_on(self, link: Link, rng: random.Random, answer: bytes, why: str) -> str:
        what = rng.choice(["nothing", "nothing", "joined", "unasked", "unasked", "ends", "resets"])
        if what == "joined" and why != "its end" and len(answer) < ONE_WRITE_BYTES:
            await in_parts(link, rng, answer, behind=rng.choice(UNASKED))
            return "unasked bytes"
        await in_parts(link, rng, answer)
        if why == "its end":
            raise ConnectionError
        if what in ("unasked", "ends", "resets"):
            for _ in range(rng.randrange(7)):
                await asyncio.sleep(0)
            if what == "unasked" and link.slip_in(rng.choice(UNASKED)):
                return "unasked bytes"
            while what == "resets" and not (link.has_news or link.is_delivered):
                await asyncio.sleep(0)
            if what != "unasked" and not link.has_news:
                link.end(is_reset=what == "resets")
                raise ConnectionError
        return why


async def in_parts(link: Link, rng: random.Random, data: bytes, behind: bytes = b"") -> None:
    """In one write, in a few, or the first bytes one by one. behind: in the same write as the last of the data."""
    cuts = {0, len(data)}
    if rng.random() < 0.2:
        cuts.update(range(1, min(SMALL_PARTS, len(data))))
    elif rng.random() < 0.5:
        cuts.update(rng.randrange(len(data) + 1) for _ in range(rng.randrange(6)))
    for start, end in pairwise(sorted(cuts)):
        await link.say(data[start:end] + (behind if end == len(data) else b""))
        for _ in range(rng.choice([0, 0, 1, 3])):
            await asyncio.sleep(0)


def said(rng: random.Random, turn: str, *, is_stream: bool) -> tuple[bytes, str]:
    """A good answer, and why its connection can serve no other; empty: it can."""
    parts = [*events(turn)] if is_stream else [whole(turn)]
    kind = b"text/event-stream" if is_stream else b"application/json"
    head = b"Content-Type: %b\r\n" % kind
    if rng.random() < 0.1:
        head += b"X: %b\r\n" % (b"x" * rng.randrange(LIMIT_BYTES // 2))
    framing = rng.choice(["sized", "chunked", "chunked", "sized 1.0", "until closed", "until closed 1.0"])
    version, why = (b"1.0", "HTTP/1.0") if framing.endswith("1.0") else (b"1.1", "")
    body = b"".join(parts)
    if framing.startswith("until closed"):
        why = "its end"
    elif framing.startswith("sized"):
        head += b"Content-Length: %d\r\n" % len(body)
    else:
        head += b"Transfer-Encoding: chunked\r\n"
        body = b"".join(map(chunk, parts, extensions(rng))) + b"0%b\r\n%b\r\n" % (next(extensions(rng)), trailers(rng))
    if not why and rng.random() < 0.15:
        head, why = head + b"Connection: close\r\n", "its word that it closes"
    before = b"".join(rng.choice(INFORMATIONAL) for _ in range(rng.choice([0, 0, 1, 3])))
    return before + b"HTTP/%b 200 OK\r\n%b\r\n%b" % (version, head, body), why


def chunk(data: bytes, extension: bytes) -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


def extensions(rng: random.Random) -> Iterator[bytes]:
    for _ in count():
        size = rng.choice([0, 0, 0, 0, 0, 9, 9, LIMIT_BYTES // 4]) if rng.random() < 0.3 else 0
        yield b";stray=%b" % (b"x" * size) if size else b""


def trailers(rng: random.Random) -> bytes:
    return rng.choice([b"", b"", b"Stray: x\r\n", b"Connection: close\r\n"])


def events(turn: str) -> Iterator[bytes]:
    def event(delta: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return b"data: %b\n\n" % json.dumps({"id": "x", "choices": [choice]}).encode()

    yield event({"role": "assistant", "content": ""})
    for part in re.findall(r"\S+ ", text_of(turn)):
        yield event({"content": part})
    yield event({}, "stop")
    yield b"data: [DONE]\n\n"


def whole(turn: str) -> bytes:
    message = {"role": "assistant", "content": text_of(turn)}
    usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
    return json.dumps(
        {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
    ).encode()
