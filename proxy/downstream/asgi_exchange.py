"""A request that is no turn, over HTTP/1.1: answered by the ASGI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from ..admission.web_pages import Headers
from ..errors import RequestError
from ..telemetry.access_log import RECORD
from . import response
from .asgi_edge import Edge
from .http1_connection import HELD_BYTES, ClientConnection
from .request_head import RequestHead

log = logging.getLogger(__name__)

_BODILESS = (204, 304)
_LATE = 408


class AsgiExchange:
    """An `Exchange` that runs the ASGI application: https://asgi.readthedocs.io."""

    buffer = None

    def __init__(self, connection: ClientConnection, head: RequestHead, edge: Edge, more: Headers = ()) -> None:
        """edge: the application behind its limits; more: headers of an answer that does not come from it."""
        self._connection = connection
        self._more = more
        self._head = head
        self._edge = edge
        self._task: asyncio.Task[None] | None = None
        self._parts: list[bytes] = []  # not yet taken by the application
        self._held_bytes = 0
        self._is_whole = False  # the request has come completely
        self._is_gone = False
        self._refused: RequestError | None = None  # an error that came before `begin`
        self._asked: dict[str, Any] = {}  # the application's scope
        self._is_over = False
        self._is_complete = False  # the whole answer is written
        self._is_sent = False  # and has gone out, or lies where that is seen to
        self._is_told = False  # the application knows that the request has come completely
        self._has_no_body = False
        self._has_answered = False
        self._came = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._start: dict[str, Any] | None = None  # the answer's first event, until its body begins
        self._is_chunked = False
        self._keeps_alive = head.keeps_alive
        expects = head.fields.get("expect", "").lower() == "100-continue"
        self._expects_continue = expects and not head.is_old

    # -- called by the connection

    def begin(self) -> None:
        if self._refused is None:
            self._task = asyncio.create_task(self._run())
        else:
            self._edge.refused(*self._named(), self._refused.status)
            self._connection.write(response.refusal(self._refused, self._head.target, self._more))
            self._connection.finished(keeps_alive=False)

    def take(self, data: bytes) -> None:
        if not self._is_over:
            self._parts.append(data)
            self._came.set()
            self._held_bytes += len(data)
            if self._held_bytes > HELD_BYTES:
                self._connection.hold_back()

    def taken(self) -> None:
        self._is_whole = True
        self._came.set()

    def refuse(self, error: RequestError) -> None:
        if error.status == _LATE:  # the application has its own time limit
            return
        if self._task is None:  # the answers before it are not written yet
            self._refused = error
            return
        if not self._has_answered:
            self._has_answered = True
            self._connection.write(response.refusal(error, self._head.target, self._more))
            self._edge.count(*self._named(), error.status)
            if (record := self._asked.get("state", {}).get(RECORD)) is not None:
                record.status = error.status
        self.leave()
        self._connection.finished(keeps_alive=False)

    def leave(self) -> None:
        self._is_gone = self._is_over = True
        self._connection.limits.lost()
        self._came.set()
        self._room.set()

    def pause(self) -> None:
        self._room.clear()

    def resume(self) -> None:
        self._room.set()

    # -- the application's side

    async def _run(self) -> None:
        try:
            self._asked = self._scope()
            await self._edge(self._asked, self._receive, self._send)  # type: ignore[arg-type]
        except Exception:
            log.exception("the application failed")
        self._is_over = True
        if self._is_complete:
            self._connection.finished(keeps_alive=self._keeps_alive and self._is_whole)
        elif not self._is_gone:
            self._connection.abort()

    def _named(self) -> tuple[str, str]:
        """The method and the path that it asks for."""
        return self._head.method.decode("ascii"), unquote(self._head.target.partition(b"?")[0].decode("latin-1"))

    def _scope(self) -> dict[str, Any]:
        method, name = self._named()
        path, _, query = self._head.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._head.version,
            "method": method,
            "scheme": "https" if self._connection.limits.is_tls else "http",
            "path": name,
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": self._head.headers,
            "client": None,
            "server": None,
            "state": {"connection": self._connection.limits},
            "extensions": {},
        }

    async def _receive(self) -> dict[str, Any]:
        if self._expects_continue and not self._parts and not self._is_whole and not self._has_answered:
            self._expects_continue = False
            self._connection.write(response.CONTINUE)
        while not (self._is_gone or self._is_sent or self._parts) and (self._is_told or not self._is_whole):
            self._came.clear()
            await self._came.wait()
        if self._is_gone or self._is_sent:  # Quart 0.23 returns when it hears this, and not before
            return {"type": "http.disconnect"}
        data, self._parts = b"".join(self._parts), []
        if self._held_bytes > HELD_BYTES:
            self._connection.read_on()
        self._held_bytes = 0
        self._is_told = self._is_whole
        return {"type": "http.request", "body": data, "more_body": not self._is_whole}

    async def _send(self, event: dict[str, Any]) -> None:
        if self._is_gone or self._is_complete:
            return
        if event["type"] == "http.response.start":
            self._start = event
            return
        data, is_last = event.get("body", b""), not event.get("more_body", False)
        head = b"" if self._start is None else self._answer_head(self._start, len(data) if is_last else None)
        self._start = None
        if self._has_no_body:
            data = b""
        elif self._is_chunked:
            data = (response.chunk(data) if data else b"") + (response.END if is_last else b"")
        self._connection.write(head + data)
        self._is_complete = is_last
        await self._room.wait()
        if is_last:
            self._is_sent = True
            self._came.set()

    def _answer_head(self, start: dict[str, Any], size: int | None) -> bytes:
        status: int = start["status"]
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]]
        given = {name.lower(): value for name, value in pairs}
        self._has_answered = True
        self._has_no_body = self._head.method == b"HEAD" or status in _BODILESS
        if "content-length" in given or self._has_no_body:
            size = None
        elif size is None:
            self._is_chunked = not self._head.is_old
            self._keeps_alive &= self._is_chunked
        kept = [(name, value) for name, value in pairs if name.lower() not in ("connection", "date")]
        self._keeps_alive &= given.get("connection", "").lower() != "close" and self._is_whole
        connection = response.connection(self._keeps_alive, is_old=self._head.is_old)
        return response.head(status, kept, size=size, is_chunked=self._is_chunked, connection=connection)


class RefusedExchange:
    """An `Exchange` that answers an unreadable or forbidden request with an error, and closes the connection."""

    buffer = None

    def __init__(
        self,
        connection: ClientConnection,
        error: RequestError,
        note: Callable[[int], None],
        target: bytes = b"",
        more: Headers = (),
    ) -> None:
        """note: told the status."""
        self._connection = connection
        self._error = error
        self._note = note
        self._target = target
        self._more = more

    def begin(self) -> None:
        self._note(self._error.status)
        self._connection.write(response.refusal(self._error, self._target, self._more))
        self._connection.finished(keeps_alive=False)

    def take(self, data: bytes) -> None: ...

    def taken(self) -> None: ...

    def refuse(self, error: RequestError) -> None: ...

    def leave(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...
