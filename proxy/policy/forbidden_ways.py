"""Ways that a rule forbids, for the receipt: those that one would have expected among the ways that were judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter

from ..config import Mode, StageOrder
from ..connectors import missing_coordinates
from ..fleet.order import includes, of_workers
from ..fleet.view import Fleet, WorkerView
from ..fleet.worker import Role, WorkerId
from .candidates import Candidates
from .decision import Candidate, Route, Rules, Turn
from .placement import route_alone
from .ways import RECORDED

MOST = 2  # of the candidates of one decision are such ways
LOOKED_AT = 4  # of those that hold something, that are full, and that failed
_WORKERS = attrgetter("decode", "prefill")
# Looking up enum members by name is slow.
_PREFILL, _DECODE, _LOCAL, _SPLIT = Role.PREFILL, Role.DECODE, Route.LOCAL, Route.SPLIT
_PROFILES, _PREFILL_FIRST = Mode.PROFILES, StageOrder.PREFILL_FIRST


def with_forbidden(
    turn: Turn, fleet: Fleet, rules: Rules, candidates: Candidates, judged: Sequence[Candidate]
) -> Sequence[Candidate]:
    """The ways that were judged, and some that were not, with the rule."""
    found: list[Candidate] = []
    shown = set(map(id, chain.from_iterable(map(_WORKERS, judged))))
    for worker in _expected(turn, candidates):
        view = fleet.views.get(worker)
        if view is not None and id(view) not in shown and (rule := _rule(rules, candidates, view)):
            found.append(_forbidden(view, judged[0].decode, rule))
    if len(judged) < RECORDED and candidates.prefills:
        found += _unpaired(rules, candidates, judged)
        if rules.mode is not _PROFILES:
            found += _unread(turn, candidates)
    return [*judged[: RECORDED - len(found[:MOST])], *found[:MOST]] if found else judged


def _expected(turn: Turn, candidates: Candidates) -> Iterable[WorkerId]:
    """The session's worker first, then who holds something, is full or failed. Nearly always no worker is."""
    own, held = turn.decode or turn.affinity, turn.held
    if not candidates.full and not candidates.excluded and len(held) <= LOOKED_AT:
        return held if own is None or own in held else (own, *held)
    failed = (key for key in candidates.excluded if isinstance(key, str)) if candidates.excluded else ()
    first, full = () if own is None else (own,), islice(candidates.full, LOOKED_AT)
    return dict.fromkeys((*first, *islice(held, LOOKED_AT), *full, *islice(failed, LOOKED_AT)))


def _rule(rules: Rules, candidates: Candidates, view: WorkerView) -> str:
    """Empty: none forbids it."""
    if not view.up:
        return "down"
    if view.draining or view.held_back:
        return "draining"
    worker = view.worker.address
    if worker in candidates.full or (0 < rules.worker_limit <= view.inflight and view.role is _PREFILL):
        return "full"
    if worker in candidates.excluded:
        return "failed"
    if rules.mode is _PROFILES:  # a filter or a score
        return ""
    if _is_passed_by_order(candidates, view):
        return "order"
    return "no_profile" if rules.laws is None or rules.laws.of(view) is None else ""


def _is_passed_by_order(candidates: Candidates, view: WorkerView) -> bool:
    """Whether another one of its role was chosen before the mode was asked."""
    if view.role is _PREFILL:
        return candidates.order is _PREFILL_FIRST and not includes(candidates.prefills, view.id)
    return view.role is _DECODE and candidates.first is not None and view is not candidates.first


def _forbidden(view: WorkerView, decode: WorkerView, rule: str) -> Candidate:
    """decode: to which a P would hand over."""
    if view.role is _PREFILL:
        return Candidate(route=_SPLIT, decode=decode, prefill=view, excluded=rule)
    return Candidate(route=route_alone(view), decode=view, excluded=rule)


def _why_apart(prefill: WorkerView, decode: WorkerView) -> str:
    untold = missing_coordinates(prefill.worker) or missing_coordinates(decode.worker)
    return "missing_coordinates" if untold else "cannot_pair"


def _unread(turn: Turn, candidates: Candidates) -> Iterator[Candidate]:
    """What a P does not read back of the session's own D, although both can."""
    if turn.readable is not None or turn.decode is None:
        return
    for decode in of_workers(candidates.decodes, (turn.decode,)):
        if (reader := next(iter(candidates.readers(decode)), None)) is not None:
            yield Candidate(route=Route.READBACK, decode=decode, prefill=reader, excluded=turn.unreadable)


def _unpaired(rules: Rules, candidates: Candidates, judged: Sequence[Candidate]) -> Iterator[Candidate]:
    """A D to which no P was judged to hand over, where all that were judged are here."""
    paired = {id(way.decode) for way in judged if way.prefill is not None}
    decode = next((way.decode for way in judged if way.route is _LOCAL and id(way.decode) not in paired), None)
    if decode is None:
        return
    prefill = candidates.prefills[0]
    rule = _rule(rules, candidates, prefill)
    if not rule and not candidates.can_hand_over(prefill, decode):
        rule = "failed" if (prefill.id, decode.id) in candidates.excluded else _why_apart(prefill, decode)
    if rule:
        yield _forbidden(prefill, decode, rule)
