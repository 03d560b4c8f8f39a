"""Rules of other routers, which weigh what a D would have to compute against limits that somebody has set.

All turns are judged alike, the first included: on the D that they would go to, by the tokens that it does not hold.
Their limits' defaults are those routers' own. What they call uncached tokens, a prompt's effective input length (ISL)
or `nonCachedTokens`, is by the beliefs of this proxy.
"""

from __future__ import annotations

import math

from ...fleet.view import WorkerView
from ..candidates import Candidates
from ..decision import Preference, Route, Rules, Turn
from ..placement import pick_decode


def prefix_threshold(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """llm-d's prefix-based decider: LOCAL up to `local_tokens` uncached tokens."""
    decode = _target(turn, candidates)
    few = _uncached(turn, decode) <= rules.limits.local_tokens
    return _local(decode, "few_uncached") if few else _split("many_uncached")


def isl_bounding(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """Dynamo's `isl_bounding`: LOCAL below `local_tokens` and below `local_share` of the prompt, if D is not busy."""
    decode = _target(turn, candidates)
    if _is_busy(decode, rules):
        return _split("decode_busy")
    uncached, limits = _uncached(turn, decode), rules.limits
    few = uncached < limits.local_tokens and uncached < limits.local_share * turn.prompt_tokens
    return _local(decode, "few_uncached") if few else _split("many_uncached")


def prefill_load(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """Dynamo's `prefill_load`: LOCAL while every P has `prefill_busy_tokens` queued or more, if D is not busy."""
    decode = _target(turn, candidates)
    if _is_busy(decode, rules):
        return _split("decode_busy")
    queued = min((view.queued_prefill_tokens for view in candidates.prefills_for(decode)), default=math.inf)
    return _local(decode, "prefill_busy") if queued >= rules.limits.prefill_busy_tokens else _split("prefill_idle")


def isl_or_load(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """Dynamo's `isl_or_load`: LOCAL where either of the two says so."""
    preferred = isl_bounding(turn, candidates, rules)
    return preferred if preferred.route is Route.LOCAL else prefill_load(turn, candidates, rules)


def conditional(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """Dynamo's first rule: SPLIT above `local_tokens` uncached, while a P has fewer than `prefill_busy_requests`."""
    decode = _target(turn, candidates)
    if _uncached(turn, decode) <= rules.limits.local_tokens:
        return _local(decode, "few_uncached")
    fewest = min((view.inflight for view in candidates.prefills_for(decode)), default=math.inf)
    if fewest >= rules.limits.prefill_busy_requests:
        return _local(decode, "prefill_busy")
    return _split("many_uncached")


def _local(decode: WorkerView, reason: str) -> Preference:
    return Preference(Route.LOCAL, reason, decode=decode)


def _split(reason: str) -> Preference:
    return Preference(Route.SPLIT, reason)


def _target(turn: Turn, candidates: Candidates) -> WorkerView:
    decode = candidates.first or pick_decode(turn, candidates.decodes, candidates.slow_start)
    assert decode is not None, "`decide` saw a D"
    return decode


def _uncached(turn: Turn, decode: WorkerView) -> int:
    return turn.prompt_tokens - turn.held_by(decode)


def _is_busy(decode: WorkerView, rules: Rules) -> bool:
    return 0 < rules.limits.decode_busy_requests <= decode.requests
