"""Carries out an ordered fault on a request's answer."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import msgspec
from aiohttp import web

from ..core.errors import OrderedError
from ..core.fault_orders import FaultKind, FaultPhase, Order
from ..engine.engine import SimEngine

_PAGE = "<html><head><title>{status}</title></head><body><h1>{status}</h1><hr>gateway</body></html>\n"
_NO_LINGER = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST
_BREAKS = frozenset({FaultKind.HANG, FaultKind.RESET, FaultKind.CLOSE, FaultKind.KILL})


class Ended(Exception):
    """The answer has ended; nothing more is written."""


class InjectedFault:
    """The fault of one request; none if `order` is None. Ended and OrderedError end the answer."""

    def __init__(self, order: Order | None, request: web.Request, engine: SimEngine) -> None:
        self._order = order
        self._request = request
        self._engine = engine
        self._events = 0

    @property
    def abort_after(self) -> int | None:
        """Tokens after which the engine aborts each choice; None: never."""
        if self._order is None or self._order.kind is not FaultKind.ABORT:
            return None
        return self._order.after_events if self._order.phase is FaultPhase.EVENTS else 0

    @property
    def headers(self) -> dict[str, str]:
        if self._order is None or self._order.retry_after_s is None:
            return {}
        return {"Retry-After": str(self._order.retry_after_s)}

    async def instead(self) -> web.StreamResponse | None:
        """The answer of a fault that comes before the engine sees the request, if there is one."""
        order = self._order
        if order is None or order.phase is not FaultPhase.REQUEST:
            return None
        if order.kind is FaultKind.PAGE:
            page = _PAGE.format(status=order.status)
            return web.Response(text=page, status=order.status, content_type="text/html", headers=self.headers)
        if order.kind is FaultKind.BODY:
            form = "text/event-stream" if order.body.startswith("data:") else "application/json"
            return web.Response(body=order.body.encode(), content_type=form)
        await self._strike(order, None)
        return None

    # Streams

    async def reaches(self, phase: FaultPhase, response: web.StreamResponse) -> None:
        if self._order is not None and self._order.phase is phase:
            await self._strike(self._order, response)

    async def before_event(self, response: web.StreamResponse) -> None:
        if self._order is None:
            return
        if self._order.kind is FaultKind.SLOW:
            await asyncio.sleep(self._order.delay_s)
        if self._order.phase is FaultPhase.EVENTS and self._events == self._order.after_events:
            await self._strike(self._order, response)
        self._events += 1

    # Answers that are not streamed

    def before_whole(self) -> None:
        """Called once the engine has the request, so that an error aborts it there."""
        if self._order is not None and self._order.kind is FaultKind.ERROR:
            raise OrderedError(self._order.status)

    def spoil(self, payload: dict[str, Any]) -> None:
        """P's handoff in an answer as vLLM writes it."""
        if self._order is None or self._order.kind is not FaultKind.HANDOFF:
            return
        if not (member := self._order.member):
            del payload["kv_transfer_params"]
        elif (params := payload["kv_transfer_params"]) is not None:
            params.pop(member, None)

    async def whole(self, payload: dict[str, Any]) -> web.StreamResponse:
        order = self._order
        body = msgspec.json.encode(payload)
        if order is not None and order.kind is FaultKind.BODY:
            body = order.body.encode()
        is_late = order is not None and order.kind is FaultKind.SLOW
        if order is not None and is_late and order.phase is not FaultPhase.HEAD:
            await asyncio.sleep(order.delay_s)
        elif order is not None and (is_late or order.kind in _BREAKS):
            head = {"Content-Type": "application/json", "Content-Length": str(len(body))}
            response = web.StreamResponse(headers=head)
            await response.prepare(self._request)
            if is_late:
                await asyncio.sleep(order.delay_s)
                await response.write(body)
                return response
            if order.phase is not FaultPhase.HEAD:
                await response.write(body[: len(body) // 2])
            await self._strike(order, response)
        return web.Response(body=body, content_type="application/json")

    async def _strike(self, order: Order, response: web.StreamResponse | None) -> None:
        if order.kind is FaultKind.ERROR:
            raise OrderedError(order.status)
        if order.kind is FaultKind.BODY and response is not None:
            await response.write(order.body.encode())
            raise Ended
        if order.kind not in _BREAKS:
            return
        if order.kind is FaultKind.HANG:
            await self._engine.until_stopped()
        elif order.kind is FaultKind.KILL:
            self._engine.kill()
        _drop(self._request, order.kind)
        raise Ended


def _drop(request: web.Request, kind: FaultKind) -> None:
    transport = request.transport
    if transport is None:
        return
    if kind is FaultKind.CLOSE:
        transport.close()  # after buffered data is sent
        return
    if kind is FaultKind.RESET:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
