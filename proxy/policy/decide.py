"""Decides where one turn is computed: the paper's Algorithm 1, within what the live fleet allows.

The first of these that applies says which route is wanted:

1. REPLICA, if a forced route or the mode says so and there is an R, or if there is no D. Not if a D stores the history.
2. LOCAL, if one engine has to compute the whole request, or stores its history: whatever the table says.
3. The route that the operator forces on this turn, the first included: whatever mode and table say.
4. SPLIT on turn 1: there is nothing to append to.
5. On later turns what the mode asks for; in mode `table`, LOCAL if the cell's score is above 0.

Then the fleet decides whether that can be done:

6. LOCAL needs the session's D to be there and believed to hold the prefix, REPLICA needs an R. Each obstacle is a named
   veto, and makes the turn a SPLIT; a turn that needs one engine goes to another D or R instead.
7. SPLIT needs a P that can hand over to a D; else the turn is computed where it can be.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import chain
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from ..config import Mode, Uncovered
from ..connectors import can_pair
from ..decision_table.score import Verdict
from ..decision_table.table import TableQuery
from ..errors import AllBusy, AllDown, NoWorkerError
from ..fleet.places import LEAST
from ..fleet.view import Fleet, WorkerView, check_model
from ..fleet.worker import PairId, Role, WorkerId
from .decision import Decision, Route, Rules, Turn
from .placement import (
    holds_most,
    holds_session,
    is_overloaded,
    own_worker,
    pick_decode,
    pick_prefill,
    slow_start_factor,
)

_DECODE, _REPLICA = Role.DECODE, Role.REPLICA  # looking up enum members by name is slow in a loop

_INFLIGHT = attrgetter("inflight")

Excluded = Collection[WorkerId | PairId]
"""Workers, and pairs of a P and a D, that are not to be used."""


class _Candidates(msgspec.Struct, frozen=True):
    """The workers that may take this turn, by role, and which pairs of them cannot hand over now."""

    prefills: Sequence[WorkerView]
    decodes: Sequence[WorkerView]
    replicas: Sequence[WorkerView]
    full: Collection[WorkerId]
    excluded: Excluded
    known: WorkerView | None  # the D for LOCAL: see `_known`; whether or not it may take this turn
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


class _Preference(msgspec.Struct, frozen=True):
    """The route that is wanted: by force, by the mode, or by the table."""

    route: Route
    reason: str
    verdict: Verdict | None = None


def decide(
    turn: Turn,
    fleet: Fleet,
    rules: Rules,
    *,
    qps: float,
    now_s: float,
    avoid: Excluded = (),
    blocked: Excluded = (),
) -> Decision:
    """The decision for one turn, over the fleet of its model.

    `avoid` failed this very turn; `blocked` failed other turns. NoWorkerError if no worker can take the turn, AllBusy
    if one could but has as many as it may have, AllDown if one could but is down.
    """
    candidates = _candidates(turn, fleet, rules, now_s, avoid, blocked)
    preference = _preference(turn, candidates, rules, qps)
    decision = _carry_out(turn, preference, candidates)
    held = turn.held.get(decision.decode.id)
    return replace(decision, verdict=preference.verdict, qps=qps, held=held)


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


def _candidates(
    turn: Turn, fleet: Fleet, rules: Rules, now_s: float, avoid: Excluded, blocked: Excluded
) -> _Candidates:
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
    excluded = frozenset((*avoid, *blocked)) if avoid else blocked
    return _Candidates(prefills, decodes, replicas, full, excluded, known, now_s, rules.warm_up_s)


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


def _preference(turn: Turn, candidates: _Candidates, rules: Rules, qps: float) -> _Preference:
    asks_for_replica = turn.forced is Route.REPLICA if turn.forced else rules.mode is Mode.REPLICA
    if asks_for_replica and candidates.replicas and not _is_stored_on_decode(turn, candidates):
        return _Preference(Route.REPLICA, "forced" if turn.forced else "mode_replica")
    if not candidates.decodes:
        return _Preference(Route.REPLICA, "no_decode_worker")
    if turn.stored_response:
        return _Preference(Route.LOCAL, "stored_response")
    if turn.single_engine is not None:
        return _Preference(Route.LOCAL, "single_engine")
    if turn.forced is not None:
        return _Preference(turn.forced, "forced")
    if turn.number == 1:
        return _Preference(Route.SPLIT, "first_turn")
    match rules.mode:
        case Mode.TABLE | Mode.REPLICA:  # mode `replica` without a replica decides by the table
            return _by_table(turn, candidates.known, rules, qps)
        case Mode.ALWAYS_LOCAL:
            return _Preference(Route.LOCAL, "mode_always_local")
        case Mode.ALWAYS_SPLIT:
            return _Preference(Route.SPLIT, "mode_always_split")
        case Mode.FRACTION:
            own = candidates.known.worker.x if candidates.known is not None else None
            local = session_share(turn.session_id) < (rules.x if own is None else own)
            return _Preference(Route.LOCAL if local else Route.SPLIT, "fraction_local" if local else "fraction_split")


def _is_stored_on_decode(turn: Turn, candidates: _Candidates) -> bool:
    # A replica cannot read a response that a D stores.
    return turn.stored_response and any(view.id == turn.decode for view in candidates.decodes)


def _by_table(turn: Turn, known: WorkerView | None, rules: Rules, qps: float) -> _Preference:
    uncovered = Route.LOCAL if rules.uncovered is Uncovered.LOCAL else Route.SPLIT
    if rules.scored is None:
        return _Preference(uncovered, "no_table")
    # Where nothing is held the table is asked all the same, so that the veto shows what that costs.
    held = (turn.held_by(known) if known is not None else 0) or turn.held_tokens
    new = max(1, turn.prompt_tokens - held)
    verdict = rules.scored.lookup(TableQuery(new, held, turn.output_tokens, qps))
    if verdict.local is None:
        return _Preference(uncovered, "no_evidence", verdict)
    return (
        _Preference(Route.LOCAL, "table_local", verdict)
        if verdict.local
        else _Preference(Route.SPLIT, "table_split", verdict)
    )


def _carry_out(turn: Turn, preference: _Preference, candidates: _Candidates) -> Decision:
    vetoes: tuple[str, ...] = ()
    if preference.route is Route.REPLICA:
        if candidates.replicas:
            return _on_replica(turn, preference, candidates, preference.reason, ())
        vetoes = ("no_replica_worker",)
    if preference.route is Route.LOCAL:
        veto = _local_veto(turn, preference, candidates)
        if veto is None:
            assert candidates.known is not None, "its absence is a veto"
            return Decision(
                route=Route.LOCAL, reason=preference.reason, decode=candidates.known, wanted=preference.route
            )
        vetoes = (veto,)
        if turn.stored_response or turn.single_engine is not None:
            return _on_one_engine(turn, preference, candidates, preference.reason, vetoes)
    # With several versions or connectors in the fleet, a D to which some P can hand over is preferred.
    pairable = [
        view
        for view in candidates.decodes
        if any(candidates.can_hand_over(prefill, view) for prefill in candidates.prefills)
    ]
    decode = pick_decode(turn, pairable or candidates.decodes, candidates.slow_start)
    assert decode is not None, "the caller saw a decode worker"
    prefill = pick_prefill(turn, candidates.prefills_for(decode), candidates.slow_start)
    if prefill is None:
        return _on_one_engine(turn, preference, candidates, "no_prefill_worker", (*vetoes, "no_prefill_worker"))
    reason = vetoes[0] if vetoes else preference.reason
    return Decision(
        route=Route.SPLIT, reason=reason, decode=decode, prefill=prefill, wanted=preference.route, vetoes=vetoes
    )


def _local_veto(turn: Turn, preference: _Preference, candidates: _Candidates) -> str | None:
    known = candidates.known
    held = 0 if known is None else turn.held_by(known)
    if not (turn.stored_response or held or (turn.held_tokens and turn.decode is not None)):
        return "not_resident"
    if known is None:
        return "decode_gone"
    if known.worker.role is not _DECODE:
        return "not_resident"
    if not known.up:
        return "decode_down"
    if known.state == "draining":
        return "decode_draining"
    if known.id in candidates.full:
        if turn.stored_response:
            raise AllBusy("the worker that stores the response is busy")
        return "decode_busy"
    if all(view is not known for view in candidates.decodes):
        return "decode_failed"
    return None if turn.stored_response else _lacks(turn, preference, known, candidates)


def _lacks(turn: Turn, preference: _Preference, known: WorkerView, candidates: _Candidates) -> str | None:
    """The veto where this D holds too little of the prompt, or too many sessions like this one."""
    is_judged = preference.verdict is not None and turn.held_by(known) > 0  # by the table, with what is held
    if not is_judged and not holds_most(turn, known):
        return turn.lost or ("evicted" if turn.held_tokens else "not_resident")
    if not holds_session(turn, known) and is_overloaded(known, candidates.decodes):
        return "decode_busy"
    return None


def _on_one_engine(
    turn: Turn, preference: _Preference, candidates: _Candidates, reason: str, vetoes: tuple[str, ...]
) -> Decision:
    """Without a handoff: on the D that holds the prefix, else on a replica, else on a D that computes all of it."""
    own = own_worker(turn, candidates.decodes)
    if own is None and candidates.replicas:
        return _on_replica(turn, preference, candidates, reason, vetoes)
    decode = own or pick_decode(turn, candidates.decodes, candidates.slow_start)
    assert decode is not None, "the caller saw a decode worker"
    return Decision(route=Route.LOCAL, reason=reason, decode=decode, wanted=preference.route, vetoes=vetoes)


def _on_replica(
    turn: Turn, preference: _Preference, candidates: _Candidates, reason: str, vetoes: tuple[str, ...]
) -> Decision:
    replica = pick_decode(turn, candidates.replicas, candidates.slow_start)
    assert replica is not None, "the caller saw a replica"
    return Decision(route=Route.REPLICA, reason=reason, decode=replica, wanted=preference.route, vetoes=vetoes)


def session_share(session_id: str) -> float:
    """A fixed number in [0, 1) for each session, for mode `fraction`; session ids are hex digests."""
    return int(session_id[:8], 16) / 2**32
