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
from dataclasses import dataclass, replace

from ..config import Mode, Uncovered
from ..errors import NoWorkerError
from ..residency import standing
from ..tables import Verdict, Workload
from ..views import WorkerView, can_pair, check_model
from ..workers import Role, WorkerId
from .placement import held_on, pick_decode, pick_prefill
from .values import Decision, Route, Rules, Turn


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The workers that may take this turn, by role."""

    prefills: Sequence[WorkerView]
    decodes: Sequence[WorkerView]
    replicas: Sequence[WorkerView]


@dataclass(frozen=True, slots=True)
class _Wish:
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
    avoid: Collection[WorkerId] = (),
) -> Decision:
    """The decision for one turn; `avoid` holds workers that already failed it. NoWorkerError if nobody can take it."""
    views = tuple(views)
    fleet = _able(turn, views, now_s, avoid)
    if not fleet.decodes and not fleet.replicas:
        check_model(turn.model, views)
        raise NoWorkerError(f"no decode or replica worker can serve model {turn.model!r} now")
    wish = _wish(turn, fleet, rules, qps)
    known = next((view for view in views if turn.decode is not None and view.id == turn.decode.worker), None)
    decision = _carry_out(turn, wish, fleet, known)
    held = held_on(turn.decode, decision.decode, turn.held_tokens)
    return replace(decision, verdict=wish.verdict, qps=qps, cached_tokens=held)


def _able(turn: Turn, views: Iterable[WorkerView], now_s: float, avoid: Collection[WorkerId]) -> _Fleet:
    able = [view for view in views if view.id not in avoid and view.takes_turns(turn.model)]

    def of(role: Role) -> Sequence[WorkerView]:
        members = [view for view in able if view.role is role]
        # A worker that just refused a connection is asked again only when there is no other of its role.
        return [view for view in members if view.suspect_until_s <= now_s] or members

    return _Fleet(of(Role.PREFILL), of(Role.DECODE), of(Role.REPLICA))


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
        case Mode.ALWAYS_LOCAL:
            return _Wish(Route.LOCAL, "mode_always_local")
        case Mode.ALWAYS_SPLIT:
            return _Wish(Route.SPLIT, "mode_always_split")
        case Mode.FRACTION:
            local = session_share(turn.session_id) < rules.x
            return _Wish(Route.LOCAL if local else Route.SPLIT, "fraction_local" if local else "fraction_split")
        case _:
            return _by_table(turn, rules, qps)


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


def _carry_out(turn: Turn, wish: _Wish, fleet: _Fleet, known: WorkerView | None) -> Decision:
    vetoes: tuple[str, ...] = ()
    if wish.route is Route.REPLICA:
        if fleet.replicas:
            return _on_replica(turn, wish, fleet, wish.reason, ())
        vetoes = ("no_replica_worker",)
    if wish.route is Route.LOCAL:
        veto = _local_veto(turn, fleet, known)
        if veto is None:
            own = next(view for view in fleet.decodes if turn.decode is not None and view.id == turn.decode.worker)
            return Decision(route=Route.LOCAL, reason=wish.reason, decode=own, wanted=wish.route)
        vetoes = (veto,)
        if turn.stored_response or turn.single_engine is not None:
            return _on_one_engine(turn, wish, fleet, wish.reason, vetoes)
    # In a fleet of several versions or connectors, a D that some P can hand over to comes before others.
    pairable = [d for d in fleet.decodes if any(can_pair(p.worker, d.worker) for p in fleet.prefills)]
    decode = pick_decode(turn, pairable or fleet.decodes)
    assert decode is not None, "the caller saw a decode worker"
    prefill = pick_prefill(turn, decode, fleet.prefills)
    if prefill is None:
        return _on_one_engine(turn, wish, fleet, "no_prefill_worker", (*vetoes, "no_prefill_worker"))
    reason = vetoes[0] if vetoes else wish.reason
    return Decision(route=Route.SPLIT, reason=reason, decode=decode, prefill=prefill, wanted=wish.route, vetoes=vetoes)


def _local_veto(turn: Turn, fleet: _Fleet, known: WorkerView | None) -> str | None:
    """Why the turn can't be appended on the session's D, or None."""
    if turn.decode is None or (turn.held_tokens == 0 and not turn.stored_response):
        return "not_resident"
    if known is None:
        return "decode_gone"
    if known.role is not Role.DECODE:
        return "not_resident"
    if not known.up:
        return "decode_down"
    if known.state == "draining":
        return "decode_draining"
    if all(view.id != known.id for view in fleet.decodes):
        return "decode_failed"
    return standing(turn.decode, known)


def _on_one_engine(turn: Turn, wish: _Wish, fleet: _Fleet, reason: str, vetoes: tuple[str, ...]) -> Decision:
    """Without a hand-over: the engine that holds the prefix, else a replica, else a D that computes it all."""
    own = next((view for view in fleet.decodes if held_on(turn.decode, view, max(1, turn.held_tokens))), None)
    if own is None and fleet.replicas:
        return _on_replica(turn, wish, fleet, reason, vetoes)
    decode = own or pick_decode(turn, fleet.decodes)
    assert decode is not None, "the caller saw a decode worker"
    return Decision(route=Route.LOCAL, reason=reason, decode=decode, wanted=wish.route, vetoes=vetoes)


def _on_replica(turn: Turn, wish: _Wish, fleet: _Fleet, reason: str, vetoes: tuple[str, ...]) -> Decision:
    replica = pick_decode(turn, fleet.replicas)
    assert replica is not None, "the caller saw a replica"
    return Decision(route=Route.REPLICA, reason=reason, decode=replica, wanted=wish.route, vetoes=vetoes)


def session_share(session_id: str) -> float:
    """A session's fixed place in [0, 1), for mode `fraction`; session ids are hex digests."""
    return int(session_id[:8], 16) / 2**32
