"""The edge around the app: checks on a request's head, time limits on clients, and the drain of open requests.

`GuardedExchange` is one request and its answer. It sees every event between the HTTP server and the app. So it knows
how much of the answer was sent, and can end it in a form that the client understands when the process must stop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from hypercorn.typing import (
    ASGIFramework,
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
    ConnectionState,
    HTTPScope,
    Scope,
)

from ..admission.web_pages import Headers, Origins
from ..bodies.body_memory import ROOM, SLOWEST_BYTES, BodyMemory, BodyRoom
from ..config import ProxyConfig
from ..errors import LegError, PPDError, answer_body, comes_back
from ..openai.request import Endpoint
from ..openai.stream_relay import broken_off
from ..runtime.loop_watch import time_limit
from ..runtime.tasks import Drain, draining
from ..telemetry.access_log import RECORD, AccessLog, AccessRecord
from .limits import CUT_S, ConnectionLimits, OpenRequests
from .request_head import with_host_for_app

_WRONG_KEY = 401
BODY_REST_S = 5.0  # to read the rest of a request's body when its answer is complete
_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
EVENT_ENDS = (b"\n\n", b"\r\r", b"\n\r\n")


class GuardedExchange:
    """One request between the HTTP server and the app.

    limit_s: for the client to take each write. more: headers of whatever answer.
    """

    def __init__(
        self,
        scope: Any,
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
        room: BodyRoom,
        limit_s: float,
        more: Headers = (),
    ) -> None:
        self.scope = scope
        self.room = room
        self._more = _encoded(more)
        self._body_bytes = 0
        self.refused: PPDError | None = None  # why it was cut, if not because the process stops
        self.is_multiplexed: bool = scope["http_version"] >= "2"
        self.is_draining = False
        self.record: AccessRecord | None = None
        self.is_cut = False
        self.is_complete = False
        self._receive = receive
        self._send = send
        self._limit_s = limit_s
        self._waiting: asyncio.Timeout | None = None
        self._withheld: asyncio.Event | None = None  # set when the client leaves
        self._is_left = False
        self._lacks_some = False  # the client left before it had all
        self._is_ending = False  # in the last write: a disconnect that Hypercorn reports now is normal
        self._body_read = asyncio.Event()  # set when the whole request body was read
        self._has_begun = False
        self._owed_bytes: int | None = None  # of the answer's body, where its head says how long it is
        self._is_event_stream = False
        self._tail = b"\n\n"  # the last bytes of the answer's body

    @property
    def is_broken(self) -> bool:
        """A client that has all that it was promised may go before the app's last event, which is empty."""
        return self._owed_bytes != 0 and (self._lacks_some or not self.is_complete)

    async def receive(self) -> ASGIReceiveEvent:
        """The client's next event; after `leave` a disconnect, which tells the app to stop."""
        try:
            async with asyncio.timeout(0 if self._is_left else None) as self._waiting:
                event = await self._receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        if event["type"] == "http.request" and not self._has_begun:
            self._body_bytes += len(event["body"])
            try:
                await self.room.wait(self._body_bytes)
            except PPDError as exc:
                self.refuse_body(exc)
                return {"type": "http.disconnect"}
        if event["type"] == "http.disconnect" and not self._is_ending:
            self._is_left = self._lacks_some = True
        if event["type"] == "http.disconnect" or not event.get("more_body", False):
            self._body_read.set()
            self.room.whole()
        return event

    def refuse_body(self, error: PPDError) -> None:
        """Instead of an answer to it."""
        self.refused, self.is_draining = error, True
        self.cut()

    def body_bytes(self) -> int:
        """That have come."""
        return self._body_bytes

    async def send(self, event: ASGISendEvent) -> None:
        """TimeoutError if the client does not take it: a client that stops reading must not hold a worker for ever."""
        if self._is_left and not self.is_cut:
            await asyncio.sleep(0)  # lets the app's task see the disconnect; a closed connection takes no more writes
            return
        if event["type"] == "http.response.start":
            self._has_begun = True
            self.room.free()  # nothing in the answer needs the request's body
            if self.record is not None:
                self.record.status = event["status"]
            headers = list(event["headers"])
            self._is_event_stream = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
            )
            self._owed_bytes = _length(headers)
            if self._more:
                headers += self._more
            if self.is_draining and not self.is_multiplexed:
                headers.append((b"connection", b"close"))
            event["headers"] = headers
        elif event["type"] == "http.response.body":
            self._tail = event["body"][-3:] or self._tail
            self._is_ending = not event.get("more_body", False)
            if self._is_ending and self.is_multiplexed:
                # Hypercorn drops the connection with all its streams if request body comes after the answer's end.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BODY_REST_S):
                        await self._body_read.wait()
        async with time_limit(self._limit_s):
            await self._send(event)
        if self._owed_bytes is not None and event["type"] == "http.response.body":
            self._owed_bytes -= len(event["body"])
        self.is_complete = self._is_ending

    async def discard_body(self) -> None:
        while not self._body_read.is_set():
            await self.receive()

    async def withhold(self, delay_s: float) -> None:
        """Waits until the answer may go out, or the client leaves."""
        self._withheld = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._withheld.wait()

    def leave(self) -> None:
        self._is_left = True
        self._lacks_some |= not self.is_complete
        if self._withheld is not None:
            self._withheld.set()
        self._body_read.set()
        if self._waiting is not None:
            with contextlib.suppress(RuntimeError):  # `receive` is just leaving it
                self._waiting.reschedule(asyncio.get_running_loop().time())

    def cut(self) -> None:
        """Tells the app to stop; `finish` then sends the client the end of the answer."""
        self.is_cut = True
        self.leave()

    async def finish(self) -> None:
        """Ends a cut answer: an error response if it had not begun, else an error event if the stream can take one."""
        self._limit_s = CUT_S
        if self.is_complete:
            return
        if not self._has_begun:
            await self.refuse(self.refused or draining())
        elif self._is_event_stream and self._tail.endswith(EVENT_ENDS):
            error = broken_off(_ENDPOINTS.get(self.scope["path"], Endpoint.CHAT), draining().message, 503)
            await self.send({"type": "http.response.body", "body": error, "more_body": False})

    async def refuse(self, exc: PPDError) -> None:
        body = answer_body(exc, self.scope["path"])
        await self.answer(exc.status, (("Content-Type", "application/json"), *comes_back(exc).items()), body)

    async def answer(self, status: int, headers: Headers, body: bytes = b"") -> None:
        encoded = _encoded(headers)
        if body:
            encoded.append((b"content-length", b"%d" % len(body)))
        await self.send({"type": "http.response.start", "status": status, "headers": encoded, "trailers": False})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    told = next((value for name, value in headers if name.lower() == b"content-length"), b"")
    return int(told) if told.isdigit() else None


