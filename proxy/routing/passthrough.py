"""Requests outside of conversations: forwarded to a worker that serves their model, or to another if that one fails.

JSON objects lose the members that end at the proxy; multipart forms go on as they are. A request that names no model
goes to the least loaded worker of the fleet.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import msgspec

from ..admission.auth import check_use
from ..admission.gate import Permit
from ..admission.keys import Client
from ..admission.queue import Ticket
from ..bodies.body_reader import Body, BodyReader
from ..config import ProxyConfig
from ..errors import OVERLOAD, LegError, NoWorkerError, refusal
from ..failures import ROWS, Cause, ClientGets, Leg, Phase
from ..fleet.view import WorkerView, check_model
from ..fleet.worker import Role
from ..openai.form import is_form
from ..upstream.call import Answer, Call, Timeouts
from ..upstream.client import Upstream
from .state import State

ENDPOINTS = (
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/v1/score",
    "/score",
    "/classify",
    "/pooling",
)

# Names only: with dots or escapes a path could turn into another endpoint's on its way.
AUDIO = re.compile(r"/v1/audio(?:/[A-Za-z0-9_-]+)+")

# A member of JSON: inside a string its quotes would be escaped.
_USED = re.compile(rb'"total_tokens"\s{0,8}:\s{0,8}([0-9]{1,12})')
_USED_BYTES = 64  # at least as many as match

CARDS_LIMIT_S = 5.0  # for one worker to describe its models
CARDS_KEPT_S = 1.0  # for which the answer is reused for requests with the same authorization

# An engine's word for "this model has no such endpoint": the request's fault, not the worker's.
_NOT_IMPLEMENTED = 501

# Replicas first; P last, as its queue is the fleet's TTFT.
_PREFERENCE = {Role.REPLICA: 0, Role.DECODE: 1, Role.PREFILL: 2}


@dataclass(slots=True)
class Forwarded:
    """A worker's answer; status and headers are the worker's own."""

    status: int
    headers: dict[str, str]
    chunks: AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class _Asked:
    method: str
    path: str
    body: bytes | tuple[memoryview]
    headers: Mapping[str, str]
    model: str


class TotalTokens:
    """Reads `total_tokens` from an answer as it passes; 0 until then."""

    def __init__(self) -> None:
        self.tokens = 0
        self._tail = b""

    def observe(self, data: bytes) -> None:
        seen = self._tail + data
        for match in _USED.finditer(seen):
            self.tokens = int(match[1])
        self._tail = seen[-_USED_BYTES:]


class _Bill:
    """What one request costs its key: an estimate, replaced by the answer's own count."""

    def __init__(self, state: State, client: Client, estimated_tokens: int) -> None:
        """Raises RateLimited where the key must wait."""
        self.estimated_tokens = estimated_tokens
        self.used = TotalTokens()  # an answer without a count used no engine
        self._state = state
        self._client = client
        state.rate_limits.take(client, estimated_tokens, state.now())

    def settle(self, tokens: int) -> None:
        self._state.rate_limits.settle(self._client, self.estimated_tokens, tokens, self._state.now())


