"""The data path's canary: a tiny conversation over each pair of P and D, at a low rate.

A KV transfer can hang while both engines' /health is green: D then waits for KV that never comes. A pair that real
turns have just used needs no canary. Where the canary fails on D, the control is the same prompt without a handoff:
if D answers that, the pair is broken, and turns avoid it until a canary succeeds.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ..config import ProxyConfig
from ..connectors import CONNECTORS, Connector, answers_alone, can_pair, plain_leg
from ..connectors.leg import Handoff, LegRequest, Pair
from ..errors import LegError, PPDError, refusal
from ..failures import Cause, Leg, Phase
from ..fleet.booking import OpenHandoffs
from ..fleet.registry import Registry
from ..fleet.view import WorkerView
from ..fleet.worker import PairId, Role
from ..leg_moves import LegOrder, Legs, LegsEvent
from ..openai.body_members import encoded
from ..openai.request import Endpoint, Fields
from ..policy import Excluded
from ..runtime.loop_watch import time_limit
from ..runtime.replicated import Replicated
from ..upstream.call import Call, Expiry, Timeouts
from ..upstream.client import Upstream
from ..upstream.two_legs import TwoLegs
from .worker_health import Key, WorkerHealth

LIMIT_S = 10.0  # for each leg
LOOK_EVERY_S = 1.0
TRIALS_A_ROUND = 10  # with more pairs than that in an interval, each is tried less often
PAIRS_A_ROUND = 1000  # looked at
PAIRS_KEPT = 100_000  # of which the last trial is known
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
        handoffs: OpenHandoffs,
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
        self._handoffs = handoffs
        self._now = now
        self._on_result = on_result
        self._headers = {"content-type": "application/json"}
        self._timeouts = Timeouts(config.connect_timeout_s, LIMIT_S, LIMIT_S)
        self._tried_s: dict[PairId, float] = {}  # the longest untried first
        self._known: set[PairId] = set()  # see `_own`
        self._known_s = -math.inf
        self._cursor = -1
        self.left_to_turns: set[PairId] = set()  # the last canary over them could not tell whether they work
        self.replicated: Replicated[Collection[PairId]] | None = None  # changed: `left_to_turns`

    def passed_over(self, now_s: float) -> Excluded:
        """What turns avoid: what breakers block, and half-open pairs that a canary tries before any turn does.

        A turn that tries whether KV moves again may wait as long as its timeout, and its client with it.
        """
        strangers = self._health.strangers.pairs
        if self._interval_s > 0:  # else nothing would prove them
            strangers |= self._health.strangers.unproven
        if not self._breakers.circuits:  # nearly always
            return strangers
        blocked, states = self._breakers.blocked(now_s) | strangers, self._breakers.states(now_s)
        return blocked | ((self._own(now_s) - self.left_to_turns) & states.keys()) if states else blocked

    def adopt(self, left_to_turns: Iterable[PairId], unproven: Iterable[PairId]) -> None:
        """The state of the process that sends the canaries."""
        self.left_to_turns = set(left_to_turns)
        self._health.strangers.unproven = frozenset(unproven)

    async def run(self) -> None:
        while self._interval_s > 0:
            await asyncio.sleep(LOOK_EVERY_S)
            for trial in self._due():
                if self._is_passed_over(trial):  # since `_due` was asked
                    continue
                self._on_result(await self.run_trial(trial))
            if self.replicated is not None:
                self.replicated.changed(self.left_to_turns)

    def _due(self) -> list[Trial]:
        """Unproven pairs, half-open ones, then those of the next few pairs that nothing has used for an interval.

        Bounded, however many pairs there are: the trials of a round run one after the other.
        """
        now_s, views = self._now(), [view for view in self._registry.views() if view.state == "up"]
        judged = {trial.pair: trial for trial in (*self._unproven(), *self._with_breaker(now_s))}
        known = judged.keys()
        self.left_to_turns &= known
        due = [trial for trial in judged.values() if not self._is_passed_over(trial)][:TRIALS_A_ROUND]
        for trial in self._next_pairs(views):
            if trial.pair not in known and self._is_due(trial, now_s) and not self._is_passed_over(trial):
                due.append(trial)
            if len(due) >= TRIALS_A_ROUND:
                break
        return due

    def _unproven(self) -> Iterator[Trial]:
        """Those that a canary can try; none is to be waited for by others."""
        strangers = self._health.strangers
        for pair in strangers.unproven:
            prefill, decode = map(self._registry.view, pair)
            if prefill and decode and (trial := possible_trial(prefill, decode)):
                yield trial
            elif not prefill or not decode or prefill.state == decode.state == "up":
                strangers.proven(pair)

    def _own(self, now_s: float) -> set[PairId]:
        """The pairs with a breaker that a canary can try; as they were at most `LOOK_EVERY_S` ago."""
        if self._interval_s > 0 and now_s - self._known_s >= LOOK_EVERY_S:
            self._known, self._known_s = {trial.pair for trial in self._with_breaker(now_s)}, now_s
        return self._known

    def _with_breaker(self, now_s: float) -> Iterator[Trial]:
        for key in self._breakers.states(now_s):
            if isinstance(key, tuple):
                prefill, decode = map(self._registry.view, key)
                if prefill and decode and (trial := possible_trial(prefill, decode)):
                    yield trial

    def _next_pairs(self, views: Sequence[WorkerView]) -> Iterator[Trial]:
        """Goes round all pairs, `PAIRS_A_ROUND` at a time."""
        prefills = [view for view in views if view.role is Role.PREFILL]
        decodes = [view for view in views if view.role is Role.DECODE]
        count = len(prefills) * len(decodes)
        for _ in range(min(count, PAIRS_A_ROUND)):
            self._cursor = (self._cursor + 1) % count
            row, column = divmod(self._cursor, len(decodes))
            if trial := possible_trial(prefills[row], decodes[column]):
                yield trial
        if len(self._tried_s) > PAIRS_KEPT:
            self._tried_s = dict(islice(self._tried_s.items(), PAIRS_KEPT // 2, None))

    def _is_passed_over(self, trial: Trial) -> bool:
        if trial.pair in self._health.strangers.pairs:
            return True
        return not self._breakers.blocked(self._now()).isdisjoint(trial.keys)

    def _is_due(self, trial: Trial, now_s: float) -> bool:
        """An interval after both workers joined, and after the pair was last used."""
        last_s = max(
            self._tried_s.get(trial.pair, -math.inf),
            self._health.moved_s(trial.pair),
            trial.prefill.since_s,
            trial.decode.since_s,
        )
        return now_s - last_s >= self._interval_s

    async def run_trial(self, trial: Trial) -> str:
        """The result: ok, or what failed."""
        self._tried_s.pop(trial.pair, None)
        asked_s = self._tried_s[trial.pair] = self._now()
        for key in trial.keys:
            self._breakers.began(key, asked_s)
        try:
            result = await self._converse(trial, asked_s)
        finally:
            for key in trial.keys:
                self._breakers.abandoned(key, asked_s)  # those that the trial proved nothing about
        # Else a pair that no canary can judge, say because its workers want a client's key, is never used again.
        if result != "overloaded":  # after which it is tried again; a pair that is wedged has its breaker
            self._health.strangers.proven(trial.pair)
        if result in _TRIED_AGAIN:
            self.left_to_turns.discard(trial.pair)
        else:
            self.left_to_turns.add(trial.pair)
        return result

    async def _converse(self, trial: Trial, asked_s: float) -> str:
        health = self._health
        connector = CONNECTORS[trial.prefill.worker.connector]
        if connector.order.is_joint:
            return await self._converse_together(trial, connector, asked_s)
        pair = Pair(trial.prefill.worker, trial.decode.worker, connector.new_key())
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
            self._handoffs.open(trial_id, self._now())
        try:
            leg = connector.decode_leg(Endpoint.COMPLETIONS, fields, pair, secrets.token_hex(16), found)
            await self._ask(Call(trial.decode.worker, once=True, expiry=expiry), leg)
        except LegError as exc:
            if exc.cause is Cause.STALE_HANDOFF and exc.phase is Phase.CONNECT:
                return "stale_handoff"
            return await self._judge(trial, fields, exc, asked_s)
        self._handoffs.close(trial_id)
        health.succeeded(trial.pair)
        health.close_half_open(trial.decode.id)
        return "ok"

    async def _converse_together(self, trial: Trial, connector: Connector, asked_s: float) -> str:
        fields, pair = question(trial.model), Pair(trial.prefill.worker, trial.decode.worker, connector.new_key())
        to_p = connector.prefill_leg(Endpoint.COMPLETIONS, fields, pair, secrets.token_hex(16))
        to_d = connector.decode_leg(Endpoint.COMPLETIONS, fields, pair, secrets.token_hex(16), None)
        waits = connector.order is LegOrder.D_FIRST

        async def prefilled() -> LegsEvent:
            await self._ask(Call(pair.prefill, once=True), to_p)
            return LegsEvent.HANDED_OVER  # as D's answer tells

        legs = TwoLegs(Legs(connector.order), prefilled(), self._ask(Call(pair.decode, once=True), to_d))
        try:
            await legs.answer()
        except LegError as exc:
            if exc.worker == trial.prefill.id and not (waits and (exc.phase, exc.cause) == (Phase.SENT, Cause.TIMEOUT)):
                return self._failed(Leg.PREFILL, exc, trial.prefill, asked_s)
            return await self._judge(trial, fields, exc, asked_s)
        finally:
            legs.close()
        self._health.close_half_open(trial.prefill.id)
        self._health.succeeded(trial.pair)
        self._health.close_half_open(trial.decode.id)
        return "ok"

    def _failed(self, leg: Leg, exc: LegError, view: WorkerView, asked_s: float) -> str:
        self._health.leg_failed(leg, exc, view.id, asked_s)
        return "overloaded" if exc.cause is Cause.OVERLOADED else f"{leg}_failed"

    async def _judge(self, trial: Trial, fields: Fields, failure: LegError, asked_s: float) -> str:
        """The control: whether D or the pair is at fault for D's failure. The pair, of a D that needs a P."""
        if failure.cause is Cause.OVERLOADED:
            return self._failed(Leg.LOCAL, failure, trial.decode, asked_s)
        if answers_alone(trial.decode.worker):
            try:
                plain = plain_leg(Endpoint.COMPLETIONS, fields, secrets.token_hex(16), trial.decode.worker.engine)
                await self._ask(Call(trial.decode.worker), plain)
            except LegError as exc:
                return self._failed(Leg.LOCAL, exc, trial.decode, asked_s)
            self._health.close_half_open(trial.decode.id)
        self._health.wedged(trial.pair, asked_s)
        return "wedged"

    async def _ask(self, call: Call, leg: LegRequest) -> bytes:
        worker = call.worker_id
        used = self._registry.reserve(worker)
        try:
            async with (
                time_limit(self._timeouts.connect_s + LIMIT_S),
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
            self._registry.release(worker, used)


def possible_trial(prefill: WorkerView, decode: WorkerView) -> Trial | None:
    """A trial of this P and D, if they can hand over now and both serve a model."""
    if prefill.state != "up" or decode.state != "up" or not can_pair(prefill.worker, decode.worker):
        return None
    if decode.worker.has_sidecar:  # it lets no handoff through
        return None
    shared = set(prefill.worker.models) & set(decode.worker.models)
    return Trial(prefill, decode, min(shared)) if shared else None


def question(model: str) -> Fields:
    """A prompt that no cache holds, and one token of an answer."""
    words = " ".join(secrets.token_hex(2) for _ in range(PROMPT_WORDS))
    body: Mapping[str, object] = {"model": model, "prompt": words, "max_tokens": 1, "temperature": 0}
    return {name: encoded(value) for name, value in body.items()}
