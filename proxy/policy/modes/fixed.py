"""The arms of the paper: one route for all turns that append to what a D holds. All others are SPLIT."""

from __future__ import annotations

from ..candidates import Candidates
from ..decision import Preference, Route, Rules, Turn
from ..placement import holds_most, session_share

FIRST_TURN = Preference(Route.SPLIT, "first_turn")


def appends(turn: Turn, candidates: Candidates) -> bool:
    """Whether the turn is a later one of its session, or a D holds most of it by the turns of other sessions."""
    return turn.number > 1 or (candidates.known is not None and holds_most(turn, candidates.known))


def always_local(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """x = 1."""
    return Preference(Route.LOCAL, "mode_always_local") if appends(turn, candidates) else FIRST_TURN


def always_split(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """x = 0."""
    return Preference(Route.SPLIT, "mode_always_split" if appends(turn, candidates) else FIRST_TURN.reason)


def fraction(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """The share x of sessions, all their turns; a D may have an x of its own."""
    if not appends(turn, candidates):
        return FIRST_TURN
    own = candidates.known.worker.x if candidates.known is not None else None
    if session_share(turn.session_id) < (rules.x if own is None else own):
        return Preference(Route.LOCAL, "fraction_local")
    return Preference(Route.SPLIT, "fraction_split")
