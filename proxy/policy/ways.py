"""The ways to serve a turn that are worth judging, each with what the laws predict of it.

Never all pairs: the session's worker, those that hold most of the prompt, and the least loaded of each role; where an
order has P or D come first, the one that it has chosen. Where KV may be moved, a D or R that holds the prompt's
beginning may also lend itself as P: it computes the rest, and another one pulls all of it and answers. Where P may
answer, they are judged as R are. Where workers can fetch KV themselves, each way is also judged with that; else P can
read back what the session's D keeps for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from operator import itemgetter

import msgspec
from msgspec.structs import replace

from ..config import StageOrder
from ..connectors import answers_alone, takes_either_leg
from ..fleet.order import RankRule, first_ranked, of_workers
from ..fleet.ranking import prefill_work_rank, work_rank
from ..fleet.rendezvous import spread
from ..fleet.view import WorkerView
from ..fleet.worker import Role
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
_LOCAL, _SPLIT, _REPLICA = Route.LOCAL, Route.SPLIT, Route.REPLICA  # looking up enum members by name is slow in a loop
_TOTAL = itemgetter(0)
BY_WORK = RankRule(prefill_work_rank, prefill_work_rank, now_s=0.0, slow_start_s=0.0)  # of P


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
        return 0 if self.route is Route.READBACK else turn.held_by(self.work.at.view)


Terms = Sequence[float]
"""What a way costs; their sum is its score."""

Score = Callable[[Turn, Way, Rules], Terms]


def best_way(turn: Turn, candidates: Candidates, rules: Rules, names: Sequence[str], score: Score) -> Preference:
    """The way whose terms add up to least. names: of the terms."""
    judged = [(sum(terms := score(turn, way, rules)), way, terms) for way in ways(turn, candidates, rules)]
    if not judged:  # of engines without a profile nothing is predicted
        return Preference(Route.LOCAL, "no_profile")
    judged.sort(key=_TOTAL)
    first, best = judged[0][0], judged[0][1]
    if len(judged) > 1 and judged[1][0] == first:
        equal = [each for each in judged if each[0] == first]
        best = min(equal, key=lambda each: spread(each[1].decode.view.id, turn.session_id))[1]
        judged.sort(key=lambda each: (each[0], each[1] is not best))
    recorded = [_candidate(way, total, dict(zip(names, terms, strict=True))) for total, way, terms in judged[:RECORDED]]
    return Preference(best.route, rules.mode.value, ways=recorded, patience_s=_patience_s(turn, best))


def ttft_limit_s(turn: Turn, at: Outlook) -> float:
    """at: where the prompt is computed."""
    targets, scaled_s = turn.slo, turn.slo.ttft_factor * at.idle.ttft_s
    return targets.ttft_s if targets.ttft_s > scaled_s else scaled_s


def _patience_s(turn: Turn, way: Way) -> float:
    return ttft_limit_s(turn, way.work.at) - way.work.at.idle.ttft_s


def _candidate(way: Way, score: float, terms: Mapping[str, float]) -> Candidate:
    prefill, work = way.prefill, way.work
    return Candidate(
        way.route,
        way.decode.view,
        None if prefill is None else prefill.view,
        None if work.source is None else work.source.view,
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
        decodes = looks.of(_shortlist(turn, candidates.decodes, candidates))
    else:
        decodes, feeding = looks.of((first,)), candidates.prefills_for(first)
    replicas = looks.of(_shortlist(turn, candidates.replicas, candidates))
    as_replicas: list[Outlook] = []
    if rules.prefills_answer and candidates.prefills_answer(turn):
        as_replicas = looks.of(filter(candidates.can_answer, _shortlist(turn, candidates.prefills, candidates)))
    alone = [at for at in decodes if answers_alone(at.view.worker)]
    found = [
        Way(route, at, None, work, on_one(at, work))
        for route, answering in ((_LOCAL, alone), (_REPLICA, replicas), (_REPLICA, as_replicas))
        for at in answering
        for work in looks.works(at)
    ]
    for prefill in _prefills(turn, feeding, looks):
        for at in decodes:
            if candidates.can_hand_over(prefill.view, at.view):
                found += _split(prefill, at, looks)
    if turn.readable is not None:
        found += _readbacks(turn, turn.readable, candidates, looks, decodes)
    if rules.moves_kv:
        found += _moves(turn, candidates, looks, (*decodes, *replicas))
    return found


def _moves(turn: Turn, candidates: Candidates, looks: _Looks, answering: Sequence[Outlook]) -> Iterator[Way]:
    """SPLIT from a lender, and from a P to an R."""
    pulling = [at for at in answering if takes_either_leg(at.view.worker)]
    for lender in _lenders(turn, candidates, looks, answering):
        held = turn.held_by(lender.view)
        for at in pulling:
            if held - turn.held_by(at.view) >= FETCH_TOKENS and candidates.can_hand_over(lender.view, at.view):
                yield from _split(lender, at, looks)
    replicas = [at for at in pulling if at.view.role is Role.REPLICA]
    for prefill in _prefills(turn, candidates.prefills, looks) if replicas else ():
        for at in replicas:
            if candidates.can_hand_over(prefill.view, at.view):
                yield from _split(prefill, at, looks)


def _lenders(turn: Turn, candidates: Candidates, looks: _Looks, answering: Sequence[Outlook]) -> Sequence[Outlook]:
    """None where P comes first: it is chosen already."""
    if candidates.order is StageOrder.PREFILL_FIRST:
        return ()
    if candidates.first is not None:  # the other D can still hand over to it
        others = _shortlist(turn, candidates.decodes, candidates)
        answering = [*answering, *looks.of(view for view in others if view is not candidates.first)]
    able = [at for at in answering if turn.held_by(at.view) >= FETCH_TOKENS and candidates.can_lend(at.view)]
    return sorted(able, key=lambda at: turn.held_by(at.view), reverse=True)[:LENDERS]


def _readbacks(
    turn: Turn, readable: Readable, candidates: Candidates, looks: _Looks, decodes: Sequence[Outlook]
) -> Iterator[Way]:
    decode = next((at for at in decodes if at.view.id == readable.decode), None)
    if decode is None or readable.tokens >= turn.prompt_tokens:
        return
    size, missing = looks.size, looks.missing(decode)
    for prefill in _prefills(turn, candidates.readers(decode.view), looks):
        work = work_on(prefill, size, 0, decode, readable.tokens)
        yield Way(Route.READBACK, decode, prefill, work, on_two(prefill, work, decode, missing))


def _split(prefill: Outlook, decode: Outlook, looks: _Looks) -> list[Way]:
    missing = looks.missing(decode)
    return [Way(_SPLIT, decode, prefill, work, on_two(prefill, work, decode, missing)) for work in looks.works(prefill)]


class _Looks:
    """Workers as this turn would find them, and what its prompt takes there: each worked out once."""

    def __init__(self, turn: Turn, candidates: Candidates, rules: Rules) -> None:
        self.size = TurnSize(turn.prompt_tokens, turn.output_tokens, turn.held_tokens)
        self._turn = turn
        self._candidates = candidates
        self._laws = rules.laws
        self._idle: IdleTimes | None = None  # on an engine of the costs that came last: most are alike
        self._own: dict[int, OwnPrompt] = {}  # of the same costs, by the tokens that are computed
        self._known: dict[str, Outlook | None] = {}
        self._works: dict[str, list[Work]] = {}
        self._source = _holder(turn, candidates, self) if rules.fetches_kv else None
        self._at_source = 0 if self._source is None else turn.held_by(self._source.view)  # tokens

    def of(self, views: Iterable[WorkerView]) -> list[Outlook]:
        return [look for look in map(self.at, views) if look is not None]

    def at(self, view: WorkerView) -> Outlook | None:
        worker = view.worker.address
        if worker not in self._known:
            self._known[worker] = self._new(view)
        return self._known[worker]

    def _new(self, view: WorkerView) -> Outlook | None:
        laws = None if self._laws is None else self._laws.of(view)
        if laws is None:
            return None
        slow = self._candidates.slow_start(view)
        if slow < 1.0:
            laws = replace(laws, ttft_factor=laws.ttft_factor / slow)
        return Outlook.of(view, laws, self.size, self._candidates.now_s, self._idle_on(laws.costs))

    def _idle_on(self, costs: EngineProfile) -> IdleTimes:
        if self._idle is None or self._idle.costs is not costs:
            self._idle = IdleTimes.of(costs, self.size)
            self._own.clear()
        return self._idle

    def missing(self, at: Outlook) -> int:
        """Tokens of the prompt that are not held there."""
        return self.size.prompt - self._turn.held_by(at.view)

    def works(self, at: Outlook) -> list[Work]:
        """With what is held there; and also with what could be fetched."""
        worker = at.view.worker.address
        if (known := self._works.get(worker)) is not None:
            return known
        missing = self.missing(at)
        works = self._works[worker] = [own_work_on(at, self._own_prompt(at.laws.costs, missing))]
        if self._source is not None and (fetched := self._at_source - (self.size.prompt - missing)) >= FETCH_TOKENS:
            own = self._own_prompt(at.laws.costs, missing - fetched)
            works.append(own_work_on(at, own, self._source, fetched))
        return works

    def _own_prompt(self, costs: EngineProfile, missing: int) -> OwnPrompt:
        self._idle_on(costs)
        new = missing if missing > 1 else 1
        if (own := self._own.get(new)) is None:
            own = self._own[new] = OwnPrompt.of(costs, self.size.prompt, new)
        return own


def _shortlist(turn: Turn, views: Sequence[WorkerView], candidates: Candidates) -> Sequence[WorkerView]:
    if len(views) <= ALL:
        return views
    slow_start = candidates.slow_start
    rule = slow_start.rule(lambda view: work_rank(view, slow_start(view)), work_rank)
    chosen = _holders(turn, views, HOLDERS)
    chosen += of_workers(views, [worker for worker in (turn.decode, turn.affinity) if worker is not None])
    chosen += first_ranked(views, rule, LEAST_LOADED)
    return list({view.id: view for view in chosen}.values())


def _holders(turn: Turn, views: Sequence[WorkerView], count: int, least: int = 1) -> list[WorkerView]:
    """Those that hold most of the prompt, and so many tokens at least; of equals those that come first."""
    if not turn.held:
        return []
    found = [
        (-held, at, view)
        for at, view in enumerate(of_workers(views, turn.held))
        if (held := turn.held_by(view)) >= least
    ]
    return [view for _, _, view in nsmallest(count, found)]


def _prefills(turn: Turn, views: Sequence[WorkerView], looks: _Looks) -> list[Outlook]:
    """Of these P, those that would have computed the prompt first."""
    if len(views) > ALL:
        least = first_ranked(views, BY_WORK, LEAST_LOADED)
        views = list({view.id: view for view in (*_holders(turn, views, HOLDERS), *least)}.values())
    known = looks.of(views)
    known.sort(key=lambda look: look.laws.ttft_factor * looks.works(look)[0].done_s)
    return known[:PREFILLS]


def _holder(turn: Turn, candidates: Candidates, looks: _Looks) -> Outlook | None:
    """Who holds most of the prompt."""
    able = (candidates.decodes, candidates.replicas, candidates.prefills)
    found = [view for views in able for view in _holders(turn, views, 1, FETCH_TOKENS)]
    return looks.at(max(found, key=turn.held_by)) if found else None
