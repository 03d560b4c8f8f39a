"""What has failed in one turn so far, and whether, where and at what price another attempt may follow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ..errors import TOO_MANY, WORKERS_LOST, LegError, Overloaded, PPDError, without_frames
from ..failures import Cause, ClientGets, FailureRule, HealthEffect, Leg, Phase
from ..fleet.view import WorkerView
from ..fleet.worker import Role, WorkerId
from ..health.circuit_breaker import RetryBudget
from ..health.worker_health import Key, blamed
from ..telemetry.receipts import LegRecord
from .attempt import Attempt

MOST_ASKED = 2  # requests of one turn to one worker
_ENDS_WITH_THE_FLEET = (Cause.OVERLOADED, Cause.UNKNOWN_MODEL, Cause.UNKNOWN_RESPONSE)  # all may be asked


@dataclass(slots=True)
class FailedAttempts:
    """What has failed in one turn so far: what may follow, without whom, and at what price.

    Failed handoffs and failed answers are limited separately: after too many handoffs the turn is computed without one.
    """

    limit: int
    search_limit: float = math.inf  # workers asked for a stored response
    last: LegError | None = None
    handing_over: int = 0
    answering: int = 0
    owes_retry: bool = False  # the next attempt is paid from the retry budget
    is_moved: bool = False  # by the death of a worker that had been sent the turn
    is_afresh: bool = False  # it needs no budget if D computes alone what P was to compute once more
    computed_by: WorkerId | None = None  # the P whose handoff was too old: the prompt is in its cache
    is_lent: bool = False  # one of them was: a turn is lent once, as the lender itself could answer it
    keys: dict[Key, LegError] = field(default_factory=dict)  # not to be asked again
    refusals: list[LegError] = field(default_factory=list)  # of workers that were overloaded

    def avoid(
        self,
        views: Collection[WorkerView],
        legs: Iterable[LegRecord],
        busy: Iterable[Key],
        blocked: Collection[Key] = (),
        own: WorkerId | None = None,
    ) -> tuple[Key, ...]:
        """Workers and pairs that the next attempt leaves out.

        legs: this turn's; busy: who has said so, to any turn; blocked: who gets no turns now. Of a pair that failed it
        may be P whose KV nobody gets, or D, so others come first while there are some; but not in place of `own`, the
        session's D.
        """
        asked = Counter(WorkerId(leg.address) for leg in legs if _has_had_its_turn(leg))
        spent = (worker for worker, times in asked.items() if times >= MOST_ASKED)
        avoided = dict.fromkeys((*self.keys, *spent, *busy))
        prefills = {view.id for view in views if view.role is Role.PREFILL}
        if self.handing_over >= self.limit:
            avoided |= dict.fromkeys(prefills)
        elif self.computed_by is not None:
            avoided |= dict.fromkeys(prefills - {self.computed_by})
        pairs = [key for key in self.keys if isinstance(key, tuple) and key[0] in prefills]  # a lender may answer alone
        if not pairs:
            return tuple(avoided)
        decodes = {view.id for view in views if view.role is Role.DECODE}
        for workers, doubted in (prefills, {key[0] for key in pairs}), (decodes, {key[1] for key in pairs} - {own}):
            if doubted and not workers <= doubted.union(avoided, blocked):
                avoided |= dict.fromkeys(doubted)
        return tuple(avoided)

    def ask_one(self) -> None:
        """The next attempt is of one worker, as two at once may have died of this turn."""
        self.handing_over = self.limit

    def may_do_without(self) -> bool:
        """Whether the next attempt needs no budget, as D then computes alone."""
        if self.is_afresh:
            self.handing_over, self.owes_retry = self.limit, False
        return self.is_afresh

    def may_try_again(self, attempt: Attempt, exc: LegError, row: FailureRule) -> bool:
        """Books the failure. True where its row of the failure table and the limit allow another attempt."""
        without_frames(exc)
        leg, decision = attempt.failed(exc).kind, attempt.decision
        self.is_lent |= decision.lender is not None
        gets = row.client_gets(stream=attempt.request.stream)
        computed_by, self.computed_by = self.computed_by, None
        self.is_afresh = gets is ClientGets.AFRESH and decision.prefill is not None
        if self.is_afresh and decision.prefill is not None:
            self.last, self.owes_retry = exc, True
            self.handing_over += 1
            if decision.lender is None and computed_by is None:
                self.computed_by = decision.prefill.id
            elif decision.lender is None:
                self.keys[decision.prefill.id] = exc
            return True
        key: Key = blamed(leg, decision)
        if row.health is HealthEffect.PAIR and decision.prefill is not None:
            key = (decision.prefill.id, decision.decode.id)
        return self.book(leg, key, exc, row, gets)

    def book(self, leg: Leg, key: Key, exc: LegError, row: FailureRule, gets: ClientGets) -> bool:
        self.last = exc
        if gets not in (ClientGets.ANOTHER, ClientGets.ANOTHER_OR_QUEUE):
            return False
        is_death = row.health is HealthEffect.OPENED  # for which the breaker has paid
        is_unreached = exc.phase is Phase.CONNECT and (is_death or leg is not Leg.PREFILL)
        # An engine that has not stored a response has computed nothing; after a restart every turn may meet some.
        self.owes_retry = not (is_death or is_unreached or exc.cause is Cause.UNKNOWN_RESPONSE)
        self.is_moved |= is_death and not is_unreached
        if exc.cause is Cause.OVERLOADED:
            self.refusals.append(exc)
        else:
            self.keys[key] = exc
        if is_unreached:  # nothing was sent, which is no attempt; a P that is slow to connect is, as D can do without
            return True
        if leg is Leg.PREFILL or isinstance(key, tuple):
            self.handing_over += 1
        elif exc.cause not in _ENDS_WITH_THE_FLEET:
            self.answering += 1
        return self.answering < self.limit and not self.has_searched

    @property
    def has_searched(self) -> bool:
        """So many workers lack the stored response that no others are asked."""
        return sum(exc.cause is Cause.UNKNOWN_RESPONSE for exc in self.keys.values()) >= self.search_limit

    def forgive_unreached(self) -> set[Key]:
        """Workers that were not reached may be asked again: these."""
        unreached = {key for key, exc in self.keys.items() if exc.phase is Phase.CONNECT}
        for key in unreached:
            del self.keys[key]
        return unreached

    def pay(self, retries: RetryBudget) -> str:
        """Before the next attempt: how it is paid, `no_budget` where it cannot be."""
        if not self.owes_retry:
            return "moved"
        self.owes_retry = False
        return "retried" if retries.take() else "no_budget"

    def error(self, busy_s: float = 0.0) -> PPDError:
        """What the client gets. busy_s: for how long the last of the overloaded workers is to be left alone."""
        assert self.last is not None, "something has failed"
        if self.last.cause is not Cause.OVERLOADED:
            return self.last
        longest_s = max(busy_s, *(exc.retry_after_s for exc in self.refusals))
        error = Overloaded("the workers are overloaded", reason="workers_overloaded", retry_after_s=longest_s)
        if not self.keys and all(exc.status == TOO_MANY for exc in self.refusals):
            error.status = TOO_MANY
        return error


def _has_had_its_turn(leg: LegRecord) -> bool:
    """Whether the worker was reached, and ended its leg: well, as a P does, or not. The other leg may have ended it."""
    is_done = leg.kind is Leg.PREFILL and leg.status == 200
    return leg.phase is not Phase.CONNECT and (leg.error is not None or is_done)


def workers_lost(exc: LegError) -> LegError:
    """For a turn that has ended the connections of two workers: it may be what ends them."""
    said = "workers ended the connection at this request, so no other is sent it"
    lost = LegError(said, worker=exc.worker, phase=exc.phase, cause=exc.cause, status=502)
    lost.code = WORKERS_LOST
    return lost
