"""llm-d's way: a profile picks the D, a decider says whether a P computes the prompt, another profile picks that P."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ...config import Mode
from ...connectors import answers_alone, takes_either_leg
from ...errors import AllBusy, AllDown, NoWorkerError
from ...fleet.view import WorkerView
from ...fleet.worker import Role
from ..candidates import Candidates
from ..decision import Candidate, Preference, Route, Rules, Turn
from ..placement import route_alone
from ..profiles.deciders import AlwaysSplit, OwnRule, PrefixBased
from ..profiles.scene import Scene
from ..profiles.schedule import Picked, Schedule
from .predicted import least_ttft, lmetric, slack, weights
from .slo import slo
from .table import by_table

DECODE_DRAW, PREFILL_DRAW = 0, 1
_PREDICTED = {
    Mode.SLO: slo,
    Mode.WEIGHTS: weights,
    Mode.LEAST_TTFT: least_ttft,
    Mode.LMETRIC: lmetric,
    Mode.SLACK: slack,
}


def by_profiles(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """NoWorkerError, AllBusy or AllDown where the profile of D leaves no worker."""
    schedule = rules.schedule
    assert schedule is not None, "the mode is refused without one"
    scene = Scene(turn, schedule.memory)
    if schedule.is_prefill_first and turn.single_engine is None:
        return _prefill_first(scene, candidates, rules, schedule)
    picked = schedule.decode.run(scene, _answering(candidates), DECODE_DRAW)
    if picked is None:
        raise _nobody(candidates, schedule)
    if turn.single_engine is not None:
        return _alone(scene, candidates, schedule, picked, "single_engine")
    splits, reason = _decided(scene, picked.view, candidates, rules)
    if not splits or schedule.prefill is None:
        return _alone(scene, candidates, schedule, picked, reason)
    if not _takes_kv(picked.view, rules):
        return _alone(scene, candidates, schedule, picked, "decode_on_replica")
    able = _feeding(picked.view, candidates, rules)
    prefill = schedule.prefill.run(scene, able, PREFILL_DRAW)
    if prefill is None:
        reason = "no_prefill_worker" if able else candidates.why_unpaired(picked.view)
        return _alone(scene, candidates, schedule, picked, reason)
    return _split(prefill.view, picked, reason)


def _prefill_first(scene: Scene, candidates: Candidates, rules: Rules, schedule: Schedule) -> Preference:
    assert schedule.prefill is not None, "it comes first"
    answering = _answering(candidates)
    prefill = schedule.prefill.run(scene, candidates.prefills, PREFILL_DRAW)
    if prefill is not None:
        able = [view for view in answering if _takes_kv(view, rules) and candidates.can_hand_over(prefill.view, view)]
        picked = schedule.decode.run(scene, able, DECODE_DRAW)
        if picked is not None:
            return _split(prefill.view, picked, "prefill_first")
    picked = schedule.decode.run(scene, answering, DECODE_DRAW)
    if picked is None:
        raise _nobody(candidates, schedule)
    return _alone(scene, candidates, schedule, picked, "no_prefill_worker")


def _answering(candidates: Candidates) -> list[WorkerView]:
    return [*candidates.decodes, *candidates.replicas]


def _takes_kv(view: WorkerView, rules: Rules) -> bool:
    return view.role is Role.DECODE or (rules.moves_kv and takes_either_leg(view.worker))


def _feeding(decode: WorkerView, candidates: Candidates, rules: Rules) -> Sequence[WorkerView]:
    """Who may compute the prompt for it: P, and where KV may be moved, a D or R that lends itself."""
    able = candidates.prefills_for(decode)
    if not rules.moves_kv:
        return able
    lenders = [view for view in _answering(candidates) if view.id != decode.id and candidates.can_lend(view)]
    return [*able, *(view for view in lenders if candidates.can_hand_over(view, decode))]


def _decided(scene: Scene, decode: WorkerView, candidates: Candidates, rules: Rules) -> tuple[bool, str]:
    """Whether a P is to compute the prompt, and why."""
    decider = None if rules.schedule is None else rules.schedule.decider
    if decider is None:
        return False, "no_decider"
    if isinstance(decider, AlwaysSplit):
        return True, "always_disagg"
    if isinstance(decider, PrefixBased):
        splits = decider.splits(scene, decode)
        return splits, "many_uncached" if splits else "few_uncached"
    preference = _by_own_rule(decider, scene.turn, decode, candidates, rules)  # type: ignore[arg-type]  # a Turn
    return preference.route is Route.SPLIT, preference.reason


def _by_own_rule(rule: OwnRule, turn: Turn, decode: WorkerView, candidates: Candidates, rules: Rules) -> Preference:
    """What a mode of the proxy's own says, if the turn can go to this worker only."""
    is_decode = decode.role is Role.DECODE
    narrowed = replace(
        candidates,
        decodes=[decode] if is_decode else [],
        replicas=[] if is_decode else [decode],
        known=decode,
    )
    if rule.mode in _PREDICTED and (found := _PREDICTED[rule.mode](turn, narrowed, rules)).ways:
        return replace(found, reason=rule.mode.value)
    return by_table(turn, narrowed, rules)


def _alone(scene: Scene, candidates: Candidates, schedule: Schedule, picked: Picked, reason: str) -> Preference:
    """On the D, or the R, that the profile took; on another one, where it computes no prompts."""
    if picked.view.role is Role.DECODE and not answers_alone(picked.view.worker):
        able = [view for view in _answering(candidates) if view.role is Role.REPLICA or answers_alone(view.worker)]
        other = schedule.decode.run(scene, able, DECODE_DRAW)
        if other is None:
            raise _nobody(candidates, schedule)
        picked = other
    return _preference(route_alone(picked.view), picked, None, reason)


def _split(prefill: WorkerView, picked: Picked, reason: str) -> Preference:
    return _preference(Route.SPLIT, picked, prefill, reason)


def _preference(route: Route, picked: Picked, prefill: WorkerView | None, reason: str) -> Preference:
    terms = picked.terms
    way = Candidate(route=route, decode=picked.view, prefill=prefill, score=sum(terms.values()), terms=terms)
    return Preference(route, reason, ways=(way,))


def _nobody(candidates: Candidates, schedule: Schedule) -> NoWorkerError:
    told = f"profile {schedule.decode.name!r} leaves no worker that could answer"
    if candidates.full:
        return AllBusy(told)
    return AllDown(told) if candidates.down else NoWorkerError(told)
