"""Clients: each plays one conversation after the other against the proxy until time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
import msgspec

from .client_view import Heard
from .oracle import Oracle
from .records import ClientOutcome, RequestRecord
from .verify import Reception, judge
from .workload import Move, SoakConversation, SoakRequest

_LIMIT_S = 60.0  # longer than any of the proxy's own limits
_THINK_S = 0.1

Clock = Callable[[], float]  # seconds since the load began


@dataclass(slots=True)
class ClientExchange:
    """One request under way."""

    heard: Heard
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    sent_s: float = 0.0
    first_text_s: float | None = None
    ended_s: float = 0.0
    left: bool = False
    lost: bool = False


class Crowd:
    """Owns the numbers of the talks, so that every client's next one is another."""

    def __init__(self, session: aiohttp.ClientSession, url: str, admin_key: str, oracle: Oracle, clock: Clock) -> None:
        self._session = session
        self._url = url
        self._admin_key = admin_key
        self._oracle = oracle
        self._clock = clock
        self.requests: list[RequestRecord] = []

    async def play(self, talks: Iterator[SoakConversation], until_s: float) -> None:
        """One client's life. `talks` is shared with the others."""
        while self._clock() < until_s:
            talk = next(talks)
            while self._clock() < until_s and (ask := talk.next()) is not None:
                exchange = await self._exchange(ask)
                request, text = await self._judged(talk, ask, exchange)
                self.requests.append(request)
                talk.hear(text)
                await asyncio.sleep(_THINK_S)

    async def _judged(
        self, talk: SoakConversation, ask: SoakRequest, exchange: ClientExchange
    ) -> tuple[RequestRecord, str | None]:
        """The record, and the text to go on from where all of it came."""
        heard = exchange.heard
        reception = Reception(status=exchange.status, left=exchange.left, lost=exchange.lost, stream=ask.stream)
        expected = None
        if ask.move is not Move.IMPOSSIBLE and exchange.status == 200:
            expected = await self._oracle.texts(ask.endpoint, ask.body)
        outcome, detail = judge(heard, reception, expected, ask.move)
        request = RequestRecord(
            id=exchange.headers.get("x-request-id", ""),
            talk=talk.number,
            endpoint=ask.endpoint.name.lower(),
            move=ask.move,
            stream=ask.stream,
            sent_s=exchange.sent_s,
            first_text_s=exchange.first_text_s,
            ended_s=exchange.ended_s,
            status=exchange.status,
            outcome=outcome,
            route=exchange.headers.get("x-ppd-route", ""),
            detail=detail,
        )
        return request, heard.texts.get(0) if outcome is ClientOutcome.COMPLETED else None

    async def _exchange(self, ask: SoakRequest) -> ClientExchange:
        exchange = ClientExchange(Heard(ask.endpoint), sent_s=self._clock())
        try:
            async with asyncio.timeout(_LIMIT_S):
                if ask.manners.leave_after_s is None:
                    await self._send(ask, exchange)
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(ask.manners.leave_after_s):
                            await self._send(ask, exchange)
                    exchange.left = not exchange.ended_s
        except (aiohttp.ClientError, OSError, TimeoutError):
            exchange.lost = True
        exchange.ended_s = self._clock()
        return exchange

    async def _send(self, ask: SoakRequest, exchange: ClientExchange) -> None:
        headers = ask.headers | {"Content-Type": "application/json"}
        if ask.force:
            headers |= {"X-PPD-Force-Route": ask.force, "X-Admin-Key": self._admin_key}
        body = msgspec.json.encode(ask.body)
        async with self._session.post(self._url + ask.endpoint.value, data=body, headers=headers) as answer:
            exchange.status = answer.status
            exchange.headers = {name.lower(): value for name, value in answer.headers.items()}
            if answer.content_type == "text/event-stream":
                await self._listen(answer, ask, exchange)
            else:
                exchange.heard.read_whole(await answer.read())
        exchange.ended_s = self._clock()

    async def _listen(self, answer: aiohttp.ClientResponse, ask: SoakRequest, exchange: ClientExchange) -> None:
        manners, events = ask.manners, 0
        async for chunk in answer.content.iter_any():
            events += exchange.heard.feed(chunk)
            if events and exchange.first_text_s is None:
                exchange.first_text_s = self._clock()
            if manners.leave_after_events is not None and events >= manners.leave_after_events:
                exchange.left = not exchange.heard.ended
                answer.close()
                return
            if manners.pause_s:
                await asyncio.sleep(manners.pause_s)
