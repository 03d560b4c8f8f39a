"""Chooses a worker of each role. P and D are chosen independently, except that they must be able to pair."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from hashlib import sha256

import msgspec

from ..beliefs.held import BeliefEvidence
from ..connectors import answers_alone, can_pair, takes_either_leg
from ..fleet.order import RankRule, least_ranked, mean_recent_tokens, mean_requests, of_workers
from ..fleet.ranking import KV_FULL, FactorRank, Rank, load_rank, prefill_rank
from ..fleet.rendezvous import spread
from ..fleet.view import Fleet, WorkerView
from ..fleet.worker import Role, Worker, WorkerId
from .decision import Decision, Route, Turn

EASE = 1.25  # times the mean load of its role: so busy a worker gets no session for what it holds
FEW = 2  # requests above that are still few: where there are hardly any, sessions of one prefix may meet
MOST = 0.5  # of what a session's earlier turns cover: who holds less is not where the session lives
MOST_HASHED = 32  # of equal workers, for one decision
_DIGITS = re.compile("[0-9a-f]{8}")
# Looking up enum members by name is slow.
_SHARED_PREFIX, _DECODE, _LOCAL, _REPLICA = BeliefEvidence.SHARED_PREFIX, Role.DECODE, Route.LOCAL, Route.REPLICA
LEAST_FACTOR = 0.1  # where slow start begins: a worker that has just joined counts as ten times as loaded


class SlowStart(msgspec.Struct, frozen=True, gc=False):
    """A worker's slow-start factor, in (0, 1]; its load is divided by it."""

    now_s: float
    warm_up_s: float

    def __call__(self, view: WorkerView) -> float:
        """Grows linearly over `warm_up_s`: a cold engine still compiles, and its caches are empty."""
        warm_up_s = self.warm_up_s
        if warm_up_s <= 0.0 or (age_s := self.now_s - view.since_s) >= warm_up_s:
            return 1.0
        return max(LEAST_FACTOR, age_s / warm_up_s)

    @classmethod
    def in_fleet(cls, fleet: Fleet, now_s: float, warm_up_s: float) -> SlowStart:
        """Where none of its workers is young, all factors are 1 without a look at any."""
        return cls(now_s, warm_up_s if now_s - fleet.newest_s < warm_up_s else 0.0)

    def by(self, rank_of: FactorRank) -> RankRule:
        if self.warm_up_s <= 0.0:
            return self.rule(rank_of, rank_of)
        return self.rule(lambda view: rank_of(view, self(view)), rank_of)

    def rule(
        self,
        rank_of: Callable[[WorkerView], Rank],
        sorts_as: Callable[[WorkerView], Rank],
        apart: Collection[WorkerId] = (),
    ) -> RankRule:
        return RankRule(rank_of, sorts_as, self.now_s, self.warm_up_s, apart)


def pick_decode(turn: Turn, candidates: Sequence[WorkerView], slow_start: SlowStart) -> WorkerView | None:
    """For the leg that answers, on D or on R.

    1. The worker that holds the session, or stores its history, however busy it is: elsewhere all of it would have to
       be computed or moved.
    2. One that holds a beginning which other sessions share, if that means less work than on the least loaded worker.
       It must not be busier than others: else all sessions of one application would meet on it.
    3. Where earlier turns cover nothing, the session's last worker, or that of the session which the client names: it
       may hold more than is known.
    4. The least loaded worker with room for the prompt's KV.
    """
    own = own_worker(turn, candidates)
    if own is not None:
        return own

    def work_tokens(view: WorkerView) -> float:
        return (view.queued_prefill_tokens + turn.prompt_tokens - turn.held_by(view)) / slow_start(view)

    preferred = turn.affinity or turn.decode
    last = None if turn.held_tokens or preferred is None else next(iter(of_workers(candidates, (preferred,))), None)
    if last is not None and turn.lost != "decode_restarted" and not is_overloaded(last, candidates):
        least: WorkerView | None = last
    else:
        least = pick_least(candidates, slow_start.by(load_rank), turn.session_id)
    holders = _at_ease(_holders(turn, candidates), candidates, turn.prompt_tokens)
    if least is None or not holders:
        return least
    best = min(holders, key=lambda view: (work_tokens(view), load_rank(view, slow_start(view))))
    return best if work_tokens(best) < work_tokens(least) else least


def pick_prefill(turn: Turn, candidates: Sequence[WorkerView], slow_start: SlowStart) -> WorkerView | None:
    """The P that will finish this prompt first: queued prefill tokens plus those that it must compute itself.

    What it holds may so outweigh only as many queued tokens, and a P has no other work: it needs no other limit.
    """

    def tokens_until_done(view: WorkerView) -> tuple[float, int]:
        tokens = view.queued_prefill_tokens + turn.prompt_tokens - turn.held_by(view)
        return (tokens / slow_start(view), view.requests)

    return pick_least(candidates, slow_start.rule(tokens_until_done, prefill_rank, turn.held), turn.session_id)


