"""The outermost layer of the app: what a request's head may be, how long a client may take, and how a drain ends it.

`GuardedExchange` is one request and its answer. It sees each event between Hypercorn and the app, so it knows what the
client has got, and can end the answer in the client's own terms when the process must go.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

from hypercorn.typing import (
    ASGIFramework,
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
)

from ..config import OPERATOR_PATHS, ProxyConfig
from ..errors import PPDError, RequestError, comes_back, error_body
from ..openai.request import Endpoint
from ..openai.stream_relay import broken_off
from ..runtime.drain import Drain, draining
from .limits import AtWork, ConnectionLimits
from .request_head import check_target, check_values, head_too_large, size_of, too_many_lines

HEAR_OUT_S = 5.0  # for the rest of a body whose answer is there already
LAST_WORD_S = 1.0  # for a client to take the end of an answer that a drain cuts
_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
EVENT_ENDS = (b"\n\n", b"\r\r", b"\n\r\n")


class UnderWay(AtWork, Protocol):
    """A request whose answer is not whole."""

    is_draining: bool  # the connection ends with this answer

    def cut(self) -> None:
        """The process is about to end: so does the answer, in a way that its client understands."""


class GuardedExchange:
    """One request as Hypercorn and the app see it, with a limit on each write."""

    def __init__(self, scope: Any, receive: ASGIReceiveCallable, send: ASGISendCallable, limit_s: float) -> None:
        self.scope = scope
        self.is_multiplexed: bool = scope["http_version"] >= "2"
        self.is_draining = False  # the connection ends with this answer
        self.is_cut = False
        self.is_complete = False
        self._receive = receive
        self._send = send
        self._limit_s = limit_s
        self._waiting: asyncio.Timeout | None = None
        self._is_left = False
        self._is_ending = False  # the last of the answer is on its way: Hypercorn then says that the client left
        self._heard_out = asyncio.Event()  # the request's body is all here
        self._has_begun = False
        self._is_event_stream = False
        self._tail = b"\n\n"  # the last bytes of the answer's body

    @property
    def is_broken(self) -> bool:
        """Whether the client left before it had the answer, or cannot have all of it."""
        return self._is_left or not self.is_complete

    async def receive(self) -> ASGIReceiveEvent:
        """What the client sends; `leave` makes it the client's leaving, which is how the app is told to stop."""
        try:
            async with asyncio.timeout(0 if self._is_left else None) as self._waiting:
                event = await self._receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        if event["type"] == "http.disconnect" and not self._is_ending:
            self._is_left = True
        if event["type"] == "http.disconnect" or not event.get("more_body", False):
            self._heard_out.set()
        return event

    async def send(self, event: ASGISendEvent) -> None:
        """TimeoutError where the client does not take it: one that stops reading must not hold a worker for ever."""
        if self._is_left and not self.is_cut:
            await asyncio.sleep(0)  # the app's task hears of it; a connection that is gone takes no more writes
            return
        if event["type"] == "http.response.start":
            self._has_begun = True
            headers = list(event["headers"])
            self._is_event_stream = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
            )
            if self.is_draining and not self.is_multiplexed:
                event["headers"] = [*headers, (b"connection", b"close")]
        elif event["type"] == "http.response.body":
            self._tail = event["body"][-3:] or self._tail
            self._is_ending = not event.get("more_body", False)
            if self._is_ending and self.is_multiplexed:
                # Hypercorn drops a connection with all its streams when a body goes on behind its answer's end.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEAR_OUT_S):
                        await self._heard_out.wait()
        async with asyncio.timeout(self._limit_s):
            await self._send(event)
        self.is_complete = self._is_ending

    async def hear_out(self) -> None:
        """Takes what the app would have taken, where it is not asked."""
        while not self._heard_out.is_set():
            await self.receive()

    def leave(self) -> None:
        self._is_left = True
        self._heard_out.set()
        if self._waiting is not None:
            with contextlib.suppress(RuntimeError):  # it is just being left
                self._waiting.reschedule(asyncio.get_running_loop().time())

    def cut(self) -> None:
        """The app is told to stop; what the client still gets is `finish`'s."""
        self.is_cut = True
        self.leave()

    async def finish(self) -> None:
        """The end of a cut answer: a refusal where it had not begun, else an error event where one can follow."""
        self._limit_s = LAST_WORD_S
        if self.is_complete:
            return
        if not self._has_begun:
            await self.refuse(draining())
        elif self._is_event_stream and self._tail.endswith(EVENT_ENDS):
            error = broken_off(_ENDPOINTS.get(self.scope["path"], Endpoint.CHAT), draining().message, 503)
            await self.send({"type": "http.response.body", "body": error, "more_body": False})

    async def refuse(self, exc: PPDError) -> None:
        body = error_body(exc.message, exc.kind, exc.code or exc.status)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers += [(name.lower().encode(), value.encode()) for name, value in comes_back(exc).items()]
        await self.send({"type": "http.response.start", "status": exc.status, "headers": headers, "trailers": False})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})


