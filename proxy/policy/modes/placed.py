"""`always_local` with the session's D, or its R, chosen otherwise than by load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...fleet.order import RankRule, first_by_hash
from ...fleet.ranking import kv_rank
from ...fleet.rendezvous import spread
from ...fleet.view import WorkerView
from ..candidates import Candidates
from ..decision import Candidate, Preference, Route, Rules, Turn
from ..placement import own_worker, pick_least, pick_prefill, route_alone
from .fixed import appends

BY_KV = RankRule(kv_rank, kv_rank)


def by_hash(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """Each session has its worker by a hash of its id, whatever happens there."""
    firsts = _of_each_role(candidates, lambda views: first_by_hash(views, turn.session_id))
    chosen = firsts[0] if len(firsts) == 1 else min(firsts, key=lambda view: spread(view.id, turn.session_id))
    return _placed(turn, candidates, "session_hash", chosen)


def by_free_kv(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """A session begins where most KV is free, and stays where it is."""
    chosen = own_worker(turn, candidates.decodes, candidates.replicas)
    if chosen is None:
        firsts = _of_each_role(candidates, lambda views: pick_least(views, BY_KV, turn.session_id))
        chosen = min(firsts, key=lambda view: (kv_rank(view), spread(view.id, turn.session_id)))
    return _placed(turn, candidates, "free_kv", chosen)


def _of_each_role(
    candidates: Candidates, pick: Callable[[Sequence[WorkerView]], WorkerView | None]
) -> Sequence[WorkerView]:
    """The best D and the best R, as far as there are any."""
    picked = pick(candidates.decodes), pick(candidates.replicas)
    return [view for view in picked if view is not None]


def _placed(turn: Turn, candidates: Candidates, reason: str, chosen: WorkerView) -> Preference:
    if (alone := route_alone(chosen)) is Route.REPLICA:
        return _way(Candidate(route=alone, decode=chosen), reason)
    prefill = None
    if not appends(turn, candidates):
        prefill = pick_prefill(turn, candidates.prefills_for(chosen), candidates.slow_start)
    route = Route.LOCAL if prefill is None else Route.SPLIT
    return _way(Candidate(route=route, decode=chosen, prefill=prefill), reason)


def _way(way: Candidate, reason: str) -> Preference:
    return Preference(way.route, reason, ways=(way,))
