"""The paper's Algorithm 1: LOCAL where the measurements of turns like this one say that it is better."""

from __future__ import annotations

from ...config import Uncovered
from ...decision_table.table import TableQuery
from ..candidates import Candidates
from ..decision import Preference, Route, Rules, Turn
from .fixed import FIRST_TURN, appends

_LOCAL, _SPLIT = Route.LOCAL, Route.SPLIT  # looking up enum members by name is slow


def by_table(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    if not appends(turn, candidates):
        return FIRST_TURN
    if rules.scored is None:
        return Preference(_uncovered(rules), "no_table")
    # Where nothing is held the table is asked all the same, so that the veto shows what that costs.
    known = candidates.known
    held = (turn.held_by(known) if known is not None else 0) or turn.held_tokens
    new = turn.prompt_tokens - held
    verdict = rules.scored.lookup(TableQuery(new if new > 1 else 1, held, turn.output_tokens, candidates.qps))
    if verdict.local is None:
        return Preference(_uncovered(rules), "no_evidence", verdict)
    return Preference(_LOCAL, "table_local", verdict) if verdict.local else Preference(_SPLIT, "table_split", verdict)


def _uncovered(rules: Rules) -> Route:
    return _LOCAL if rules.uncovered is Uncovered.LOCAL else _SPLIT
