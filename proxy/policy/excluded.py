"""Ways that a rule forbids, for the receipt: those that one would have expected among the ways that were judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from ..fleet.view import Fleet, WorkerView
from ..fleet.worker import Role, WorkerId
from .candidates import Candidates
from .decision import Candidate, Route, Rules, Turn
from .ways import RECORDED

MOST = 2  # of the candidates of one decision are such ways
LOOKED_AT = 4  # of those that hold something, that are full, and that failed


def with_excluded(
    turn: Turn, fleet: Fleet, rules: Rules, candidates: Candidates, judged: Sequence[Candidate]
) -> Sequence[Candidate]:
    """The ways that were judged, and some that were not, with the rule."""
    found = list(islice(_excluded(turn, fleet, rules, candidates, judged), MOST))
    return [*judged[: RECORDED - len(found)], *found] if found else judged


def _excluded(
    turn: Turn, fleet: Fleet, rules: Rules, candidates: Candidates, judged: Sequence[Candidate]
) -> Iterator[Candidate]:
    """The session's worker first, then who holds something, is full or failed; then a pair that cannot hand over."""
    for worker in _expected(turn, candidates):
        view = fleet.views.get(worker)
        if view is None or not (rule := _rule(turn, rules, candidates, view)):
            continue
        if any(view is way.decode or view is way.prefill for way in judged):
            continue
        if view.role is Role.PREFILL:
            yield Candidate(route=Route.SPLIT, decode=judged[0].decode, prefill=view, excluded=rule)
        else:
            yield Candidate(route=_ROUTES[view.role], decode=view, excluded=rule)
    if candidates.prefills and (decode := _unpaired(judged)) is not None:
        prefill = candidates.prefills[0]
        rule = _rule(turn, rules, candidates, prefill)
        if not rule and not candidates.can_hand_over(prefill, decode):
            rule = "failed" if (prefill.id, decode.id) in candidates.excluded else "cannot_pair"
        if rule:
            yield Candidate(route=Route.SPLIT, decode=decode, prefill=prefill, excluded=rule)


_ROUTES = {Role.DECODE: Route.LOCAL, Role.REPLICA: Route.REPLICA}


def _expected(turn: Turn, candidates: Candidates) -> dict[WorkerId, None]:
    """Each once."""
    own = (worker for worker in (turn.decode, turn.affinity) if worker is not None)
    failed = (key for key in candidates.excluded if isinstance(key, str))
    others = (islice(each, LOOKED_AT) for each in (turn.held, candidates.full, failed))
    return dict.fromkeys(chain(own, *others))


def _rule(turn: Turn, rules: Rules, candidates: Candidates, view: WorkerView) -> str:
    """Empty: none forbids it."""
    if not view.takes_turns(turn.model):
        return "down" if not view.up else "draining" if view.draining or view.held_back else "other_model"
    if view.id in candidates.full or (view.role is Role.PREFILL and 0 < rules.worker_limit <= view.inflight):
        return "full"
    if view.id in candidates.excluded:
        return "failed"
    return "no_profile" if rules.laws is None or rules.laws.of(view) is None else ""


def _unpaired(judged: Sequence[Candidate]) -> WorkerView | None:
    """A D to which no P was judged to hand over, though all that were judged are here."""
    if len(judged) >= RECORDED:
        return None
    paired = [way.decode for way in judged if way.prefill is not None]
    return next((way.decode for way in judged if way.route is Route.LOCAL and way.decode not in paired), None)