def _encoded(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers]


class Edge:
    """The app behind its limits."""

    def __init__(
        self,
        app: ASGIFramework,
        config: ProxyConfig,
        drain: Drain,
        body_memory: BodyMemory,
        access: AccessLog | None = None,
        rejected: Callable[[int], None] = lambda status: None,
    ) -> None:
        """rejected: told the status of each turn that is refused here."""
        self.body_memory = body_memory
        self.requests = OpenRequests(config, drain, access)
        self.origins = Origins(config.cors_allow_origins)
        self._app = app
        self._config = config
        self._rejected = rejected

    def count(self, method: str, path: str, status: int) -> None:
        """A request that is refused before it comes to the application."""
        if method == "POST" and path in _ENDPOINTS:
            self._rejected(status)

    def refused(self, method: str, path: str, status: int) -> None:
        """A request that is refused before it comes here."""
        self.count(method, path, status)
        self.requests.refused(method, path, status)

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if scope["type"] != "http":  # WebSocket is not supported
            await send({"type": "websocket.close", "code": 1000, "reason": None})
            return
        connection: ConnectionLimits = scope["state"]["connection"]
        more, preflight = self._for_web_pages(scope)
        exchange = GuardedExchange(scope, receive, send, self.body_memory.room(), self._config.idle_timeout_s, more)
        exchange.record = self.requests.opened(scope["method"], scope["path"])
        # The given one is the connection's.
        scope["state"] = ConnectionState({**scope["state"], RECORD: exchange.record, ROOM: exchange.room})
        self.requests.began(exchange, connection)
        try:
            query = b"?" + scope["query_string"] if scope["query_string"] else b""
            refusal = self.requests.refusal(scope["path"], scope["raw_path"] + query, tuple(scope["headers"]))
            if refusal is None and preflight is not None:
                await exchange.answer(204, preflight)
                return
            if refusal is None:
                refusal = await self._room_error(exchange)
            if refusal is None:
                scope["headers"] = with_host_for_app(scope["headers"])
                await self._app(scope, exchange.receive, partial(self._send, exchange, connection.address))
            else:
                exchange.is_draining = True  # the bytes that follow may not be a request
                await self._refuse(exchange, refusal)
            if exchange.is_cut:
                await self._finish(exchange)
        except TimeoutError:
            pass  # the client does not read its answer
        except LegError:  # in the middle of an answer that is passed through
            if exchange.record is not None:
                exchange.record.is_broken = True
            if exchange.is_multiplexed:
                connection.spoil()
        finally:
            if not exchange.is_complete and (not exchange.is_multiplexed or exchange.is_cut):
                connection.break_off()
            exchange.room.free()
            self.requests.ended(exchange, connection, left=exchange.is_broken)

    async def _send(self, exchange: GuardedExchange, address: str, event: ASGISendEvent) -> None:
        is_wrong_key = event["type"] == "http.response.start" and event["status"] == _WRONG_KEY
        if is_wrong_key and (delay_s := self.requests.wrong_keys.withhold(address)):
            try:
                await exchange.withhold(delay_s)
            finally:
                self.requests.wrong_keys.release()
        await exchange.send(event)

    def _for_web_pages(self, scope: HTTPScope) -> tuple[Headers, Headers | None]:
        """The headers of whatever answer, and those of a preflight's, which has no others."""
        if self.origins.is_off:
            return (), None
        fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(list(scope["headers"]))}
        preflight = self.origins.preflight(fields, scope["path"]) if scope["method"] == "OPTIONS" else None
        return (self.origins.headers(fields.get("origin"), scope["path"]) if preflight is None else ()), preflight

    async def _room_error(self, exchange: GuardedExchange) -> PPDError | None:
        """Waits for room for the request's body; the error if it gets none."""
        length = next((value for name, value in exchange.scope["headers"] if name.lower() == b"content-length"), b"0")
        size = int(length[-20:]) if length.isdigit() else 0
        if not 0 < size <= self._config.body_limit_bytes:  # the application refuses what is too large
            return None
        try:
            await exchange.room.wait(size)
        except PPDError as exc:
            return exc
        if size > SLOWEST_BYTES:
            exchange.room.watch(exchange.body_bytes, exchange.refuse_body)
        return None

    async def _finish(self, exchange: GuardedExchange) -> None:
        if exchange.refused is not None:
            self.count(exchange.scope["method"], exchange.scope["path"], exchange.refused.status)
        await exchange.finish()

    async def _refuse(self, exchange: GuardedExchange, refusal: PPDError) -> None:
        self.count(exchange.scope["method"], exchange.scope["path"], refusal.status)
        hearing = asyncio.create_task(exchange.discard_body())
        try:
            await exchange.refuse(refusal)
        finally:
            hearing.cancel()
