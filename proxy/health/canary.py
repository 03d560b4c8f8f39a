"""The data path's canary: a tiny conversation over each pair of P and D, at a low rate.

A KV transfer can hang while both engines' /health is green: D then waits for KV that never comes. A pair that real
turns have just used needs no canary. Where the canary fails on D, the control is the same prompt without a handoff:
if D answers that, the pair is broken, and turns avoid it until a canary succeeds.
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
from ..fleet.booking import Ledger
from ..fleet.registry import Registry
from ..fleet.view import WorkerView
from ..fleet.worker import PairId, Role
from ..openai.body_members import encoded
from ..openai.request import Endpoint, Fields
from ..policy import Excluded
from ..runtime.replicated import Replicated
from ..upstream.call import Call, Expiry, Timeouts
from ..upstream.client import Upstream
from .worker_health import Key, WorkerHealth

LIMIT_S = 10.0  # for each leg
LOOK_EVERY_S = 1.0
_TRIED_AGAIN = ("ok", "wedged", "overloaded")  # after these results the next trial is a canary's too
PROMPT_WORDS = 160  # more tokens than the largest KV block: less than a block is not handed over


@dataclass(frozen=True, slots=True)
class Trial:
    """One pair, and a model that both serve."""

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
    """Tries pairs, one at a time, while `run` runs."""

    def __init__(
        self,
        config: ProxyConfig,
        upstream: Upstream,
        *,
        registry: Registry,
        health: WorkerHealth,
        ledger: Ledger,
        now: Callable[[], float],
        on_result: Callable[[str], None],
    ) -> None:
        """on_result(result of a trial): for metrics."""
        self._interval_s = config.canary_interval_s
        self._handoff_max_age_s = config.handoff_max_age_s
        self._upstream = upstream
        self._registry = registry
        self._health = health
        self._breakers = health.breakers
        self._ledger = ledger
        self._now = now
        self._on_result = on_result
        self._headers = {"content-type": "application/json"}
        if config.worker_api_key:
            self._headers["authorization"] = f"Bearer {config.worker_api_key}"
        self._timeouts = Timeouts(config.connect_timeout_s, LIMIT_S, LIMIT_S)
        self._tried_s: dict[PairId, float] = {}
        self._left_to_turns: set[PairId] = set()  # the last canary over them could not tell whether they work
        self.replicated: Replicated[Collection[PairId], Collection[PairId]] | None = None  # changed: as `tried`

    def passed_over(self, now_s: float) -> Excluded:
        """What turns avoid: what breakers block, and half-open pairs that a canary tries before any turn does.

        A turn that tries whether KV moves again may wait as long as its timeout, and its client with it.
        """
        blocked, states = self._breakers.blocked(now_s), self._breakers.states(now_s)
        return blocked | ((self._tried_s.keys() - self._left_to_turns) & states.keys()) if states else blocked

    @property
    def tried(self) -> tuple[Collection[PairId], Collection[PairId]]:
        """The pairs that canaries have tried, and those of them that turns may try."""
        return self._tried_s.keys(), self._left_to_turns

    def adopt(self, tried: Iterable[PairId], left_to_turns: Iterable[PairId]) -> None:
        """The state of the process that sends the canaries."""
        self._tried_s = dict.fromkeys(tried, self._now())
        self._left_to_turns = set(left_to_turns)

    async def run(self) -> None:
        while self._interval_s > 0:
            await asyncio.sleep(LOOK_EVERY_S)
            for trial in self._due():
                if self._is_passed_over(trial):  # since `_due` was asked
                    continue
                self._on_result(await self.run_trial(trial))
            if self.replicated is not None:
                self.replicated.changed(*self.tried)

    def _due(self) -> list[Trial]:
        now_s = self._now()
        trials = possible_trials(self._registry.views())
        known = {trial.pair for trial in trials}
        self._tried_s = {pair: at_s for pair, at_s in self._tried_s.items() if pair in known}
        self._left_to_turns &= known
        return [trial for trial in trials if not self._is_passed_over(trial) and self._is_due(trial.pair, now_s)]

    def _is_passed_over(self, trial: Trial) -> bool:
        return not self._breakers.blocked(self._now()).isdisjoint(trial.keys)

    def _is_due(self, pair: PairId, now_s: float) -> bool:
        """A half-open pair is due at once, others an interval after they were first seen or last used."""
        if pair in self._breakers.states(now_s):
            return True
        last_s = max(self._tried_s.setdefault(pair, now_s), self._health.moved_s(pair))
        return now_s - last_s >= self._interval_s

    async def run_trial(self, trial: Trial) -> str:
        """The result: ok, or what failed."""
        asked_s = self._tried_s[trial.pair] = self._now()
        for key in trial.keys:
            self._breakers.began(key, asked_s)
        try:
            result = await self._converse(trial, asked_s)
        finally:
            for key in trial.keys:
                self._breakers.abandoned(key)  # those that the trial proved nothing about
        # Else a pair that no canary can judge, say because its workers want a client's key, is never used again.
        if result in _TRIED_AGAIN:
            self._left_to_turns.discard(trial.pair)
        else:
            self._left_to_turns.add(trial.pair)
        return result

    async def _converse(self, trial: Trial, asked_s: float) -> str:
        health = self._health
        pair, connector = Pair(trial.prefill.worker, trial.decode.worker), CONNECTORS[trial.prefill.worker.connector]
        fields, trial_id = question(trial.model), secrets.token_hex(16)
        expiry = Expiry.of(self._upstream.uptime(), self._handoff_max_age_s) if connector.needs_handoff else None
        try:
            prefill = connector.prefill_leg(Endpoint.COMPLETIONS, fields, pair, trial_id)
            found = connector.handoff(await self._ask(Call(trial.prefill.worker), prefill), pair)
        except LegError as exc:
            return self._failed(Leg.PREFILL, exc, trial.prefill, asked_s)
        except PPDError:
            return "not_possible"
        health.close_half_open(trial.prefill.id)
        if not isinstance(found, Handoff):
            return "no_handoff"
        if connector.needs_handoff:
            self._ledger.open(trial_id, self._now())
        leg_id = prefill.headers[REQUEST_ID] if connector.shares_request_id else secrets.token_hex(16)
        try:
            leg = connector.decode_leg(Endpoint.COMPLETIONS, fields, pair, leg_id, found)
            await self._ask(Call(trial.decode.worker, once=True, expiry=expiry), leg)
        except LegError as exc:
            if exc.cause is Cause.STALE_HANDOFF and exc.phase is Phase.CONNECT:
                return "stale_handoff"
            return await self._judge(trial, fields, exc, asked_s)
        self._ledger.close(trial_id)
        health.succeeded(trial.pair)
        health.close_half_open(trial.decode.id)
        return "ok"

    def _failed(self, leg: Leg, exc: LegError, view: WorkerView, asked_s: float) -> str:
        self._health.leg_failed(leg, exc, view.id, asked_s)
        return "overloaded" if exc.cause is Cause.OVERLOADED else f"{leg}_failed"

    async def _judge(self, trial: Trial, fields: Fields, failure: LegError, asked_s: float) -> str:
        """The control: whether D or the pair is at fault for D's failure."""
        if failure.cause is Cause.OVERLOADED:
            return self._failed(Leg.LOCAL, failure, trial.decode, asked_s)
        try:
            plain = plain_leg(Endpoint.COMPLETIONS, fields, secrets.token_hex(16))
            await self._ask(Call(trial.decode.worker), plain)
        except LegError as exc:
            return self._failed(Leg.LOCAL, exc, trial.decode, asked_s)
        self._health.close_half_open(trial.decode.id)
        self._breakers.failed(trial.pair, self._now(), began_s=asked_s, at_once=True)
        return "wedged"

    async def _ask(self, call: Call, leg: LegRequest) -> bytes:
        worker = call.worker_id
        self._registry.reserve(worker, 0)
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
                        answer.status, body, worker=worker, phase=Phase.HEADERS, retry_after_s=answer.retry_after_s
                    )
                return body
        except TimeoutError as exc:
            raise call.error("the canary was not answered in time", Cause.TIMEOUT) from exc
        finally:
            self._registry.release(worker)


def possible_trials(views: tuple[WorkerView, ...]) -> list[Trial]:
    """Every P and D that can hand over now, with a model that both serve."""
    up = [view for view in views if view.state == "up"]
    return [
        Trial(prefill, decode, min(shared))
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
