"""The data path's canary: a tiny conversation over each pair of P and D, at a low rate.

A transfer can be wedged while both engines' /health is green: D then waits for KV that never comes. A pair that real
turns have just used needs no canary. Where one fails on D, the same question without a hand-over is the control: if D
answers that, it is the pair that is broken, and it is passed over until a canary comes through.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from ..config import ProxyConfig
from ..connectors import CONNECTORS, can_pair, plain_leg
from ..connectors.leg import REQUEST_ID, Handoff, LegRequest, Pair
from ..errors import LegError, PPDError, refusal
from ..failures import Cause, Leg, Phase
from ..fleet.view import WorkerView
from ..fleet.worker import PairId, Role
from ..openai.body_members import encoded
from ..openai.request import Endpoint, Fields
from ..policy import Excluded
from ..routing.state import State
from ..upstream.call import Call, Timeouts
from ..upstream.client import Upstream
from .worker_health import Key

LIMIT_S = 10.0  # of each leg
LOOK_EVERY_S = 1.0
_TRIED_AGAIN = ("ok", "wedged", "overloaded")  # after these the next try is a canary's too
PROMPT_WORDS = 160  # more tokens than the largest KV block: less than a block is not handed over


@dataclass(frozen=True, slots=True)
class Flight:
    """One pair, and the model that both serve."""

    prefill: WorkerView
    decode: WorkerView
    model: str

    @property
    def pair(self) -> PairId:
        return (self.prefill.id, self.decode.id)

    @property
    def keys(self) -> tuple[Key, ...]:
        return (*self.pair, self.pair)


class Canary:
    """Sends them, one at a time, while `run` runs."""

    def __init__(self, config: ProxyConfig, state: State, upstream: Upstream) -> None:
        self._interval_s = config.canary_interval_s
        self._state = state
        self._upstream = upstream
        self._headers = {"content-type": "application/json"}
        if config.worker_api_key:
            self._headers["authorization"] = f"Bearer {config.worker_api_key}"
        self._timeouts = Timeouts(config.connect_timeout_s, LIMIT_S, LIMIT_S)
        self._flown_s: dict[PairId, float] = {}
        self._left_to_turns: set[PairId] = set()  # what the last canary over them could not find out
        self.on_flown: Callable[[Collection[PairId], Collection[PairId]], None] | None = None

    def passed_over(self, now_s: float) -> Excluded:
        """Whom turns do without: what breakers say, and pairs that the canary is to try before any turn does.

        A turn that tries whether KV moves again waits for its first event as long as a turn may, and its client too.
        """
        breakers = self._state.health.breakers
        blocked, states = breakers.blocked(now_s), breakers.states(now_s)
        return blocked | ((self._flown_s.keys() - self._left_to_turns) & states.keys()) if states else blocked

    @property
    def flown(self) -> tuple[Collection[PairId], Collection[PairId]]:
        """The pairs that were tried, and those of them that turns are to try."""
        return self._flown_s.keys(), self._left_to_turns

    def adopt(self, tried: Iterable[PairId], left_to_turns: Iterable[PairId]) -> None:
        """Another process of this proxy sends them."""
        self._flown_s = dict.fromkeys(tried, self._state.now())
        self._left_to_turns = set(left_to_turns)

    async def run(self) -> None:
        while self._interval_s > 0:
            await asyncio.sleep(LOOK_EVERY_S)
            for flight in self._due():
                if self._is_passed_over(flight):  # meanwhile
                    continue
                result = await self.fly(flight)
                self._state.metrics.canaries.labels(result).inc()
            if self.on_flown is not None:
                self.on_flown(*self.flown)

    def _due(self) -> list[Flight]:
        now_s = self._state.now()
        flights = pairs(self._state.registry.views())
        known = {flight.pair for flight in flights}
        self._flown_s = {pair: at_s for pair, at_s in self._flown_s.items() if pair in known}
        self._left_to_turns &= known
        return [flight for flight in flights if not self._is_passed_over(flight) and self._is_due(flight.pair, now_s)]

    def _is_passed_over(self, flight: Flight) -> bool:
        return not self._state.health.breakers.blocked(self._state.now()).isdisjoint(flight.keys)

    def _is_due(self, pair: PairId, now_s: float) -> bool:
        """One on probation is due at once, others an interval after they were seen first or last used."""
        if pair in self._state.health.breakers.states(now_s):
            return True
        last_s = max(self._flown_s.setdefault(pair, now_s), self._state.health.moved_s(pair))
        return now_s - last_s >= self._interval_s

    async def fly(self, flight: Flight) -> str:
        """How it went: ok, or what failed."""
        asked_s = self._flown_s[flight.pair] = self._state.now()
        for key in flight.keys:
            self._state.health.breakers.began(key, asked_s)
        try:
            result = await self._fly(flight, asked_s)
        finally:
            for key in flight.keys:
                self._state.health.breakers.abandoned(key)  # what nothing was found out about
        # Or a pair that no canary can judge, say as its workers want a client's key, would never be used again.
        if result in _TRIED_AGAIN:
            self._left_to_turns.discard(flight.pair)
        else:
            self._left_to_turns.add(flight.pair)
        return result

    async def _fly(self, flight: Flight, asked_s: float) -> str:
        state, health = self._state, self._state.health
        pair, connector = Pair(flight.prefill.worker, flight.decode.worker), CONNECTORS[flight.prefill.worker.connector]
        fields, flight_id = question(flight.model), secrets.token_hex(16)
        try:
            prefill = connector.prefill_leg(Endpoint.COMPLETIONS, fields, pair, flight_id)
            found = connector.handoff(await self._ask(flight.prefill, prefill), pair)
        except LegError as exc:
            return self._failed(Leg.PREFILL, exc, flight.prefill, asked_s)
        except PPDError:
            return "not_possible"
        health.passed_probation(flight.prefill.id)
        if not isinstance(found, Handoff):
            return "no_handoff"
        if connector.needs_handoff:
            state.ledger.open(flight_id, state.now())
        leg_id = prefill.headers[REQUEST_ID] if connector.shares_request_id else secrets.token_hex(16)
        try:
            leg = connector.decode_leg(Endpoint.COMPLETIONS, fields, pair, leg_id, found)
            await self._ask(flight.decode, leg, once=True)
        except LegError as exc:
            return await self._judge(flight, fields, exc, asked_s)
        state.ledger.close(flight_id)
        health.succeeded(flight.pair)
        health.passed_probation(flight.decode.id)
        return "ok"

    def _failed(self, leg: Leg, exc: LegError, view: WorkerView, asked_s: float) -> str:
        self._state.health.leg_failed(leg, exc, view.id, asked_s)
        return "overloaded" if exc.cause is Cause.OVERLOADED else f"{leg}_failed"

    async def _judge(self, flight: Flight, fields: Fields, failure: LegError, asked_s: float) -> str:
        """Whose fault a D's failure is: the same without a hand-over tells."""
        health = self._state.health
        if failure.cause is Cause.OVERLOADED:
            return self._failed(Leg.LOCAL, failure, flight.decode, asked_s)
        try:
            await self._ask(flight.decode, plain_leg(Endpoint.COMPLETIONS, fields, secrets.token_hex(16)))
        except LegError as exc:
            return self._failed(Leg.LOCAL, exc, flight.decode, asked_s)
        health.passed_probation(flight.decode.id)
        health.breakers.failed(flight.pair, self._state.now(), began_s=asked_s, at_once=True)
        return "wedged"

    async def _ask(self, view: WorkerView, leg: LegRequest, *, once: bool = False) -> bytes:
        call = Call(view.worker, once=once)
        self._state.registry.reserve(view.id, 0)
        try:
            async with (
                asyncio.timeout(self._timeouts.connect_s + LIMIT_S),
                self._upstream.answer(
                    call, leg.path, body=leg.body, headers={**self._headers, **leg.headers}, timeouts=self._timeouts
                ) as answer,
            ):
                body = await answer.body()
                if answer.status != 200:
                    raise refusal(
                        answer.status, body, worker=view.id, phase=Phase.HEADERS, retry_after_s=answer.retry_after_s
                    )
                return body
        except TimeoutError as exc:
            raise call.error("the canary was not answered in time", Cause.TIMEOUT) from exc
        finally:
            self._state.registry.release(view.id)


def pairs(views: tuple[WorkerView, ...]) -> list[Flight]:
    """Every P and D that could hand over now, with a model that both serve."""
    up = [view for view in views if view.state == "up"]
    return [
        Flight(prefill, decode, min(shared))
        for prefill in up
        for decode in up
        if prefill.role is Role.PREFILL
        and decode.role is Role.DECODE
        and can_pair(prefill.worker, decode.worker)
        and (shared := set(prefill.worker.models) & set(decode.worker.models))
    ]


def question(model: str) -> Fields:
    """A prompt that no cache holds, and one token of an answer."""
    words = " ".join(secrets.token_hex(2) for _ in range(PROMPT_WORDS))
    body: Mapping[str, object] = {"model": model, "prompt": words, "max_tokens": 1, "temperature": 0}
    return {name: encoded(value) for name, value in body.items()}
