"""The ways to serve a turn that are worth judging, each with what the laws predict of it.

Never all pairs: the session's worker, those that hold most of the prompt, and the least loaded of each role. Where KV
may be moved, a D or R that holds the prompt's beginning may also lend itself as P: it computes the rest, and another
one pulls all of it and answers. Where workers can fetch KV themselves, each way is also judged with that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from ..connectors import takes_either_leg
from ..fleet.view import WorkerView
from ..fleet.worker import Role, WorkerId
from ..laws.prediction import Outlook, Prediction, TurnSize, idle_ttft_s, on_one, on_two
from .candidates import Candidates
from .decision import Candidate, Preference, Route, Rules, Turn
from .placement import spread

LEAST_LOADED = 2  # of each role are judged
HOLDERS = 2
ALL = 4  # so few are all judged
PREFILLS = 2  # that are paired with each D
LENDERS = 2  # that are paired with each D and R
FETCH_TOKENS = 256  # fewer are not worth a transfer
RECORDED = 8  # candidates of one decision


class Way(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One of them."""

    route: Route
    decode: Outlook  # or R
    prefill: Outlook | None = None
    source: Outlook | None = None
    fetched_tokens: int = 0
    prediction: Prediction

    @property
    def computing(self) -> Outlook:
        """Where the prompt is computed."""
        return self.decode if self.prefill is None else self.prefill


Terms = dict[str, float]
"""What a way costs, by name; their sum is its score."""

Score = Callable[[Turn, Way, Rules], Terms]


def best_way(turn: Turn, candidates: Candidates, rules: Rules, score: Score) -> Preference:
    """The way whose terms add up to least."""
    judged = [(sum((terms := score(turn, way, rules)).values()), way, terms) for way in ways(turn, candidates, rules)]
    if not judged:  # of engines without a profile nothing is predicted
        return Preference(Route.LOCAL, "no_profile")
    judged.sort(key=lambda each: each[0])
    first, best = judged[0][0], judged[0][1]
    equal = [each for each in judged if each[0] == first]
    if len(equal) > 1:
        best = min(equal, key=lambda each: spread(each[1].decode.view, turn.session_id))[1]
        judged.sort(key=lambda each: (each[0], each[1] is not best))
    recorded = [_candidate(way, total, terms) for total, way, terms in judged[:RECORDED]]
    return Preference(best.route, rules.mode.value, ways=recorded, patience_s=_patience_s(turn, best))


def ttft_limit_s(turn: Turn, way: Way) -> float:
    return max(turn.slo.ttft_s, turn.slo.ttft_factor * _idle_s(turn, way))


def _patience_s(turn: Turn, way: Way) -> float:
    return ttft_limit_s(turn, way) - _idle_s(turn, way)


def _idle_s(turn: Turn, way: Way) -> float:
    return idle_ttft_s(way.computing.laws.costs, turn.prompt_tokens, turn.held_tokens)


def _candidate(way: Way, score: float, terms: Terms) -> Candidate:
    return Candidate(
        route=way.route,
        decode=way.decode.view,
        prefill=None if way.prefill is None else way.prefill.view,
        source=None if way.source is None else way.source.view,
        fetched_tokens=way.fetched_tokens,
        prediction=way.prediction,
        score=score,
        terms=terms,
    )


def ways(turn: Turn, candidates: Candidates, rules: Rules) -> Iterator[Way]:
    """None whose worker's engine has no profile; if all are such, those with nothing to predict by are left out too."""
    looks = _Looks(candidates, rules)
    size = TurnSize(turn.prompt_tokens, turn.output_tokens)
    source = _holder(turn, candidates, looks) if rules.fetches_kv else None
    decodes = list(map(looks.at, _shortlist(turn, candidates.decodes, candidates)))
    replicas = list(map(looks.at, _shortlist(turn, candidates.replicas, candidates)))
    for route, answering in ((Route.LOCAL, decodes), (Route.REPLICA, replicas)):
        for at in answering:
            if at is None:
                continue
            held = turn.held_by(at.view)
            yield Way(route=route, decode=at, prediction=on_one(at, size, held))
            if source is not None and (fetched := _fetched(turn, at, source, held)):
                prediction = on_one(at, size, held, source=source, fetched_tokens=fetched)
                yield Way(route=route, decode=at, source=source, fetched_tokens=fetched, prediction=prediction)
    for prefill in _prefills(turn, candidates, looks, size):
        for at in decodes:
            if at is not None and candidates.can_hand_over(prefill.view, at.view):
                yield from _split(turn, prefill, at, size, source)
    if rules.moves_kv:
        yield from _moves(turn, candidates, looks, size, [at for at in (*decodes, *replicas) if at is not None])


