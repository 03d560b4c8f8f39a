"""Requests outside of conversations: forwarded to a worker that serves their model, or to another if that one fails.

JSON objects lose the members that end at the proxy; multipart forms go on as they are. A request that names no model
goes to the least loaded worker of the fleet.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator, Collection, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from typing import Self

from ..admission.auth import check_use
from ..admission.gate import Permit
from ..admission.keys import Client
from ..admission.queue import Ticket
from ..admission.rate_limits import with_limits
from ..bodies.body_reader import Body, BodyReader
from ..config import ProxyConfig
from ..connectors import answers_alone
from ..errors import LOOP, OVERLOAD, LegError, NoWorkerError, Refused, RequestError, refusal
from ..failures import ROWS, Cause, Leg, Phase
from ..fleet.view import WorkerView, check_model
from ..fleet.worker import Role, WorkerId
from ..health.doubts import NO_DOUBTS, Doubts, may_name_urls
from ..health.poisoned_prompts import is_loss, life_of
from ..openai.form import is_form
from ..routing.failed_attempts import FailedAttempts, workers_lost
from ..routing.state import State
from ..sessions.prefix_chain import PrefixEnd
from ..sessions.text_kinds import Kind
from ..upstream.call import Answer, Call, Timeouts
from ..upstream.client import Upstream
from ..upstream.relayed_headers import RelayedHeaders

log = logging.getLogger(__name__)

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
    "/v2/embed",
    "/v1/chat/completions/batch",
    "/v1/messages/count_tokens",
)

# What an engine answers without its model, so that it needs no KV for it.
_UNCOMPUTED = frozenset(("/tokenize", "/detokenize", "/v1/messages/count_tokens"))

# Names only: with dots or escapes a path could turn into another endpoint's on its way.
AUDIO = re.compile(r"/v1/audio(?:/[A-Za-z0-9_-]+)+")

ONLY = "only_workers"  # in the `state` of an ASGI scope: the workers that a gateway lets the request go to

# An engine's word for "this model has no such endpoint": the request's fault, not the worker's.
_NOT_IMPLEMENTED = 501
_NOT_FOUND = 404
_BAD_REQUEST = 400

# Replicas first; P last, as its queue is the fleet's TTFT. An E only encodes.
_PREFERENCE = {Role.REPLICA: 0, Role.DECODE: 1, Role.PREFILL: 2}


@dataclass(slots=True)
class Forwarded:
    """A worker's answer; status and headers are the worker's own."""

    status: int
    headers: dict[str, str]
    chunks: AsyncIterator[bytes]
    model: str
    worker: str  # its name


@dataclass(frozen=True, slots=True)
class _Asked:
    method: str
    path: str
    body: bytes | memoryview
    headers: Mapping[str, str]
    model: str
    computes: bool  # see `needs_model`


# A member of JSON: inside a string its quotes would be escaped.
_USED = re.compile(rb'"total_tokens"\s{0,8}:\s{0,8}([0-9]{1,12})')
_USED_BYTES = 64  # at least as many as match


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
        self.client = client
        state.rate_limits.take(client, estimated_tokens, state.now())

    def settle(self, tokens: int) -> None:
        self._state.rate_limits.settle(self.client, self.estimated_tokens, tokens, self._state.now())


class Passthrough:
    """Forwards requests."""

    _only: Collection[WorkerId] | None = None

    def __init__(self, config: ProxyConfig, state: State, upstream: Upstream, bodies: BodyReader) -> None:
        self._state = state
        self._registry = state.registry
        self._upstream = upstream
        self._timeouts = Timeouts(config.connect_timeout_s, config.answer_timeout_s, config.idle_timeout_s)
        self._header_rules = RelayedHeaders(config.relay_headers)
        self._attempts = config.attempts
        self._worker_limit = config.max_worker_inflight
        self._bodies = bodies

    def within(self, only: Collection[WorkerId] | None) -> Self:
        """The same, among these workers alone; None: among all."""
        found = copy(self)
        found._only = only
        return found

    async def forward(
        self, method: str, path: str, body: Body, headers: Mapping[str, str], client: Client
    ) -> Forwarded:
        """A worker's answer. A worker that fails before the client has a byte is replaced by another."""
        if not path.isascii() or not path.isprintable() or " " in path:  # it becomes a line of the worker's request
            raise RequestError("the request's target must be printable ASCII without spaces")
        content_type = headers.get("content-type", "")
        model, body = await self._bodies.forwarded(content_type, body, client, path.partition("?")[0])
        check_use(client, model)
        if body and not is_form(content_type):
            headers = {**headers, "content-type": "application/json"}  # the worker must read it as it was read here
        computes = needs_model(path.partition("?")[0])
        if not self.candidates(model, computes=computes) and not self._down(model):
            if model:
                check_model(model, self._registry.views())
            raise NoWorkerError(f"no worker can serve model {model!r} now")
        added = (Kind.UNREAD, len(body)) if body and not is_form(content_type) else ()
        estimated = self._state.tokens.estimate(model, added)
        bill = _Bill(self._state, client, estimated)
        permit = await self._permit(model, client, bill, computes=computes)
        try:
            asked = _Asked(method, path, _bytes_of(body), headers, model, computes)
            return await self._first_success(permit, asked, bill)
        except BaseException as exc:
            permit.release()
            # A request that an engine may have computed is charged, whoever ended it.
            if isinstance(exc, NoWorkerError | Refused) or (isinstance(exc, LegError) and _cost_nothing(exc)):
                bill.settle(0)
            raise

    async def _permit(self, model: str, client: Client, bill: _Bill, *, computes: bool) -> Permit:
        def fits() -> bool:
            able = self.candidates(model, computes=computes)
            if not able:
                return not self._down(model)
            return not all(view.is_full(self._worker_limit) for view in able)

        ticket = Ticket(
            tenant=client.tenant,
            weight=client.weight,
            priority=client.priority,
            cost=max(1, bill.estimated_tokens),
            arrived_s=self._state.now(),
            needs=("any worker that computes" if computes else "any worker", model),
            fits=fits,
        )
        try:
            return await self._state.admission.enter(ticket)
        except BaseException:
            bill.settle(0)
            raise

    async def _first_success(self, permit: Permit, asked: _Asked, bill: _Bill) -> Forwarded:
        """Raises the last LegError where no other worker may be tried."""
        state, failed, prompt = self._state, FailedAttempts(self._attempts), cache(partial(self._prompt, asked))
        doubts = NO_DOUBTS
        state.retries.deposit()
        for view in self.candidates(asked.model, computes=asked.computes):
            if state.poisoned.suspects:
                state.poisoned.check(prompt(), state.now())
            if failed.last is not None:
                if view.id in state.health.breakers.busy(state.now()):
                    continue
                result = failed.pay(state.retries)
                state.metrics.retries.labels(result).inc()
                if result == "no_budget":
                    break
            asked_s = state.now()
            try:
                forwarded = await self._ask(permit, view, asked, bill)
            except LegError as exc:
                found = await self._upstream.examine(exc, view.worker)
                doubts = Doubts(may_name_urls(asked.body)) if failed.last is None else doubts
                doubts.count(found, partial(self._count, view, found, asked, asked_s))
                row = ROWS[_leg(view), found.phase, found.cause]
                may = failed.book(_leg(view), view.id, found, row, row.whole)
                if is_loss(found) and state.poisoned.lost(prompt(), life_of(view), state.now()):
                    raise workers_lost(found) from exc
                if not may:
                    break
            else:
                if forwarded.status < _BAD_REQUEST:  # else it may be the other one's word for the same
                    doubts.answered()
                if state.poisoned.suspects:
                    state.poisoned.answered(prompt())
                return forwarded
        if failed.last is not None:
            raise failed.error()
        raise NoWorkerError(f"no worker can serve model {asked.model!r} now")

    def _count(self, view: WorkerView, exc: LegError, asked: _Asked, asked_s: float) -> None:
        """Against the worker that failed."""
        self._state.health.leg_failed(_leg(view), exc, view.id, asked_s)
        if exc.cause is Cause.UNKNOWN_MODEL:
            self._registry.lost_model(view.id, asked.model)

    def _prompt(self, asked: _Asked) -> PrefixEnd:
        """What names the request among those that end workers."""
        hasher = self._state.hasher
        return PrefixEnd(hasher.key(b"Q", asked.path, hasher.digest(asked.body)))

    async def _ask(self, permit: Permit, view: WorkerView, asked: _Asked, bill: _Bill) -> Forwarded:
        """The answer from its first bytes on; LegError for one that the client must not see."""
        answer: Answer | None = None
        used = self._registry.reserve(view.id)
        try:
            answer = await self._upstream.ask(
                Call(view.worker),
                asked.path,
                method=asked.method,
                body=(asked.body,),
                headers=asked.headers,
                timeouts=self._timeouts,
            )
            _check(answer, view)
            by_s = math.inf if answer.is_event_stream else answer.whole_by_s
            if answer.status == _NOT_FOUND:
                first = await _known(answer, view)
            else:
                first = await answer.chunk(by_s=by_s)
        except BaseException:
            self._registry.release(view.id, used)
            if answer is not None:
                answer.close()
            raise
        relayed = answer.relayed(self._header_rules)
        answer.reached_the_client()

        def release(_: object) -> None:
            self._registry.release(view.id, used)
            answer.close()
            permit.release()

        task = asyncio.current_task()
        assert task is not None, "runs in the request's task"
        # The client may leave before the first chunk is asked for, when a generator's `finally` would never run.
        task.add_done_callback(release)
        kept = {"Content-Type": answer.content_type, "Content-Encoding": answer.content_encoding}
        headers = {name: value for name, value in kept.items() if value}
        limits = self._state.rate_limits.headers(bill.client, self._state.now())
        headers = with_limits(relayed, limits) | headers if limits else relayed | headers
        return Forwarded(answer.status, headers, self._chunks(view, answer, first, by_s, bill), asked.model, view.name)

    async def _chunks(
        self, view: WorkerView, answer: Answer, first: bytes, by_s: float, bill: _Bill
    ) -> AsyncIterator[bytes]:
        asked_s, data = self._state.now(), first
        while data:
            bill.used.observe(data)
            yield data
            try:
                data = await answer.chunk(by_s=by_s)
            except LegError as exc:
                self._state.health.leg_failed(_leg(view), exc, view.id, asked_s)
                log.warning("a passed answer of %s %s broke off: %s at %s", view.name, view.id, exc.cause, exc.phase)
                raise
        used = bill.used.tokens if answer.status == 200 else 0
        bill.settle(used)
        if used:  # an answer without a count used no engine, and is no proof of its health
            self._state.health.succeeded(view.id)

    def candidates(self, model: str = "", *, computes: bool = False) -> list[WorkerView]:
        """The workers that can be asked, best first; computes: that can compute something without a peer."""
        able = [
            view
            for view in self._allowed()
            if view.role in _PREFERENCE
            and (view.takes_turns(model) or (not model and view.state == "up"))
            and (not computes or view.role is Role.REPLICA or answers_alone(view.worker))
        ]
        blocked = self._state.health.breakers.blocked(self._state.now())
        return sorted(able, key=lambda v: (v.id in blocked, _PREFERENCE[v.role], v.requests, v.name))

    def _down(self, model: str) -> bool:
        """Whether workers that are down would serve the model: requests wait for them."""
        return any(view.may_return(model) or (not model and view.state == "down") for view in self._allowed())

    def _allowed(self) -> list[WorkerView]:
        return [view for view in self._registry.views() if self._only is None or view.id in self._only]


