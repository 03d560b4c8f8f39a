"""Worker health: what failures and successes of legs do to the breakers of workers and of pairs.

Which failure counts, and against whom, is in the table of `failures`. What is the client's own, overload and leaving
count against nobody.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from ..errors import LegError
from ..failures import ROWS, FailureRule, HealthEffect, Leg
from ..fleet.registry import Registry
from ..fleet.worker import PairId, WorkerId
from ..policy import Decision
from .circuit_breaker import Breakers, Circuit

log = logging.getLogger(__name__)

OVERLOAD_S = 1.0  # a worker that names no Retry-After is passed over for this long

Key = WorkerId | PairId


class WorkerHealth:
    """Notes how legs went; `breakers` says who is passed over."""

    def __init__(self, breakers: Breakers[Key], registry: Registry, now: Callable[[], float]) -> None:
        self.breakers = breakers
        self._registry = registry
        self._now = now
        self._moved_s: dict[PairId, float] = {}

    def asked(self, decision: Decision) -> None:
        """A turn takes these workers: where a breaker is half open it is the probe."""
        now_s = self._now()
        for key in keys_of(decision):
            self.breakers.began(key, now_s)

    def began(self, decision: Decision, *, moved: bool) -> None:
        """The answer has begun: P has prefilled, a worker on probation has passed; `moved`: and D has P's KV.

        D's success is complete with its answer only, or one that breaks every stream would never be passed over.
        """
        decode = decision.decode.id
        for key in keys_of(decision):
            if key != decode and (moved or not isinstance(key, tuple)):
                self.succeeded(key)
        self.passed_probation(decode)

    def passed_probation(self, worker: WorkerId) -> None:
        """It has begun an answer: that closes a half-open breaker, and says nothing about failures in a row."""
        if worker in self.breakers.states(self._now()):
            self.succeeded(worker)

    def completed(self, decision: Decision) -> None:
        self.succeeded(decision.decode.id)

    def succeeded(self, key: Key) -> None:
        if isinstance(key, tuple):
            self._moved_s[key] = self._now()
        if self.breakers.succeeded(key, self._now()):
            log.info("%s is asked as before", self._name(key))
            if not isinstance(key, tuple):
                self._registry.recovered(key, self._now())

    def left(self, decision: Decision) -> None:
        """The client left: whatever was being probed is as unknown as before."""
        for key in keys_of(decision):
            self.breakers.abandoned(key)

    def moved_s(self, pair: PairId) -> float:
        """When KV last moved over this pair; minus infinity where it is not known to have."""
        return self._moved_s.get(pair, -math.inf)

    def failed(self, leg: Leg, exc: LegError, decision: Decision, asked_s: float) -> FailureRule:
        """Counts a leg's failure as its row says; `asked_s` is when the leg was asked."""
        row = ROWS[leg, exc.phase, exc.cause]
        if row.health is HealthEffect.PAIR and decision.prefill is not None:
            self._fail((decision.prefill.id, decision.decode.id), exc, asked_s)
        else:
            self._count(row.health, exc, blamed(leg, decision), asked_s)
        self.left(decision)  # it says nothing about the others: whoever was probed may be at once again
        return row

    def leg_failed(self, leg: Leg, exc: LegError, worker: WorkerId, asked_s: float) -> None:
        """The same for a leg that is no turn's: against its worker alone."""
        self._count(ROWS[leg, exc.phase, exc.cause].health, exc, worker, asked_s)

    def adopt(self, key: Key, circuit: Circuit | None) -> None:
        """What another process of this proxy found out."""
        was_open = key in self.breakers.states(self._now())
        self.breakers.adopt(key, circuit)
        if was_open and circuit is not None and circuit.openings == 0 and not isinstance(key, tuple):
            self._registry.recovered(key, self._now())

    def forget(self, worker: WorkerId) -> None:
        """It is gone for good."""
        self.breakers.forget(worker)
        self._moved_s = {pair: at_s for pair, at_s in self._moved_s.items() if worker not in pair}

    def _count(self, effect: HealthEffect, exc: LegError, worker: WorkerId, asked_s: float) -> None:
        match effect:
            case HealthEffect.OPENED:
                self._fail(worker, exc, asked_s, at_once=True)
            case HealthEffect.COUNTED:
                self._fail(worker, exc, asked_s)
            case HealthEffect.PASSED_OVER:
                self.breakers.overloaded(worker, self._now() + (exc.retry_after_s or OVERLOAD_S))

    def _fail(self, key: Key, exc: LegError, asked_s: float, *, at_once: bool = False) -> None:
        if self.breakers.failed(key, self._now(), began_s=asked_s, at_once=at_once):
            log.warning("%s is passed over for a while: %s at %s", self._name(key), exc.cause, exc.phase)

    def _name(self, key: Key) -> str:
        """As operators know it: "worker D2 10.0.0.1:8000", or two of them."""
        if isinstance(key, tuple):
            return f"the pair of {self._name(key[0])} and {self._name(key[1])}"
        view = self._registry.view(key)
        return f"worker {view.name} {key}" if view else f"worker {key}"


def keys_of(decision: Decision) -> tuple[Key, ...]:
    """Whose breakers a decision concerns."""
    decode, prefill = decision.decode.id, decision.prefill
    return (decode,) if prefill is None else (decode, prefill.id, (prefill.id, decode))


def blamed(leg: Leg, decision: Decision) -> WorkerId:
    return decision.prefill.id if leg is Leg.PREFILL and decision.prefill is not None else decision.decode.id