def _moves(
    turn: Turn, candidates: Candidates, looks: _Looks, size: TurnSize, answering: Sequence[Outlook]
) -> Iterator[Way]:
    """SPLIT from a lender, and from a P to an R."""
    able = [at for at in answering if turn.held_by(at.view) >= FETCH_TOKENS and candidates.can_lend(at.view)]
    lenders = sorted(able, key=lambda at: turn.held_by(at.view), reverse=True)[:LENDERS]
    for lender in lenders:
        held = turn.held_by(lender.view)
        for at in answering:
            gains = held - turn.held_by(at.view) >= FETCH_TOKENS
            if gains and takes_either_leg(at.view.worker) and candidates.can_hand_over(lender.view, at.view):
                yield from _split(turn, lender, at, size, None)
    pulling = [at for at in answering if at.view.role is Role.REPLICA and takes_either_leg(at.view.worker)]
    for prefill in _prefills(turn, candidates, looks, size) if pulling else ():
        for at in pulling:
            if candidates.can_hand_over(prefill.view, at.view):
                yield from _split(turn, prefill, at, size, None)


def _split(turn: Turn, prefill: Outlook, decode: Outlook, size: TurnSize, source: Outlook | None) -> Iterator[Way]:
    held, missing = turn.held_by(prefill.view), turn.prompt_tokens - turn.held_by(decode.view)
    prediction = on_two(prefill, decode, size, held, missing)
    yield Way(route=Route.SPLIT, decode=decode, prefill=prefill, prediction=prediction)
    if source is not None and (fetched := _fetched(turn, prefill, source, held)):
        prediction = on_two(prefill, decode, size, held, missing, source=source, fetched_tokens=fetched)
        yield Way(
            route=Route.SPLIT,
            decode=decode,
            prefill=prefill,
            source=source,
            fetched_tokens=fetched,
            prediction=prediction,
        )


def _fetched(turn: Turn, at: Outlook, source: Outlook, held: int) -> int:
    if at.view is source.view:
        return 0
    fetched = turn.held_by(source.view) - held
    return fetched if fetched >= FETCH_TOKENS else 0


class _Looks:
    """Outlooks, each made once."""

    def __init__(self, candidates: Candidates, rules: Rules) -> None:
        self._candidates = candidates
        self._laws = rules.laws
        self._known: dict[WorkerId, Outlook | None] = {}

    def at(self, view: WorkerView) -> Outlook | None:
        if view.id not in self._known:
            self._known[view.id] = self._new(view)
        return self._known[view.id]

    def _new(self, view: WorkerView) -> Outlook | None:
        laws = None if self._laws is None else self._laws.of(view)
        if laws is None:
            return None
        slow = self._candidates.slow_start(view)
        if slow < 1.0:
            laws = replace(laws, ttft_factor=laws.ttft_factor / slow)
        return Outlook.of(view, laws, self._candidates.now_s)


def _shortlist(turn: Turn, views: Sequence[WorkerView], candidates: Candidates) -> Sequence[WorkerView]:
    if len(views) <= ALL:
        return views
    chosen = sorted((view for view in views if turn.held_by(view)), key=turn.held_by, reverse=True)[:HOLDERS]
    chosen += [view for view in views if view.id in (turn.decode, turn.affinity)]
    least = sorted(views, key=lambda view: _load(view, candidates))[:LEAST_LOADED]
    return list({view.id: view for view in (*chosen, *least)}.values())


def _load(view: WorkerView, candidates: Candidates) -> tuple[float, float]:
    factor = candidates.slow_start(view)
    return (view.requests + 1) / factor, (view.queued_prefill_tokens + view.recent_tokens) / factor


def _prefills(turn: Turn, candidates: Candidates, looks: _Looks, size: TurnSize) -> list[Outlook]:
    """Those that would have computed the prompt first."""
    views = candidates.prefills
    if len(views) > ALL:
        holders = sorted((view for view in views if turn.held_by(view)), key=turn.held_by, reverse=True)[:HOLDERS]
        least = sorted(views, key=attrgetter("queued_prefill_s", "queued_prefill_tokens", "requests"))[:LEAST_LOADED]
        views = list({view.id: view for view in (*holders, *least)}.values())
    known = [look for look in map(looks.at, views) if look is not None]
    known.sort(key=lambda look: on_one(look, size, turn.held_by(look.view)).ttft_s)
    return known[:PREFILLS]


def _holder(turn: Turn, candidates: Candidates, looks: _Looks) -> Outlook | None:
    """Who holds most of the prompt."""
    able = (*candidates.decodes, *candidates.replicas, *candidates.prefills)
    holder = max((view for view in able if turn.held_by(view) >= FETCH_TOKENS), key=turn.held_by, default=None)
    return None if holder is None else looks.at(holder)