def own_worker(turn: Turn, *pools: Sequence[WorkerView]) -> WorkerView | None:
    """Of these, the one that holds the session by its own turns, or that stores its history."""
    if turn.stored_response:
        stores = () if turn.decode is None else (turn.decode,)
        return next((view for views in pools for view in of_workers(views, stores)), None)
    if not turn.held_tokens:
        return None
    # As `holds_session` says; few, where many hold a shared head.
    holders = [
        worker for worker, held in turn.held.items() if held.evidence is not _SHARED_PREFIX and not held.is_shared
    ]
    own = [view for views in pools for view in of_workers(views, holders) if holds_most(turn, view)] if holders else []
    return max(own, key=lambda view: (turn.held_by(view), view.id == turn.decode), default=None)


def _holders(turn: Turn, views: Sequence[WorkerView]) -> list[WorkerView]:
    """Those that hold anything of the prompt."""
    return [view for view in of_workers(views, turn.held) if turn.held_by(view)] if turn.held else []


def holds_session(turn: Turn, view: WorkerView) -> bool:
    """Whether it holds most of what earlier turns of the session cover, as no worker for other sessions does."""
    held = turn.held.get(view.id)
    if held is None or held.evidence is _SHARED_PREFIX or held.is_shared:
        return False
    return holds_most(turn, view)


def holds_most(turn: Turn, view: WorkerView) -> bool:
    return turn.held_by(view) >= most_of(turn)


def most_of(turn: Turn) -> float:
    """Tokens, at least, of who holds most of what earlier turns cover; without them, of the prompt."""
    tokens = MOST * (turn.held_tokens or turn.prompt_tokens)
    return tokens if tokens > 1.0 else 1.0


def is_overloaded(view: WorkerView, views: Sequence[WorkerView]) -> bool:
    """Whether a worker has no room, or more than its share of requests, and more than one of them."""
    return _has_more(view, EASE * mean_requests(views) + 1)


def _has_more(view: WorkerView, requests: float) -> bool:
    return view.load.kv_usage >= KV_FULL or view.requests > requests


def _at_ease(holders: Sequence[WorkerView], views: Sequence[WorkerView], prompt_tokens: int) -> list[WorkerView]:
    """Those that may get a session for what they hold.

    Their load now are their requests, as each slows the others that it decodes. What their turns brought there lately
    tells how much of their caches they have turned over, also where requests are few.
    """
    if not holders:
        return []
    requests, tokens = EASE * mean_requests(views) + FEW, EASE * mean_recent_tokens(views) + prompt_tokens
    return [view for view in holders if not _has_more(view, requests) and view.recent_tokens <= tokens]


def pick_least(candidates: Sequence[WorkerView], rule: RankRule, session_id: str) -> WorkerView | None:
    """The first by rank; of equals the session's by its hash."""
    # Only workers of equal rank are hashed, as that costs more than all the rest.
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    equals = least_ranked(candidates, rule)
    return equals[0] if len(equals) == 1 else _of_equals(equals, session_id)


def _of_equals(equals: Sequence[WorkerView], session_id: str) -> WorkerView:
    if len(equals) > MOST_HASHED:
        # So many of them, from a place that moves little as others come and go.
        begins = int(session_share(session_id) * len(equals))
        equals = [*equals[begins:], *equals[:begins]][:MOST_HASHED]
    return min(equals, key=lambda view: spread(view.id, session_id))


def session_share(session_id: str) -> float:
    """A fixed number in [0, 1) for each session. The proxy's ids are hex digests; a log may have others, or none."""
    digits = session_id[:8]
    if _DIGITS.fullmatch(digits) is None:
        digits = sha256(session_id.encode()).hexdigest()[:8]
    return int(digits, 16) / 2**32


def ways_to_serve(views: Collection[WorkerView], *, prefills_answer: bool = False) -> dict[str, bool]:
    """Which routes the fleet could take now, as `/ready` reports them.

    prefills_answer: P answer where nobody else does, though no Responses.
    """
    has_sidecars = any(view.worker.has_sidecar for view in views)
    able = [view for view in views if view.state == "up"]
    decodes = [view for view in able if view.role is Role.DECODE]
    prefills = [view for view in able if view.role is Role.PREFILL]
    return {
        "split": any(can_pair(p.worker, d.worker) for p in prefills for d in decodes),
        "local": any(answers_alone(view.worker) for view in decodes),
        "replica": any(view.role is Role.REPLICA for view in able)
        or (prefills_answer and not has_sidecars and any(takes_either_leg(view.worker) for view in prefills)),
    }


def route_alone(view: WorkerView) -> Route:
    """Of a turn that this worker computes and answers: a P does so as an R does."""
    return _LOCAL if view.role is _DECODE else _REPLICA


def can_stand_in(other: Worker, decision: Decision) -> bool:
    """Whether another D or R can take the request that was made for a decision's: its P and its key are in it."""
    first = decision.decode.worker
    if other.is_trusted is not first.is_trusted:
        return False
    if decision.prefill is not None:
        return other.role is Role.DECODE and can_pair(decision.prefill.worker, other)
    return other.role is Role.REPLICA or answers_alone(other)
