"""Clients that each hold one conversation after the other with the proxy, until time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
import msgspec

from .client_view import ClientView, Reception, verify
from .oracle import Oracle
from .records import ClientOutcome, RequestRecord
from .workload import Move, SoakConversation, SoakRequest

_LIMIT_S = 60.0  # longer than any of the proxy's own time-outs
_THINK_S = 0.1

Clock = Callable[[], float]  # seconds since the load began


@dataclass(slots=True)
class ClientExchange:
    view: ClientView
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    sent_s: float = 0.0
    first_text_s: float | None = None
    ended_s: float = 0.0
    left: bool = False
    lost: bool = False


class SoakClients:
    def __init__(self, session: aiohttp.ClientSession, url: str, admin_key: str, oracle: Oracle, clock: Clock) -> None:
        self._session = session
        self._url = url
        self._admin_key = admin_key
        self._oracle = oracle
        self._clock = clock
        self.requests: list[RequestRecord] = []

    async def play(self, conversations: Iterator[SoakConversation], until_s: float) -> None:
        """One client. All clients take their conversations from the same iterator."""
        while self._clock() < until_s:
            conversation = next(conversations)
            while self._clock() < until_s and (request := conversation.next()) is not None:
                exchange = await self._exchange(request)
                record, text = await self._verified(conversation, request, exchange)
                self.requests.append(record)
                conversation.answered(text)
                await asyncio.sleep(_THINK_S)

    async def _verified(
        self, conversation: SoakConversation, request: SoakRequest, exchange: ClientExchange
    ) -> tuple[RequestRecord, str | None]:
        """The record, and the answer's text if all of it came."""
        view = exchange.view
        reception = Reception(status=exchange.status, left=exchange.left, lost=exchange.lost)
        expected = None
        if request.move is not Move.IMPOSSIBLE and exchange.status == 200:
            expected = await self._oracle.texts(request.endpoint, request.body)
        outcome, detail = verify(view, reception, expected, request.move)
        record = RequestRecord(
            id=exchange.headers.get("x-request-id", ""),
            conversation=conversation.number,
            endpoint=request.endpoint.name.lower(),
            move=request.move,
            stream=request.stream,
            sent_s=exchange.sent_s,
            first_text_s=exchange.first_text_s,
            ended_s=exchange.ended_s,
            status=exchange.status,
            outcome=outcome,
            route=exchange.headers.get("x-ppd-route", ""),
            detail=detail,
        )
        return record, view.texts.get(0) if outcome is ClientOutcome.COMPLETED else None

    async def _exchange(self, request: SoakRequest) -> ClientExchange:
        exchange = ClientExchange(ClientView(request.endpoint), sent_s=self._clock())
        try:
            async with asyncio.timeout(_LIMIT_S):
                if request.behaviour.leave_after_s is None:
                    await self._send(request, exchange)
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(request.behaviour.leave_after_s):
                            await self._send(request, exchange)
                    exchange.left = not exchange.ended_s
        except (aiohttp.ClientError, OSError, TimeoutError):
            exchange.lost = True
        exchange.ended_s = self._clock()
        return exchange

    async def _send(self, request: SoakRequest, exchange: ClientExchange) -> None:
        headers = request.headers | {"Content-Type": "application/json"}
        if request.force:
            headers |= {"X-PPD-Force-Route": request.force, "X-Admin-Key": self._admin_key}
        body = msgspec.json.encode(request.body)
        async with self._session.post(self._url + request.endpoint.value, data=body, headers=headers) as answer:
            exchange.status = answer.status
            exchange.headers = {name.lower(): value for name, value in answer.headers.items()}
            if answer.content_type == "text/event-stream":
                await self._read_stream(answer, request, exchange)
            else:
                exchange.view.read_whole(await answer.read())
        exchange.ended_s = self._clock()

    async def _read_stream(
        self, answer: aiohttp.ClientResponse, request: SoakRequest, exchange: ClientExchange
    ) -> None:
        behaviour, events = request.behaviour, 0
        async for chunk in answer.content.iter_any():
            events += exchange.view.feed(chunk)
            if events and exchange.first_text_s is None:
                exchange.first_text_s = self._clock()
            if behaviour.leave_after_events is not None and events >= behaviour.leave_after_events:
                exchange.left = not exchange.view.ended
                answer.close()
                return
            if behaviour.pause_s:
                await asyncio.sleep(behaviour.pause_s)
