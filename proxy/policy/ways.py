"""The ways to serve a turn that are worth judging, each with what the laws predict of it.

Never all pairs: the session's worker, those that hold most of the prompt, and the least loaded of each role; where an
order has P or D come first, the one that it has chosen. Where KV may be moved, a D or R that holds the prompt's
beginning may also lend itself as P: it computes the rest, and another one pulls all of it and answers. Where P may
answer, they are judged as R are. Where workers can fetch KV themselves, each way is also judged with that; else P can
read back what the session's D keeps for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter

import msgspec
from msgspec.structs import replace

from ..config import StageOrder
from ..connectors import answers_alone, can_pair, takes_either_leg
from ..fleet.order import RankRule, first_ranked, largest, of_workers
from ..fleet.ranking import prefill_work_rank, work_rank
from ..fleet.rendezvous import spread
from ..fleet.view import WorkerView
from ..laws.prediction import (
    IdleTimes,
    Outlook,
    OwnPrompt,
    Prediction,
    TurnSize,
    Work,
    on_one,
    on_two,
    own_work_on,
    work_on,
)
from ..laws.step_time import EngineProfile
from .candidates import Candidates
from .decision import Candidate, Preference, Readable, Route, Rules, Turn

LEAST_LOADED = 2  # of each role are judged
HOLDERS = 2
ALL = 4  # so few are all judged
PREFILLS = 2  # that are paired with each D
LENDERS = 2  # that are paired with each D and R
FETCH_TOKENS = 256  # fewer are not worth a transfer
RECORDED = 8  # candidates of one decision
# Looking up enum members by name is slow.
_LOCAL, _SPLIT, _REPLICA, _READBACK = Route.LOCAL, Route.SPLIT, Route.REPLICA, Route.READBACK
_PREFILL_FIRST = StageOrder.PREFILL_FIRST
_TOTAL, _HELD = itemgetter(0), attrgetter("held")
BY_WORK = RankRule(prefill_work_rank, prefill_work_rank)  # of P


class Way(msgspec.Struct, frozen=True, gc=False):
    """One of them."""

    route: Route
    decode: Outlook  # or R
    prefill: Outlook | None
    work: Work
    prediction: Prediction

    @property
    def computing(self) -> Outlook:
        """Where the prompt is computed."""
        return self.work.at

    def held(self, turn: Turn) -> int:
        """Of the prompt, where it is computed; one who reads back does so under another name than what it holds."""
        return 0 if self.route is _READBACK else turn.held_by(self.work.at.view)


Terms = Mapping[str, float]
"""What a way costs, by name; the sum is its score."""

Score = Callable[[Way], Terms]


def best_way(turn: Turn, candidates: Candidates, rules: Rules, score: Score) -> Preference:
    """The way whose terms add up to least."""
    judged = [(sum((terms := score(way)).values()), way, terms) for way in ways(turn, candidates, rules)]
    if not judged:  # of engines without a profile nothing is predicted
        return Preference(Route.LOCAL, "no_profile")
    judged.sort(key=_TOTAL)
    first, best = judged[0][0], judged[0][1]
    if len(judged) > 1 and judged[1][0] == first:
        equal = [each for each in judged if each[0] == first]
        best = min(equal, key=lambda each: spread(each[1].decode.view.id, turn.session_id))[1]
        judged.sort(key=lambda each: (each[0], each[1] is not best))
    recorded = [_candidate(score, way, terms) for score, way, terms in judged[:RECORDED]]
    return Preference(best.route, rules.mode.value, ways=recorded, patience_s=_patience_s(turn, best))


def _patience_s(turn: Turn, way: Way) -> float:
    """A prompt that is late in any case can wait."""
    idle_s = way.work.at.idle.ttft_s
    patience_s = turn.slo.ttft_limit_s(idle_s) - idle_s
    return patience_s if patience_s > 0.0 else math.inf


def _candidate(score: float, way: Way, terms: Terms) -> Candidate:
    prefill, work = way.prefill, way.work
    source = work.source
    return Candidate(
        way.route,
        way.decode.view,
        None if prefill is None else prefill.view,
        None if source is None else source.view,
        work.fetched_tokens,
        way.prediction,
        score,
        terms,
    )


def ways(turn: Turn, candidates: Candidates, rules: Rules) -> list[Way]:
    """None whose worker's engine has no profile; if all are such, those with nothing to predict by are left out too."""
    looks = _Looks(turn, candidates, rules)
    first, feeding = candidates.first, candidates.prefills
    if first is None:
        decodes = looks.of(_shortlist(turn, candidates.decodes, candidates, looks))
    else:
        decodes, feeding = looks.of((first,)), candidates.prefills_for(first)
    replicas = looks.of(_shortlist(turn, candidates.replicas, candidates, looks))
    as_replicas: list[_Look] = []
    if rules.prefills_answer and candidates.prefills_answer(turn):
        as_replicas = looks.of(filter(candidates.can_answer, _shortlist(turn, candidates.prefills, candidates, looks)))
    alone = [look for look in decodes if answers_alone(look.at.view.worker)]
    found = [
        Way(route, look.at, None, work, on_one(look.at, work))
        for route, answering in ((_LOCAL, alone), (_REPLICA, replicas), (_REPLICA, as_replicas))
        for look in answering
        for work in look.works
    ]
    for prefill in _prefills(feeding, looks):
        found += _splits(prefill, decodes, candidates, looks)
    if turn.readable is not None:
        found += _readbacks(turn, turn.readable, candidates, looks, decodes)
    if rules.moves_kv:
        found += _moves(turn, candidates, looks, decodes, replicas)
    return found


