"""Who may take a turn: the workers that serve its model, less those that are full, or that failed it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter

import msgspec

from ..connectors import can_pair
from ..errors import AllBusy, AllDown, NoWorkerError
from ..fleet.places import LEAST
from ..fleet.view import Fleet, WorkerView, check_model
from ..fleet.worker import PairId, Role, WorkerId
from .decision import Rules, Turn
from .placement import holds_most, own_worker, pick_decode, slow_start_factor

_DECODE, _REPLICA = Role.DECODE, Role.REPLICA  # looking up enum members by name is slow in a loop

_INFLIGHT = attrgetter("inflight")

Excluded = Collection[WorkerId | PairId]
"""Workers, and pairs of a P and a D, that are not to be used."""


class Candidates(msgspec.Struct, frozen=True):
    """The workers that may take this turn, by role, and which pairs of them cannot hand over now."""

    prefills: Sequence[WorkerView]
    decodes: Sequence[WorkerView]
    replicas: Sequence[WorkerView]
    full: Collection[WorkerId]
    excluded: Excluded
    known: WorkerView | None  # the D for LOCAL: see `_known`; whether or not it may take this turn
    qps: float
    now_s: float
    warm_up_s: float

    def slow_start(self, view: WorkerView) -> float:
        return slow_start_factor(view, self.now_s, self.warm_up_s)

    def prefills_for(self, decode: WorkerView) -> list[WorkerView]:
        return [view for view in self.prefills if self.can_hand_over(view, decode)]

    def can_hand_over(self, prefill: WorkerView, decode: WorkerView) -> bool:
        if self.excluded and (prefill.id, decode.id) in self.excluded:
            return False
        return can_pair(prefill.worker, decode.worker)


def has_room(fleet: Fleet, rules: Rules, blocked: Excluded = ()) -> bool:
    """Whether a turn that arrives now finds a worker with room; True also if no worker could ever take it.

    It needs no P: if all are full or hang, D computes the prompt.
    """
    limit = rules.worker_limit or math.inf
    for view in chain(fleet.decodes, fleet.replicas):  # nearly always the first one has
        if not view.is_full(limit):
            return True
    if fleet.decodes or fleet.replicas:
        return False
    return not fleet.down or any(_may_try(view, blocked) for view in fleet.down)


def _may_try(view: WorkerView, excluded: Excluded) -> bool:
    """Whether one turn may find out if a worker that is down by its probes answers turns all the same."""
    return view.unanswered and not view.inflight and view.id not in excluded


def _any_full(fleet: Fleet, rules: Rules) -> bool:
    # Rarely so; and while the busiest has fewer legs than any worker may have, none need be looked at.
    most = max(map(_INFLIGHT, fleet.views.values()), default=0)
    limit = rules.worker_limit or math.inf
    return most >= min(limit, LEAST) and any(view.is_full(limit) for view in fleet.views.values())


def find_candidates(
    turn: Turn, fleet: Fleet, rules: Rules, *, qps: float, now_s: float, avoid: Excluded, blocked: Excluded
) -> Candidates:
    """`avoid` failed this very turn, `blocked` other turns. Raises as `decide` does."""
    known = _known(turn, fleet)
    prefills, decodes, replicas = fleet.prefills, fleet.decodes, fleet.replicas
    full: Collection[WorkerId] = ()
    if avoid or blocked or _any_full(fleet, rules):
        own = own_worker(turn, chain(decodes, replicas))
        prefills, decodes, replicas, full = _narrowed(fleet, rules.worker_limit or math.inf, avoid, blocked, own)
    if not decodes and not replicas:
        if full:
            raise AllBusy(f"every worker that serves model {turn.model!r} is busy")
        trial = [view for view in fleet.down if _may_try(view, blocked) and view.id not in avoid]
        decodes = [view for view in trial if view.role is _DECODE]
        replicas = [view for view in trial if view.role is _REPLICA]
    if not decodes and not replicas:
        if fleet.down:
            raise AllDown(f"every worker that serves model {turn.model!r} is down")
        check_model(turn.model, fleet.views.values())
        raise NoWorkerError(f"no decode or replica worker can serve model {turn.model!r} now")
    if turn.held and not (turn.held_tokens or turn.stored_response) and decodes:
        # By no turns of its own: where it would go in any case.
        known = pick_decode(turn, decodes, partial(slow_start_factor, now_s=now_s, warm_up_s=rules.warm_up_s))
    excluded = frozenset((*avoid, *blocked)) if avoid else blocked
    return Candidates(prefills, decodes, replicas, full, excluded, known, qps, now_s, rules.warm_up_s)


def _narrowed(
    fleet: Fleet, limit: float, avoid: Excluded, blocked: Excluded, own: WorkerView | None
) -> tuple[list[WorkerView], list[WorkerView], list[WorkerView], list[WorkerId]]:
    """P, D and R that may be asked, and those D and R that only lack room.

    `own` may exceed its learnt places: to wait inside its engine costs less than to compute the prefix elsewhere.
    """
    # A turn can do without a P, so a P that failed other turns, or is full, is not asked at all.
    prefills = [v for v in fleet.prefills if v.id not in avoid and v.id not in blocked and v.inflight < limit]
    answering = [view for view in (*fleet.decodes, *fleet.replicas) if view.id not in avoid]
    free = [v for v in answering if not v.is_full(limit) or (v is own and v.inflight < limit)]
    full = [view.id for view in answering if view not in free]
    # A D or R that failed other turns is asked only if there is no other.
    free = [view for view in free if view.id not in blocked] or free
    return prefills, [v for v in free if v.role is _DECODE], [v for v in free if v.role is _REPLICA], full


def _known(turn: Turn, fleet: Fleet) -> WorkerView | None:
    """Where LOCAL would run: the D that holds most of the session; without one, the session's last worker."""
    last = None if turn.decode is None else fleet.views.get(turn.decode)
    if turn.stored_response or not turn.held:
        return last
    best, most = last, (0, False)
    for worker in turn.held:
        view = fleet.views.get(worker)
        if view is not None and view.role is _DECODE:
            rank = turn.held_by(view), worker == turn.decode
            if rank > most:
                best, most = view, rank
    return best if best is None or holds_most(turn, best) or not (turn.held_tokens and turn.decode) else last
