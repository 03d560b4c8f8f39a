"""The paper's Algorithm 1 around what a live fleet allows.

1. The fleet has no D, or the mode, or a forced route in its place, says REPLICA; but not for a history stored in a D.
2. The request needs one engine for all of it, or lies stored in one: LOCAL or REPLICA, whatever the table says.
3. A route that the operator forces on this one turn, the first included: that, whatever mode and table say.
4. Turn 1: SPLIT, there is nothing to append to.
5. Later turns: what the mode asks for; in mode `table`, LOCAL where the cell's score is above 0.
6. LOCAL stands only where the session's D is there and believed to hold the prefix, REPLICA only where there is an R;
   each obstacle is a named veto, and makes the turn a SPLIT.
7. SPLIT stands only where a P can hand over to a D; else the turn is computed where it can be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from ..config import Mode, Uncovered
from ..errors import AllBusy, NoWorkerError
from ..residency import standing
from ..tables import Verdict, Workload
from ..views import WorkerView, can_pair, check_model
from ..workers import PairId, Role, WorkerId
from .placement import held_on, pick_decode, pick_prefill, warmth_of
from .values import Decision, Route, Rules, Turn

_PREFILL, _DECODE, _REPLICA = Role  # an enum's members by their names are slow to look up in a loop

Shunned = Collection[WorkerId | PairId]
"""Workers, and pairs of a P and a D."""


class _Fleet(msgspec.Struct, frozen=True):
    """The workers that may take this turn, by role, and the pairs among them that can't hand over now."""

    prefills: Sequence[WorkerView]
    decodes: Sequence[WorkerView]
    replicas: Sequence[WorkerView]
    full: Collection[WorkerId]
    shunned: Shunned
    known: WorkerView | None  # who answered the session last, whether it may take this turn or not
    now_s: float
    warm_up_s: float

    def warmth(self, view: WorkerView) -> float:
        return warmth_of(view, self.now_s, self.warm_up_s)

    def prefills_for(self, decode: WorkerView) -> list[WorkerView]:
        return [view for view in self.prefills if self.can_hand_over(view, decode)]

    def can_hand_over(self, prefill: WorkerView, decode: WorkerView) -> bool:
        if self.shunned and (prefill.id, decode.id) in self.shunned:
            return False
        return can_pair(prefill.worker, decode.worker)


class _Wish(msgspec.Struct, frozen=True):
    """What is asked for: by force, by the mode, or by the table."""

    route: Route
    reason: str
    verdict: Verdict | None = None


def decide(
    turn: Turn,
    views: Iterable[WorkerView],
    rules: Rules,
    *,
    qps: float,
    now_s: float,
    avoid: Shunned = (),
    blocked: Shunned = (),
) -> Decision:
    """The decision for one turn.

    `avoid` failed this very turn; `blocked` are passed over for what they did to others. NoWorkerError if nobody can
    take the turn, AllBusy if somebody could, were it not for the others that it has.
    """
    fleet = _able(turn, tuple(views), rules, now_s, avoid, blocked)
    wish = _wish(turn, fleet, rules, qps)
    decision = _carry_out(turn, wish, fleet)
    held = held_on(turn.decode, decision.decode, turn.held_tokens)
    return replace(decision, verdict=wish.verdict, qps=qps, cached_tokens=held)


def has_room(model: str, views: Iterable[WorkerView], rules: Rules) -> bool:
    """Whether a turn that arrives now would find a place; True too where no worker could ever take it.

    It needs no P: where all are full, or hang, D computes the prompt.
    """
    is_served = False
    for view in views:
        if view.worker.role is not _PREFILL and view.takes_turns(model):
            if not 0 < rules.worker_limit <= view.inflight:
                return True
            is_served = True
    return not is_served


def _able(
    turn: Turn, views: Sequence[WorkerView], rules: Rules, now_s: float, avoid: Shunned, blocked: Shunned
) -> _Fleet:
    decode_id = None if turn.decode is None else turn.decode.worker
    known, prefills, decodes, replicas = None, list[WorkerView](), list[WorkerView](), list[WorkerView]()
    passed_over, full = list[WorkerView](), list[WorkerId]()
    for view in views:  # once for all that is asked of a worker, as most of a decision's time goes here
        if view.worker.address == decode_id:
            known = view
        if not view.takes_turns(turn.model) or (avoid and view.id in avoid):
            continue
        is_full = 0 < rules.worker_limit <= view.inflight
        is_blocked = bool(blocked) and view.id in blocked
        role = view.worker.role
        if role is _PREFILL:
            # A turn can do without a P, so one that failed others, or has all it may have, is not asked at all.
            if not is_full and not is_blocked:
                prefills.append(view)
        elif is_full:
            full.append(view.id)
        elif is_blocked:
            passed_over.append(view)
        elif role is _REPLICA:
            replicas.append(view)
        else:
            decodes.append(view)
    if not decodes and not replicas:
        # One that failed others is asked only where there is no other.
        decodes = [view for view in passed_over if view.worker.role is _DECODE]
        replicas = [view for view in passed_over if view.worker.role is _REPLICA]
    if not decodes and not replicas:
        if full:
            raise AllBusy(f"every worker that serves model {turn.model!r} is busy")
        check_model(turn.model, views)
        raise NoWorkerError(f"no decode or replica worker can serve model {turn.model!r} now")
    shunned = frozenset((*avoid, *blocked)) if avoid else blocked
    return _Fleet(prefills, decodes, replicas, full, shunned, known, now_s, rules.warm_up_s)


