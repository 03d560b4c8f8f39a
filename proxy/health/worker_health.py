"""Worker health: what legs' failures and successes do to the breakers of workers and of pairs.

The table in `failures` says which failure counts, and against which of them. Overload, a faulty request and a client
that leaves count as no failure.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

from ..connectors.queries import query_of
from ..errors import LegError
from ..failures import ROWS, FailureRule, HealthEffect, Leg
from ..fleet.registry import Registry
from ..fleet.view import WorkerView
from ..fleet.worker import PairId, Role, WorkerId
from ..policy import Decision
from .circuit_breaker import Breakers, Circuit, RetryBudget
from .strangers import Strangers

log = logging.getLogger(__name__)

OVERLOAD_S = 1.0  # how long an overloaded worker without a Retry-After is avoided

_FAILURES = (HealthEffect.OPENED, HealthEffect.COUNTED, HealthEffect.PAIR)

Key = WorkerId | PairId


class WorkerHealth:
    """Records how legs went; `breakers` says what to avoid, and `strangers` what never works."""

    def __init__(
        self, breakers: Breakers[Key], registry: Registry, retries: RetryBudget, now: Callable[[], float]
    ) -> None:
        self._retries = retries
        self.breakers = breakers
        self.strangers = Strangers(registry)
        self._registry = registry
        self._now = now
        self._moved_s: dict[PairId, float] = {}
        self._spoiling: set[WorkerId] = set()  # P whose last answer of a whole turn failed
        self.to_ask_again: set[WorkerId] = set()  # P of failed legs, that may have begun anew: what D is told of them

    def asked(self, decision: Decision, asked_s: float) -> None:
        """A turn is sent to these workers: where a breaker is half open, the turn is its probe.

        asked_s: the attempt's, by which what ends it without a result says whose probe that was.
        """
        if not self.breakers.circuits:
            return
        for key in keys_of(decision):
            self.breakers.began(key, asked_s)

    def asked_later(self, decision: Decision, asked_s: float, now_s: float) -> None:
        """The attempt has waited for encoders, and its own workers are asked only now: from now on that is its time."""
        for key in keys_of(decision):
            self.breakers.postponed(key, asked_s, now_s)

    def began(self, decision: Decision) -> None:
        """The answer has begun: a half-open D or R has passed its probe.

        The failures in a row of a D or R end only with a complete answer, or one that breaks every stream would never
        be avoided.
        """
        self.close_half_open(decision.decode.id)

    def prefilled(self, decision: Decision, asked_s: float, *, moved: bool) -> None:
        """The answer has begun, and P's leg has ended well. moved: D has P's KV; else nothing is known of the pair.

        The failures in a row of a lender do not end here, as it is a D or R, nor those of a P that spoils answers.
        """
        prefill = decision.prefill
        if prefill is None:
            return
        worker = prefill.id
        pair = worker, decision.decode.id
        if decision.lender is None and worker not in self._spoiling:
            self.succeeded(worker)
        else:
            self.close_half_open(worker)
        if moved:
            self.succeeded(pair)
        else:
            self.breakers.abandoned(pair, asked_s)

    def prefill_left(self, decision: Decision, asked_s: float) -> None:
        """P's leg was ended before its answer, as D's was at its end: what it was a probe of is still unknown."""
        for key in keys_of(decision)[1:]:
            self.breakers.abandoned(key, asked_s)

    def ended_on_prefill(self, decision: Decision, asked_s: float) -> None:
        """P's answer was all of it, which proves nothing about D."""
        if decision.prefill is not None:
            self.succeeded(decision.prefill.id)
        self.left(decision, asked_s)

    def close_half_open(self, worker: WorkerId) -> None:
        """The worker has begun an answer: closes its breaker if half open, but does not reset failures in a row."""
        if self.breakers.circuits and worker in self.breakers.states(self._now()):
            self.succeeded(worker)

    def completed(self, decision: Decision) -> None:
        worker = decision.decode.id
        self._spoiling.discard(worker)
        self.succeeded(worker)

    def succeeded(self, key: Key) -> None:
        if isinstance(key, tuple):
            self._moved_s[key] = self._now()
            self.strangers.proven(key)
        if self.breakers.circuits and self.breakers.succeeded(key, self._now()):
            log.info("%s gets turns as before", self._name(key))
            if not isinstance(key, tuple):
                self._registry.recovered(key, self._now())

    def left(self, decision: Decision, asked_s: float) -> None:
        """The client left: what the turn was a probe of is still unknown."""
        for key in keys_of(decision):
            self.breakers.abandoned(key, asked_s)

    def moved_s(self, pair: PairId) -> float:
        """When KV last moved over this pair; minus infinity if never."""
        return self._moved_s.get(pair, -math.inf)

    def failed(self, leg: Leg, exc: LegError, decision: Decision, asked_s: float) -> FailureRule:
        """Counts a turn's leg that failed, by its row of the table; asked_s: when the leg was asked."""
        row = self.count(leg, exc, decision, asked_s)
        # The failure proves nothing about the other workers: they may be probed again at once.
        self.left(decision, asked_s)
        return row

    def count(self, leg: Leg, exc: LegError, decision: Decision, asked_s: float) -> FailureRule:
        """As `failed`, of a turn that leaves its workers by itself: they may have other probes by now."""
        row = ROWS[leg, exc.phase, exc.cause]
        if exc.is_of_pair:
            row = replace(row, health=HealthEffect.PAIR)
        if row.health is HealthEffect.PAIR and decision.prefill is not None:
            self._fail((decision.prefill.id, decision.decode.id), exc, asked_s)
        else:
            self._count(row.health, exc, blamed(leg, decision), asked_s)
        if row.health in _FAILURES and leg is not Leg.PREFILL and decision.decode.role is Role.PREFILL:
            self._spoiling.add(decision.decode.id)
        prefill = decision.prefill
        if row.health in _FAILURES and prefill is not None and query_of(prefill.configured or prefill.worker):
            self.to_ask_again.add(prefill.id)
        return row

    def leg_failed(self, leg: Leg, exc: LegError, worker: WorkerId, asked_s: float) -> None:
        """As `failed`, for a leg that is no turn's: against its worker alone."""
        self._count(ROWS[leg, exc.phase, exc.cause].health, exc, worker, asked_s)

    def wedged(self, pair: PairId, asked_s: float) -> None:
        """A canary that was asked then got no KV from one to the other, though both answer."""
        if self._is_there_since(asked_s, pair):
            self.breakers.failed(pair, self._now(), began_s=asked_s, at_once=True)

    def adopt(self, key: Key, circuit: Circuit | None) -> None:
        """Takes a breaker's state from another process of this proxy."""
        was_open = key in self.breakers.states(self._now())
        self.breakers.adopt(key, circuit)
        if was_open and circuit is not None and circuit.openings == 0 and not isinstance(key, tuple):
            self._registry.recovered(key, self._now())

    def forget(self, worker: WorkerId, since_s: float = math.inf) -> None:
        """The worker is gone for good, or has been another engine `since_s`. Its breakers are of all processes."""
        self.breakers.forget(worker, since_s)
        self.forget_turns(worker, since_s)

    def forget_turns(self, worker: WorkerId, since_s: float = math.inf) -> None:
        """What this process's own turns have told of it, which no other process knows."""
        known = {view.id for view in self._registry.views()}  # others may have gone before a turn of theirs ended
        self._spoiling = (self._spoiling & known) - {worker}
        self._moved_s = {
            pair: at_s
            for pair, at_s in self._moved_s.items()
            if (worker not in pair or at_s >= since_s) and pair[0] in known and pair[1] in known
        }

    def _count(self, effect: HealthEffect, exc: LegError, worker: WorkerId, asked_s: float) -> None:
        match effect:
            case HealthEffect.OPENED:
                if self._fail(worker, exc, asked_s, at_once=True):
                    self._retries.take()  # the price of its death, however many turns go to other workers
            case HealthEffect.COUNTED:
                self._fail(worker, exc, asked_s)
            case HealthEffect.PASSED_OVER:
                now_s = self._now()
                self.breakers.overloaded(worker, now_s + (exc.retry_after_s or OVERLOAD_S), now_s)

    def _fail(self, key: Key, exc: LegError, asked_s: float, *, at_once: bool = False) -> bool:
        """Whether this opened the breaker."""
        if not self._is_there_since(asked_s, key):
            return False
        is_opened = self.breakers.failed(key, self._now(), began_s=asked_s, at_once=at_once)
        if is_opened:
            log.warning("%s gets no turns for a while: %s at %s", self._name(key), exc.cause, exc.phase)
        return is_opened

    def _is_there_since(self, asked_s: float, key: Key) -> bool:
        """Else the leg was asked of another engine at its address, or before it recovered: that tells nothing of it."""
        views = map(self._registry.view, key if isinstance(key, tuple) else (key,))
        return all(view is not None and view.since_s <= asked_s for view in views)

    def _name(self, key: Key) -> str:
        """For operators: "worker D2 10.0.0.1:8000", or "the pair of ... and ..."."""
        if isinstance(key, tuple):
            return f"the pair of {self._name(key[0])} and {self._name(key[1])}"
        view = self._registry.view(key)
        return f"worker {view.name} {key}" if view else f"worker {key}"


def keys_of(decision: Decision) -> tuple[Key, ...]:
    """The keys of the breakers that a decision concerns, first that of the worker that answers."""
    decode, prefill = decision.decode.id, decision.prefill
    return (decode,) if prefill is None else (decode, prefill.id, (prefill.id, decode))


def blamed(leg: Leg, decision: Decision) -> WorkerId:
    return blamed_view(leg, decision).id


def blamed_view(leg: Leg, decision: Decision) -> WorkerView:
    return decision.prefill if leg is Leg.PREFILL and decision.prefill is not None else decision.decode
