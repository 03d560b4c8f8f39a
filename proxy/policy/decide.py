"""Decides where one turn is computed: the paper's Algorithm 1, within what the live fleet allows.

The first of these that applies says which route is wanted:

1. REPLICA, if a forced route or the mode says so and there is an R, or if there is no D. Not if a D stores the history.
   P that answer in place of D and R count as R.
2. LOCAL, if one engine has to compute the whole request, or stores its history: whatever the table says.
3. The route that the operator forces on this turn, the first included: whatever mode and table say.
4. What the mode asks for (`modes/`). In those of the paper, turn 1 is SPLIT unless a D holds most of the prompt by the
   turns of other sessions, as there is nothing to append to; in mode `table`, later turns are LOCAL if the cell's score
   is above 0.

Where the operator's order has P or D come first, that one is chosen before the mode is asked, which judges what is
left.

Then the fleet decides whether that can be done:

5. READBACK needs a D that keeps the session's KV for it, and a P that can read that. Else it is a SPLIT, with a veto.
6. LOCAL needs the session's D to be there, able to compute a prompt itself, and believed to hold the prefix; REPLICA
   needs an R. Each obstacle is a named veto, and makes the turn a SPLIT; a turn that needs one engine goes to another D
   or R instead.
7. SPLIT needs a P that can hand over to a D; else the turn is computed where it can be.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..config import Mode, StageOrder
from ..connectors import answers_alone
from ..errors import AllBusy, NoWorkerError
from ..fleet.order import includes, of_workers
from ..fleet.view import Fleet, WorkerView
from ..fleet.worker import Role
from ..laws.prediction import idle_ttft_s
from .candidates import Candidates, Excluded, find_candidates, in_order
from .decision import Candidate, Decision, Preference, Route, Rules, Turn
from .forbidden_ways import with_forbidden
from .modes import PLACING, PREDICTING, STRATEGIES
from .modes.slo import EXPLORED
from .modes.table import by_table
from .placement import holds_session, is_overloaded, most_of, own_worker, pick_decode, pick_prefill
from .stage_order import SETTLED

# Looking up enum members by name is slow.
_LOCAL, _SPLIT, _REPLICA, _READBACK = Route.LOCAL, Route.SPLIT, Route.REPLICA, Route.READBACK
_PROFILES, _REPLICAS, _SLO, _BY_MODE, _DECODE = Mode.PROFILES, Mode.REPLICA, Mode.SLO, StageOrder.MODE, Role.DECODE
NO_READER = "no_reader"  # veto of a READBACK
LEAST_MISS = "least_miss"  # reason of a way that misses a target as all others do, and the least


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
    candidates, order = _in_order(
        turn, rules, find_candidates(turn, fleet, rules, qps=qps, now_s=now_s, avoid=avoid, blocked=blocked)
    )
    preference = _preference(turn, candidates, rules)
    decision = _carry_out(turn, preference, candidates)
    held = turn.held.get(decision.decode.id)
    if not preference.ways:
        return replace(decision, order=order, verdict=preference.verdict, qps=qps, held=held)
    is_best = rules.mode is _SLO and decision.reason != EXPLORED
    misses = is_best and all(_misses(turn, rules, way) for way in preference.ways)
    return replace(
        decision,
        reason=LEAST_MISS if misses else decision.reason,
        order=order,
        qps=qps,
        held=held,
        candidates=with_forbidden(turn, fleet, rules, candidates, preference.ways),
    )


def _in_order(turn: Turn, rules: Rules, found: Candidates) -> tuple[Candidates, StageOrder]:
    if rules.schedule is not None and rules.mode is _PROFILES:
        return found, StageOrder.PREFILL_FIRST if rules.schedule.is_prefill_first else StageOrder.DECODE_FIRST
    order = rules.orders.of(turn.model)
    if order is _BY_MODE or rules.mode in SETTLED:
        return found, order
    return in_order(turn, found, rules, order), order


def _misses(turn: Turn, rules: Rules, way: Candidate) -> bool:
    """Whether a target is out of reach, as predicted."""
    predicted, targets = way.prediction, turn.slo
    if predicted is None or rules.laws is None or predicted.tpot_s > targets.tpot_s:
        return True
    if predicted.ttft_s <= targets.ttft_s:
        return False
    laws = rules.laws.of(way.prefill or way.decode)
    idle_s = 0.0 if laws is None else idle_ttft_s(laws.costs, turn.prompt_tokens, turn.held_tokens)
    return predicted.ttft_s > targets.ttft_limit_s(idle_s)


def _preference(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    asks_for_replica = turn.forced is _REPLICA if turn.forced else rules.mode is _REPLICAS
    if asks_for_replica and candidates.replicas and not _is_stored_on_decode(turn, candidates):
        return Preference(_REPLICA, "forced" if turn.forced else "mode_replica")
    is_open = not (turn.stored_response or turn.forced) and (not turn.single_engine or rules.mode is _PROFILES)
    if is_open and rules.mode in PLACING and (preference := STRATEGIES[rules.mode](turn, candidates, rules)).ways:
        return preference
    if not candidates.decodes:
        return Preference(_REPLICA, "no_decode_worker")
    if turn.stored_response:
        return Preference(_LOCAL, "stored_response")
    if turn.single_engine is not None:
        return Preference(_LOCAL, "single_engine")
    if turn.forced is not None:
        return Preference(turn.forced, "forced")
    if rules.mode in PREDICTING:  # and no engine has a profile
        return by_table(turn, candidates, rules)
    return STRATEGIES[rules.mode](turn, candidates, rules)


def _is_stored_on_decode(turn: Turn, candidates: Candidates) -> bool:
    # A replica cannot read a response that a D stores.
    return turn.stored_response and any(view.id == turn.decode for view in candidates.decodes)


def _carry_out(turn: Turn, preference: Preference, candidates: Candidates) -> Decision:
    if preference.ways and (preference.route is not _LOCAL or answers_alone(preference.ways[0].decode.worker)):
        return _on_way(preference, preference.ways[0])
    vetoes: tuple[str, ...] = ()
    if preference.route is _REPLICA:
        if candidates.replicas:
            return _on_replica(turn, preference, candidates, preference.reason, ())
        vetoes = ("no_replica_worker",)
    if preference.route is _READBACK:
        found = _readback(turn, preference, candidates)
        if not isinstance(found, str):
            return found
        vetoes = (found,)
    if preference.decode is not None and answers_alone(preference.decode.worker):
        return Decision(route=_LOCAL, reason=preference.reason, decode=preference.decode, wanted=preference.route)
    if preference.route is _LOCAL:
        veto = _local_veto(turn, preference, candidates)
        if veto is None:
            assert candidates.known is not None, "its absence is a veto"
            return Decision(route=_LOCAL, reason=preference.reason, decode=candidates.known, wanted=preference.route)
        vetoes = (veto,)
        if turn.stored_response or turn.single_engine is not None:
            return _on_one_engine(turn, preference, candidates, preference.reason, vetoes)
    decode = candidates.decode_for(turn)
    assert decode is not None, "the caller saw a decode worker"
    prefill = pick_prefill(turn, candidates.prefills_for(decode), candidates.slow_start)
    if prefill is None:
        veto = candidates.why_unpaired(decode)
        return _on_one_engine(turn, preference, candidates, veto, (*vetoes, veto))
    reason = vetoes[0] if vetoes else preference.reason
    return Decision(route=_SPLIT, reason=reason, decode=decode, prefill=prefill, wanted=preference.route, vetoes=vetoes)


def _on_way(preference: Preference, best: Candidate) -> Decision:
    return Decision(
        route=best.route,
        reason=preference.reason,
        decode=best.decode,
        prefill=best.prefill,
        wanted=best.route,
        source=best.source,
        fetched_tokens=best.fetched_tokens,
        prediction=best.prediction,
        candidates=preference.ways,
        patience_s=preference.patience_s,
    )


def _readback(turn: Turn, preference: Preference, candidates: Candidates) -> Decision | str:
    """Or the veto."""
    readable = turn.readable
    if readable is None or readable.tokens >= turn.prompt_tokens:
        return turn.unreadable
    decode = next(iter(of_workers(candidates.decodes, (readable.decode,))), None)
    if decode is None:
        known = candidates.known
        return "decode_gone" if known is None or known.id != readable.decode else _why_left_out(known, candidates)
    prefill = pick_prefill(turn, candidates.readers(decode), candidates.slow_start)
    if prefill is None:
        return NO_READER
    return Decision(
        route=Route.READBACK,
        reason=preference.reason,
        decode=decode,
        prefill=prefill,
        wanted=preference.route,
        source=decode,
        fetched_tokens=readable.tokens,
    )


def _local_veto(turn: Turn, preference: Preference, candidates: Candidates) -> str | None:
    known = candidates.known
    held = 0 if known is None else turn.held_by(known)
    if not (turn.stored_response or held or (turn.held_tokens and turn.decode is not None)):
        return "not_resident"
    if known is None:
        return "decode_gone"
    if known.worker.role is not _DECODE:
        return "not_resident"
    if not answers_alone(known.worker):
        return "needs_prefill"
    if not includes(candidates.decodes, known.id):
        veto = _why_left_out(known, candidates)
        if turn.stored_response and veto == "decode_busy":
            raise AllBusy("the worker that stores the response is busy")
        return veto
    return None if turn.stored_response else _lacks(turn, preference, known, held, candidates)


def _why_left_out(known: WorkerView, candidates: Candidates) -> str:
    """The veto where this D may not take the turn."""
    if not known.up:
        return "decode_down"
    if known.state == "draining":
        return "decode_draining"
    return "decode_busy" if known.id in candidates.full else "decode_failed"


def _lacks(turn: Turn, preference: Preference, known: WorkerView, held: int, candidates: Candidates) -> str | None:
    """The veto where this D holds too little of the prompt, or too many sessions like this one."""
    is_judged = preference.verdict is not None and held > 0  # by the table, with what is held
    if not is_judged and held < most_of(turn):
        return turn.lost or ("evicted" if turn.held_tokens else "not_resident")
    if not holds_session(turn, known) and is_overloaded(known, candidates.decodes):
        return "decode_busy"
    return None


def _on_one_engine(
    turn: Turn, preference: Preference, candidates: Candidates, reason: str, vetoes: tuple[str, ...]
) -> Decision:
    """Without a handoff: on the D that holds the prefix, else on a replica, else on a D that computes all of it."""
    able = candidates.decodes
    if not all(answers_alone(view.worker) for view in able):
        able = [view for view in able if answers_alone(view.worker)]
    own = own_worker(turn, able)
    if own is None and candidates.replicas:
        return _on_replica(turn, preference, candidates, reason, vetoes)
    decode = own or pick_decode(turn, able, candidates.slow_start)
    if decode is None:
        raise NoWorkerError(f"no worker can compute a prompt of model {turn.model!r} alone ({reason})")
    return Decision(route=_LOCAL, reason=reason, decode=decode, wanted=preference.route, vetoes=vetoes)


def _on_replica(
    turn: Turn, preference: Preference, candidates: Candidates, reason: str, vetoes: tuple[str, ...]
) -> Decision:
    replica = pick_decode(turn, candidates.replicas, candidates.slow_start)
    assert replica is not None, "the caller saw a replica"
    return Decision(route=_REPLICA, reason=reason, decode=replica, wanted=preference.route, vetoes=vetoes)