def needs_model(path: str) -> bool:
    """Whether an engine computes something for a request that is passed through, for which it may need KV."""
    return (path in ENDPOINTS and path not in _UNCOMPUTED) or AUDIO.fullmatch(path) is not None


def _bytes_of(body: Body) -> bytes | memoryview:
    return body if isinstance(body, bytes) else body.view()


def _leg(view: WorkerView) -> Leg:
    return Leg.REPLICA if view.role is Role.REPLICA else Leg.LOCAL


def _check(answer: Answer, view: WorkerView) -> None:
    """LegError for an error about the worker itself, whose text may name peers; errors about the request go out."""
    status = answer.status
    if status == _NOT_IMPLEMENTED:
        failure = answer.failure("the worker has no such endpoint for this model", Cause.REQUEST)
        failure.status = status
        raise failure
    if status != LOOP and (status in OVERLOAD or status >= 500):
        after_s = answer.retry_after_s
        raise refusal(status, b"", worker=view.id, phase=Phase.HEADERS, retry_after_s=after_s)


async def _known(answer: Answer, view: WorkerView) -> bytes:
    """The body of a 404; LegError where it says that the worker no longer has the model."""
    body = await answer.body()
    failure = refusal(_NOT_FOUND, body, worker=view.id, phase=Phase.HEADERS)
    if failure.cause is Cause.UNKNOWN_MODEL:
        raise failure
    return body


def _cost_nothing(exc: LegError) -> bool:
    """Whether no engine can have computed anything: it was not reached, or it refused."""
    return exc.phase is Phase.CONNECT or exc.cause in (Cause.REQUEST, Cause.UNKNOWN_MODEL, Cause.SERVER)
