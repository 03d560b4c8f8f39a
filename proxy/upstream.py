"""HTTP to workers: one pooled aiohttp client, a time-out on every await, foreign errors mapped to ours.

Leaving `answer` early closes its connection, which is how vLLM is told to abort the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import yarl

from .errors import LegError, WorkerTimeout, WorkerUnreachable

READ_BYTES = 64 * 1024
ANSWER_LIMIT_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: to connect, until the first byte of the answer's body, and between two reads after it."""

    connect_s: float
    first_s: float
    idle_s: float


class Answer:
    """A worker's answer: its head, then its body in chunks as they come."""

    def __init__(self, response: aiohttp.ClientResponse, timeouts: Timeouts, address: str) -> None:
        self._response = response
        self._timeouts = timeouts
        self._address = address
        self._read_any = False

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def content_type(self) -> str:
        return self._response.headers.get("Content-Type", "application/json")

    @property
    def content_encoding(self) -> str:
        """Empty unless the worker encoded its answer although it was asked not to."""
        encoding = self._response.headers.get("Content-Encoding", "")
        return "" if encoding == "identity" else encoding

    @property
    def is_event_stream(self) -> bool:
        return self.content_type.startswith("text/event-stream")

    async def chunk(self) -> bytes:
        """The next bytes of the body, b"" at its end."""
        limit_s = self._timeouts.idle_s if self._read_any else self._timeouts.first_s
        with _mapped(self._address, "sent nothing for too long"):
            async with asyncio.timeout(limit_s):
                data = await self._response.content.readany()
        self._read_any = True
        return data

    async def body(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while data := await self.chunk():
            size += len(data)
            if size > ANSWER_LIMIT_BYTES:
                raise WorkerUnreachable("the worker's answer is too long", worker=self._address)
            parts.append(data)
        return b"".join(parts)

    def close(self) -> None:
        """Drops the connection unless the body was read to its end."""
        self._response.close()


class Upstream:
    """The connection pool; `open` in the app's lifespan, `close` at its end."""

    def __init__(self, *, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s, ttl_dns_cache=60)
        self._session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},  # bodies are read and relayed as they are
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=READ_BYTES,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "opened in the lifespan"
        return self._session

    async def ask(
        self,
        address: str,
        path: str,
        *,
        timeouts: Timeouts,
        body: bytes | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
    ) -> Answer:
        """The head of the worker's answer; LegError if there is none in time. The caller closes it."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s)
        with _mapped(address, "did not answer in time"):
            async with asyncio.timeout(timeouts.connect_s + timeouts.first_s):
                response = await self.session.request(
                    method,
                    # As it is: a path must not become another one on its way, say by its dots.
                    yarl.URL(f"http://{address}{path}", encoded=True),
                    data=body,
                    headers=headers,
                    timeout=timeout,
                    allow_redirects=False,
                )
        return Answer(response, timeouts, address)

    @asynccontextmanager
    async def answer(self, address: str, path: str, **ask: object) -> AsyncIterator[Answer]:
        """`ask`, closed at the end whatever happens."""
        answer = await self.ask(address, path, **ask)  # type: ignore[arg-type]
        try:
            yield answer
        finally:
            answer.close()


class _mapped:  # noqa: N801 - used as a statement
    """Turns what aiohttp and asyncio raise into LegError; a plain class, as it runs for every chunk."""

    __slots__ = ("_address", "_late")

    def __init__(self, address: str, late: str) -> None:
        self._address = address
        self._late = late

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, exc: BaseException | None, _tb: object) -> None:
        if exc is None or isinstance(exc, LegError):
            return
        if isinstance(exc, TimeoutError):
            raise WorkerTimeout(f"the worker {self._late}", worker=self._address) from exc
        if isinstance(exc, (aiohttp.ClientError, OSError)):
            raise WorkerUnreachable("the worker could not be reached or broke off", worker=self._address) from exc
