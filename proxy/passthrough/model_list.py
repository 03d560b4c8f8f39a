"""The models of the fleet: each once, as one of its workers describes it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ..admission.keys import Client
from ..config import ProxyConfig
from ..errors import LegError, NoWorkerError
from ..fleet.view import WorkerView
from ..upstream.call import Call, Timeouts
from ..upstream.client import Upstream

CARDS_LIMIT_S = 5.0  # for one worker to describe its models
CARDS_KEPT_S = 1.0  # for which the answer is reused for requests with the same authorization


class ModelList:
    """candidates: the workers that can be asked, best first; now: monotonic, in seconds."""

    def __init__(
        self,
        config: ProxyConfig,
        upstream: Upstream,
        candidates: Callable[[], Sequence[WorkerView]],
        now: Callable[[], float],
    ) -> None:
        self._upstream = upstream
        self._candidates = candidates
        self._now = now
        self._timeouts = Timeouts(config.connect_timeout_s, CARDS_LIMIT_S, CARDS_LIMIT_S)
        self._listings: dict[str, _Listing] = {}

    async def models(self, headers: Mapping[str, str], client: Client) -> bytes:
        """`/v1/models` of the fleet: each model that the client may use, once, as one of its workers describes it."""
        listing = self._listing(headers)
        async with listing.lock:
            if self._now() >= listing.until_s:
                listing.cards = await self._all_cards(headers)
                listing.until_s = self._now() + CARDS_KEPT_S
        if listing.cards is None:
            raise NoWorkerError("no worker can be asked for its models now")
        allowed = [card for model, card in listing.cards.items() if client.may_use(model)]
        return msgspec.json.encode({"object": "list", "data": allowed})

    def _listing(self, headers: Mapping[str, str]) -> _Listing:
        """One for each authorization: workers may want the client's own."""
        now_s = self._now()
        self._listings = {who: kept for who, kept in self._listings.items() if kept.is_wanted(now_s)}
        return self._listings.setdefault(headers.get("authorization", ""), _Listing())

    async def _all_cards(self, headers: Mapping[str, str]) -> dict[str, msgspec.Raw] | None:
        """None where no worker has answered."""
        representatives = {view.worker.models: view for view in reversed(self._candidates())}
        answers = await asyncio.gather(*(self._cards(view, headers) for view in representatives.values()))
        if all(answer is None for answer in answers):
            return None
        cards: dict[str, msgspec.Raw] = {}
        for answer in answers:
            for model, card in (answer or {}).items():
                cards.setdefault(model, card)
        return cards

    async def _cards(self, view: WorkerView, headers: Mapping[str, str]) -> dict[str, msgspec.Raw] | None:
        try:
            async with (
                asyncio.timeout(CARDS_LIMIT_S),
                self._upstream.answer(
                    Call(view.worker), "/v1/models", method="GET", headers=headers, timeouts=self._timeouts
                ) as answer,
            ):
                cards = msgspec.json.decode(await answer.body(), type=_Cards).data
            return {msgspec.json.decode(card, type=_Card).id: card for card in cards}
        except (LegError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[msgspec.Raw]


@dataclass(slots=True)
class _Listing:
    """The models' cards by name, None where no worker answered; the first request asks, others wait at the lock."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    cards: dict[str, msgspec.Raw] | None = None
    until_s: float = -math.inf

    def is_wanted(self, now_s: float) -> bool:
        return self.lock.locked() or now_s < self.until_s