class Edge:
    """The app behind its limits; knows every request under way."""

    def __init__(self, app: ASGIFramework, config: ProxyConfig, drain: Drain) -> None:
        self._app = app
        self._config = config
        self._drain = drain
        self._open: set[UnderWay] = set()
        self._quiet = asyncio.Event()

    def began(self, request: UnderWay, connection: ConnectionLimits) -> None:
        """A request's head is whole, and it may answer."""
        request.is_draining = self._drain.is_draining
        connection.began(request)
        self._open.add(request)

    def ended(self, request: UnderWay, connection: ConnectionLimits, *, left: bool) -> None:
        """`left`: before its answer was whole."""
        self._open.discard(request)
        if not self._open:
            self._quiet.set()
        connection.ended(request, left=left)

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if scope["type"] != "http":  # nothing here speaks WebSocket
            await send({"type": "websocket.close", "code": 1000, "reason": None})
            return
        connection: ConnectionLimits = scope["state"]["connection"]
        exchange = GuardedExchange(scope, receive, send, self._config.idle_timeout_s)
        self.began(exchange, connection)
        try:
            query = b"?" + scope["query_string"] if scope["query_string"] else b""
            refusal = self.refusal(scope["path"], scope["raw_path"] + query, tuple(scope["headers"]))
            if refusal is None:
                await self._app(scope, exchange.receive, exchange.send)
            else:
                exchange.is_draining = True  # what follows on the connection may not be a request
                await self._refuse(exchange, refusal)
            if exchange.is_cut:
                await exchange.finish()
        except TimeoutError:
            pass  # the client does not take it
        finally:
            if not exchange.is_complete and (not exchange.is_multiplexed or exchange.is_cut):
                connection.break_off()
            self.ended(exchange, connection, left=exchange.is_broken)

    async def _refuse(self, exchange: GuardedExchange, refusal: PPDError) -> None:
        hearing = asyncio.create_task(exchange.hear_out())
        try:
            await exchange.refuse(refusal)
        finally:
            hearing.cancel()

    async def drained(self, limit_s: float) -> None:
        """Until every answer is whole; after `limit_s` those under way are cut."""
        for exchange in self._open:
            exchange.is_draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._none_open()
        except TimeoutError:
            self._drain.is_cut = True
            for exchange in tuple(self._open):
                exchange.cut()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await self._none_open()

    async def _none_open(self) -> None:
        while self._open:
            self._quiet.clear()
            await self._quiet.wait()

    def refusal(
        self, path: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], *, read_bytes: int | None = None
    ) -> PPDError | None:
        """Why a request with this head is not answered; target: path and query as they came.

        read_bytes: in which the head came, from a parser that lets no control character through.
        """
        if self._drain.is_draining and path not in OPERATOR_PATHS:
            return draining()
        config = self._config
        if len(headers) > config.header_limit:
            return too_many_lines(config.header_limit)
        # The parsers' own limits are on what of a head is not there yet: one that comes in two reads can exceed them.
        is_measured = read_bytes is not None and read_bytes <= config.head_limit_bytes
        if not is_measured and size_of(target, headers) > config.head_limit_bytes:
            return head_too_large(config.head_limit_bytes)
        try:
            check_target(target)
            if read_bytes is None:
                check_values(headers)
        except RequestError as exc:
            return exc
        return None