class Passthrough:
    """Forwards requests, and merges the model lists of the fleet."""

    def __init__(self, config: ProxyConfig, state: State, upstream: Upstream, bodies: BodyReader) -> None:
        self._state = state
        self._registry = state.registry
        self._upstream = upstream
        self._timeouts = Timeouts(config.connect_timeout_s, config.answer_timeout_s, config.idle_timeout_s)
        self._cards_timeouts = Timeouts(config.connect_timeout_s, CARDS_LIMIT_S, CARDS_LIMIT_S)
        self._attempts = config.attempts
        self._worker_limit = config.max_worker_inflight
        self._bodies = bodies
        self._listings: dict[str, _Listing] = {}

    async def forward(
        self, method: str, path: str, body: Body, headers: Mapping[str, str], client: Client
    ) -> Forwarded:
        """A worker's answer. A worker that fails before the client has a byte is replaced by another."""
        content_type = headers.get("content-type", "")
        model, body = await self._bodies.forwarded(content_type, body, client)
        check_use(client, model)
        if body and not is_form(content_type):
            headers = {**headers, "content-type": "application/json"}  # the worker must read it as it was read here
        if not self._candidates(model):
            if model:
                check_model(model, self._registry.views())
            raise NoWorkerError(f"no worker can serve model {model!r} now")
        bill = _Bill(self._state, client, 0 if is_form(content_type) else self._state.tokens.estimate(model, len(body)))
        permit = await self._permit(model, client, bill)
        try:
            return await self._first_success(permit, _Asked(method, path, _parts(body), headers, model), bill)
        except BaseException as exc:
            permit.release()
            # A request that an engine may have computed is charged, whoever ended it.
            if isinstance(exc, NoWorkerError) or (isinstance(exc, LegError) and _cost_nothing(exc)):
                bill.settle(0)
            raise

    async def _permit(self, model: str, client: Client, bill: _Bill) -> Permit:
        def fits() -> bool:
            able = self._candidates(model)
            return not able or any(view.inflight < self._worker_limit for view in able)

        ticket = Ticket(
            tenant=client.tenant,
            weight=client.weight,
            priority=client.priority,
            cost=max(1, bill.estimated_tokens),
            arrived_s=self._state.now(),
            needs=("any worker", model),
            fits=fits,
        )
        try:
            return await self._state.admission.enter(ticket)
        except BaseException:
            bill.settle(0)
            raise

    async def _first_success(self, permit: Permit, asked: _Asked, bill: _Bill) -> Forwarded:
        """Raises the last LegError where no other worker may be tried."""
        failure: LegError | None = None
        self._state.retries.deposit()
        for view in self._candidates(asked.model)[: self._attempts]:
            if failure is not None and not self._may_retry(failure):
                break
            asked_s = self._state.now()
            try:
                return await self._ask(permit, view, asked, bill)
            except LegError as exc:
                failure = exc
                self._state.health.leg_failed(_leg(view), exc, view.id, asked_s)
                if ROWS[_leg(view), exc.phase, exc.cause].whole not in (
                    ClientGets.ANOTHER,
                    ClientGets.ANOTHER_OR_QUEUE,
                ):
                    break
        raise failure or NoWorkerError(f"no worker can serve model {asked.model!r} now")

    def _may_retry(self, failure: LegError) -> bool:
        # An overloaded worker gets no requests for a while, so this retry needs no budget.
        may = failure.cause is Cause.OVERLOADED or self._state.retries.take()
        self._state.metrics.retries.labels("retried" if may else "no_budget").inc()
        return may

    async def _ask(self, permit: Permit, view: WorkerView, asked: _Asked, bill: _Bill) -> Forwarded:
        """The answer from its first bytes on; LegError for one that the client must not see."""
        answer: Answer | None = None
        self._registry.reserve(view.id, 0)
        try:
            answer = await self._upstream.ask(
                Call(view.worker),
                asked.path,
                method=asked.method,
                body=asked.body,
                headers=asked.headers,
                timeouts=self._timeouts,
            )
            _check(answer, view)
            first = await answer.chunk()
        except BaseException:
            self._registry.release(view.id)
            if answer is not None:
                answer.close()
            raise
        answer.reached_the_client()

        def release(_: object) -> None:
            self._registry.release(view.id)
            answer.close()
            permit.release()

        task = asyncio.current_task()
        assert task is not None, "runs in the request's task"
        # The client may leave before the first chunk is asked for, when a generator's `finally` would never run.
        task.add_done_callback(release)
        kept = {"Content-Type": answer.content_type, "Content-Encoding": answer.content_encoding}
        headers = {name: value for name, value in kept.items() if value}
        return Forwarded(answer.status, headers, self._chunks(view, answer, first, bill))

    async def _chunks(self, view: WorkerView, answer: Answer, first: bytes, bill: _Bill) -> AsyncIterator[bytes]:
        asked_s, data = self._state.now(), first
        while data:
            bill.used.observe(data)
            yield data
            try:
                data = await answer.chunk()
            except LegError as exc:
                self._state.health.leg_failed(_leg(view), exc, view.id, asked_s)
                raise
        used = bill.used.tokens if answer.status == 200 else 0
        bill.settle(used)
        if used:  # an answer without a count used no engine, and is no proof of its health
            self._state.health.succeeded(view.id)

    def _candidates(self, model: str) -> list[WorkerView]:
        able = [
            view for view in self._registry.views() if view.takes_turns(model) or (not model and view.state == "up")
        ]
        blocked = self._state.health.breakers.blocked(self._state.now())
        return sorted(able, key=lambda v: (v.id in blocked, _PREFERENCE[v.role], v.requests, v.name))

    # -- the list of models

    async def models(self, headers: Mapping[str, str], client: Client) -> bytes:
        """`/v1/models` of the fleet: each model that the client may use, once, as one of its workers describes it."""
        listing = self._listing(headers)
        async with listing.lock:
            if self._state.now() >= listing.until_s:
                listing.cards = await self._all_cards(headers)
                listing.until_s = self._state.now() + CARDS_KEPT_S
        if listing.cards is None:
            raise NoWorkerError("no worker can be asked for its models now")
        allowed = [card for model, card in listing.cards.items() if client.may_use(model)]
        return msgspec.json.encode({"object": "list", "data": allowed})

    def _listing(self, headers: Mapping[str, str]) -> _Listing:
        """One for each authorization: workers may want the client's own."""
        now_s = self._state.now()
        self._listings = {who: kept for who, kept in self._listings.items() if kept.is_wanted(now_s)}
        return self._listings.setdefault(headers.get("authorization", ""), _Listing())

    async def _all_cards(self, headers: Mapping[str, str]) -> dict[str, msgspec.Raw] | None:
        """None where no worker has answered."""
        representatives = {view.worker.models: view for view in reversed(self._candidates(""))}
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
                    Call(view.worker), "/v1/models", method="GET", headers=headers, timeouts=self._cards_timeouts
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


def _parts(body: Body) -> bytes | tuple[memoryview]:
    return body if isinstance(body, bytes) else (body.view(),)


def _leg(view: WorkerView) -> Leg:
    return Leg.REPLICA if view.role is Role.REPLICA else Leg.LOCAL


def _check(answer: Answer, view: WorkerView) -> None:
    """LegError for an error about the worker itself, whose text may name peers; errors about the request go out."""
    status = answer.status
    if status == _NOT_IMPLEMENTED:
        failure = answer.failure("the worker has no such endpoint for this model", Cause.REQUEST)
        failure.status = status
        raise failure
    if status in OVERLOAD or status >= 500:
        after_s = answer.retry_after_s
        raise refusal(status, b"", worker=view.id, phase=Phase.HEADERS, retry_after_s=after_s)


def _cost_nothing(exc: LegError) -> bool:
    """Whether no engine can have computed anything: it was not reached, or it refused."""
    return exc.phase is Phase.CONNECT or exc.cause in (Cause.REQUEST, Cause.OVERLOADED, Cause.SERVER)