def _splits(prefill: _Look, decodes: Iterable[_Look], candidates: Candidates, looks: _Looks) -> list[Way]:
    """From this worker to each D or R to which it can hand over."""
    at, works, prompt, worker = prefill.at, prefill.works, looks.size.prompt, prefill.at.view.worker
    if candidates.excluded:
        decodes = [decode for decode in decodes if candidates.can_hand_over(at.view, decode.at.view)]
    return [
        Way(_SPLIT, decode.at, at, work, on_two(at, work, decode.at, prompt - decode.held))
        for decode in decodes
        if can_pair(worker, decode.at.view.worker)
        for work in works
    ]


def _moves(
    turn: Turn, candidates: Candidates, looks: _Looks, decodes: Sequence[_Look], replicas: Sequence[_Look]
) -> Iterator[Way]:
    """SPLIT from a lender, and from a P to an R."""
    for lender in _lenders(turn, candidates, looks, [*decodes, *replicas]):
        lacking = [to for to in (*decodes, *replicas) if lender.held - to.held >= FETCH_TOKENS]
        yield from _splits(lender, filter(_takes_either_leg, lacking), candidates, looks)
    pulling = list(filter(_takes_either_leg, replicas))
    for prefill in _prefills(candidates.prefills, looks) if pulling else ():
        yield from _splits(prefill, pulling, candidates, looks)


def _takes_either_leg(look: _Look) -> bool:
    return takes_either_leg(look.at.view.worker)


def _lenders(turn: Turn, candidates: Candidates, looks: _Looks, answering: Sequence[_Look]) -> Sequence[_Look]:
    """None where P comes first: it is chosen already."""
    if candidates.order is _PREFILL_FIRST:
        return ()
    if candidates.first is not None:  # the other D can still hand over to it
        others = _shortlist(turn, candidates.decodes, candidates, looks)
        answering = [*answering, *looks.of(view for view in others if view is not candidates.first)]
    able = [look for look in answering if look.held >= FETCH_TOKENS and candidates.can_lend(look.at.view)]
    return sorted(able, key=_HELD, reverse=True)[:LENDERS]


def _readbacks(
    turn: Turn, readable: Readable, candidates: Candidates, looks: _Looks, decodes: Sequence[_Look]
) -> Iterator[Way]:
    decode = next((look for look in decodes if look.at.view.id == readable.decode), None)
    if decode is None or readable.tokens >= turn.prompt_tokens:
        return
    size, at, missing = looks.size, decode.at, turn.prompt_tokens - decode.held
    for prefill in _prefills(candidates.readers(at.view), looks):
        work = work_on(prefill.at, size, 0, at, readable.tokens)
        yield Way(_READBACK, at, prefill.at, work, on_two(prefill.at, work, at, missing))


