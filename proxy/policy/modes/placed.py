"""`always_local` with the session's D, or its R, chosen otherwise than by load."""

from __future__ import annotations

from ...fleet.view import WorkerView
from ..candidates import Candidates
from ..decision import Candidate, Preference, Route, Rules, Turn
from ..placement import own_worker, pick_prefill, route_alone, spread
from .fixed import appends


def by_hash(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """Each session has its worker by a hash of its id, whatever happens there."""
    return _placed(turn, candidates, "session_hash", min(_answering(candidates), key=lambda view: _hash(view, turn)))


def by_free_kv(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """A session begins where most KV is free, and stays where it is."""
    answering = _answering(candidates)
    chosen = own_worker(turn, answering) or min(answering, key=lambda view: (_used(view), _hash(view, turn)))
    return _placed(turn, candidates, "free_kv", chosen)


def _answering(candidates: Candidates) -> list[WorkerView]:
    return [*candidates.decodes, *candidates.replicas]


def _hash(view: WorkerView, turn: Turn) -> bytes:
    return spread(view, turn.session_id)


def _used(view: WorkerView) -> float:
    placed = view.placed_tokens / view.load.kv_capacity_tokens if view.load.kv_capacity_tokens else 0.0
    return view.load.kv_usage + placed


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