def _wish(turn: Turn, fleet: _Fleet, rules: Rules, qps: float) -> _Wish:
    asks_for_replica = turn.forced is Route.REPLICA if turn.forced else rules.mode is Mode.REPLICA
    if asks_for_replica and fleet.replicas and not _is_stored_on_decode(turn, fleet):
        return _Wish(Route.REPLICA, "forced" if turn.forced else "mode_replica")
    if not fleet.decodes:
        return _Wish(Route.REPLICA, "no_decode_worker")
    if turn.stored_response:
        return _Wish(Route.LOCAL, "stored_response")
    if turn.single_engine is not None:
        return _Wish(Route.LOCAL, "single_engine")
    if turn.forced is not None:
        return _Wish(turn.forced, "forced")
    if turn.number == 1:
        return _Wish(Route.SPLIT, "first_turn")
    match rules.mode:
        case Mode.TABLE | Mode.REPLICA:  # the latter where there is no replica
            return _by_table(turn, rules, qps)
        case Mode.ALWAYS_LOCAL:
            return _Wish(Route.LOCAL, "mode_always_local")
        case Mode.ALWAYS_SPLIT:
            return _Wish(Route.SPLIT, "mode_always_split")
        case Mode.FRACTION:
            local = session_share(turn.session_id) < rules.x
            return _Wish(Route.LOCAL if local else Route.SPLIT, "fraction_local" if local else "fraction_split")


def _is_stored_on_decode(turn: Turn, fleet: _Fleet) -> bool:
    """Whether the history lies in a D alone, which no replica can ask for it."""
    decode = turn.decode
    return turn.stored_response and decode is not None and any(view.id == decode.worker for view in fleet.decodes)


def _by_table(turn: Turn, rules: Rules, qps: float) -> _Wish:
    uncovered = Route.LOCAL if rules.uncovered is Uncovered.LOCAL else Route.SPLIT
    if rules.scored is None:
        return _Wish(uncovered, "no_table")
    verdict = rules.scored.lookup(Workload(turn.new_tokens, turn.held_tokens, turn.output_tokens, qps))
    if verdict.local is None:
        return _Wish(uncovered, "no_evidence", verdict)
    return _Wish(Route.LOCAL, "table_local", verdict) if verdict.local else _Wish(Route.SPLIT, "table_split", verdict)


def _carry_out(turn: Turn, wish: _Wish, fleet: _Fleet) -> Decision:
    vetoes: tuple[str, ...] = ()
    if wish.route is Route.REPLICA:
        if fleet.replicas:
            return _on_replica(turn, wish, fleet, wish.reason, ())
        vetoes = ("no_replica_worker",)
    if wish.route is Route.LOCAL:
        veto = _local_veto(turn, fleet)
        if veto is None:
            assert fleet.known is not None, "its absence is a veto"
            return Decision(route=Route.LOCAL, reason=wish.reason, decode=fleet.known, wanted=wish.route)
        vetoes = (veto,)
        if turn.stored_response or turn.single_engine is not None:
            return _on_one_engine(turn, wish, fleet, wish.reason, vetoes)
    # In a fleet of several versions or connectors, a D that some P can hand over to comes before others.
    pairable = [view for view in fleet.decodes if any(fleet.can_hand_over(prefill, view) for prefill in fleet.prefills)]
    decode = pick_decode(turn, pairable or fleet.decodes, fleet.warmth)
    assert decode is not None, "the caller saw a decode worker"
    prefill = pick_prefill(turn, fleet.prefills_for(decode), fleet.warmth)
    if prefill is None:
        return _on_one_engine(turn, wish, fleet, "no_prefill_worker", (*vetoes, "no_prefill_worker"))
    reason = vetoes[0] if vetoes else wish.reason
    return Decision(route=Route.SPLIT, reason=reason, decode=decode, prefill=prefill, wanted=wish.route, vetoes=vetoes)


def _local_veto(turn: Turn, fleet: _Fleet) -> str | None:
    """Why the turn can't be appended on the session's D, or None."""
    known = fleet.known
    if turn.decode is None or (turn.held_tokens == 0 and not turn.stored_response):
        return "not_resident"
    if known is None:
        return "decode_gone"
    if known.worker.role is not _DECODE:
        return "not_resident"
    if not known.up:
        return "decode_down"
    if known.state == "draining":
        return "decode_draining"
    if known.id in fleet.full:
        if turn.stored_response:
            raise AllBusy("the worker that keeps the response is busy")
        return "decode_busy"
    for view in fleet.decodes:
        if view is known:
            return standing(turn.decode, known)
    return "decode_failed"


def _on_one_engine(turn: Turn, wish: _Wish, fleet: _Fleet, reason: str, vetoes: tuple[str, ...]) -> Decision:
    """Without a hand-over: the engine that holds the prefix, else a replica, else a D that computes it all."""
    own = next((view for view in fleet.decodes if held_on(turn.decode, view, max(1, turn.held_tokens))), None)
    if own is None and fleet.replicas:
        return _on_replica(turn, wish, fleet, reason, vetoes)
    decode = own or pick_decode(turn, fleet.decodes, fleet.warmth)
    assert decode is not None, "the caller saw a decode worker"
    return Decision(route=Route.LOCAL, reason=reason, decode=decode, wanted=wish.route, vetoes=vetoes)


def _on_replica(turn: Turn, wish: _Wish, fleet: _Fleet, reason: str, vetoes: tuple[str, ...]) -> Decision:
    replica = pick_decode(turn, fleet.replicas, fleet.warmth)
    assert replica is not None, "the caller saw a replica"
    return Decision(route=Route.REPLICA, reason=reason, decode=replica, wanted=wish.route, vetoes=vetoes)


def session_share(session_id: str) -> float:
    """A session's fixed place in [0, 1), for mode `fraction`; session ids are hex digests."""
    return int(session_id[:8], 16) / 2**32