class _Look(msgspec.Struct, frozen=True, gc=False):
    """One worker as this turn would find it."""

    at: Outlook
    held: int  # of the prompt, in tokens
    works: list[Work]  # what the prompt takes there: with what is held; and also with what could be fetched


class _Looks:
    """Workers as this turn would find them, and what its prompt takes there: each worked out once."""

    def __init__(self, turn: Turn, candidates: Candidates, rules: Rules) -> None:
        prompt = turn.prompt_tokens
        self.size = TurnSize(prompt, turn.output_tokens, turn.held_tokens)
        self.held: dict[str, int] = {  # tokens of the prompt, by worker
            worker: tokens
            for worker, held in turn.held.items()
            if (tokens := held.tokens if held.tokens < prompt else prompt) > 0
        }
        self._now_s = candidates.now_s
        self._slow_start = candidates.slow_start
        self._laws = rules.laws
        self._idle: IdleTimes | None = None  # on an engine of the costs that came last: most are alike
        self._own: dict[int, OwnPrompt] = {}  # of the same costs, by the tokens that are held
        self._known: dict[str, _Look | None] = {}
        self._source: _Look | None = None
        self._source = _holder(turn, candidates, self) if rules.fetches_kv else None

    def of(self, views: Iterable[WorkerView]) -> list[_Look]:
        return [look for view in views if (look := self.at(view)) is not None]

    def at(self, view: WorkerView) -> _Look | None:
        """None where nothing is known of the engine."""
        known, worker = self._known, view.worker.address
        if worker in known:
            return known[worker]
        look = known[worker] = self._new(view, worker)
        return look

    def _new(self, view: WorkerView, worker: str) -> _Look | None:
        laws = None if self._laws is None else self._laws.of(view)
        if laws is None:
            return None
        slow_start, idle, costs, now_s = self._slow_start, self._idle, laws.costs, self._now_s
        if slow_start.warm_up_s > now_s - view.since_s:
            laws = replace(laws, ttft_factor=laws.ttft_factor / slow_start(view))
        if idle is None or idle.costs is not costs:
            idle = self._idle = IdleTimes.of(costs, self.size)
            self._own.clear()
        at, held = Outlook.of(view, laws, self.size, now_s, idle), self.held.get(worker, 0)
        works = [own_work_on(at, self._own.get(held) or self._own_prompt(costs, held))]
        source = self._source
        if source is not None and (fetched := source.held - held) >= FETCH_TOKENS:
            works.append(own_work_on(at, self._own_prompt(costs, source.held), source.at, fetched))
        return _Look(at, held, works)

    def _own_prompt(self, costs: EngineProfile, held: int) -> OwnPrompt:
        new = self.size.prompt - held
        own = self._own[held] = OwnPrompt.of(costs, self.size.prompt, new if new > 1 else 1)
        return own


def _shortlist(turn: Turn, views: Sequence[WorkerView], candidates: Candidates, looks: _Looks) -> Sequence[WorkerView]:
    if len(views) <= ALL:
        return views
    rule = candidates.slow_start.by(work_rank)
    chosen = largest(views, looks.held.items(), HOLDERS)
    chosen += of_workers(views, [worker for worker in (turn.decode, turn.affinity) if worker is not None])
    chosen += first_ranked(views, rule, LEAST_LOADED)
    return list({view.worker.address: view for view in chosen}.values())


def _prefills(views: Sequence[WorkerView], looks: _Looks) -> list[_Look]:
    """Of these P, those that would have computed the prompt first."""
    if len(views) > ALL:
        least = first_ranked(views, BY_WORK, LEAST_LOADED)
        chosen = *largest(views, looks.held.items(), HOLDERS), *least
        views = list({view.worker.address: view for view in chosen}.values())
    known = looks.of(views)
    known.sort(key=lambda look: look.at.laws.ttft_factor * look.works[0].done_s)
    return known[:PREFILLS]


def _holder(turn: Turn, candidates: Candidates, looks: _Looks) -> _Look | None:
    """Who holds most of the prompt."""
    able = (candidates.decodes, candidates.replicas, candidates.prefills)
    held = [(worker, tokens) for worker, tokens in looks.held.items() if tokens >= FETCH_TOKENS]
    found = [view for views in able for view in largest(views, held, 1)]
    return looks.at(max(found, key=turn.held_by)) if found else None
