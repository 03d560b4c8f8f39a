"""Each turn of a log decided again, with all others as they were; and what the laws say that it changes.

So each decision is compared by itself: what a whole fleet under the other rules would come to, a simulation tells.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from msgspec.structs import replace

from ppd.proxy.errors import NoWorkerError
from ppd.proxy.fleet.ledger import LegEstimates
from ppd.proxy.fleet.view import Fleet, WorkerView
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.laws.prediction import Laws, Outlook, Prediction, TurnSize, idle_ttft_s, on_one, on_two, work_on
from ppd.proxy.laws.targets import USUAL, GivenTargets, SloTargets, TargetRules
from ppd.proxy.policy import Decision, Route, Rules, Turn, decide
from ppd.proxy.policy.decision import Readable

from .past_beliefs import USUAL_LIMITS, KnownSession, PastBeliefs, SessionLimits
from .past_fleet import PastFleet
from .past_turns import PastTurn

ROUTES = frozenset(Route)


@dataclass(slots=True)
class Compared:
    """Of all turns that could be compared, in the log's order: one item a turn in each array."""

    sessions: array[int] = field(default_factory=lambda: array("l"))  # numbered from 0
    ttft_s: tuple[array[float], array[float]] = field(default_factory=lambda: (array("d"), array("d")))
    tpot_s: tuple[array[float], array[float]] = field(default_factory=lambda: (array("d"), array("d")))
    missed: tuple[array[int], array[int]] = field(default_factory=lambda: (array("b"), array("b")))
    ttft_errors: array[float] = field(default_factory=lambda: array("d"))  # of the turns as they went: measured
    tpot_errors: array[float] = field(default_factory=lambda: array("d"))  # over predicted, less 1
    recorded_errors: array[float] = field(default_factory=lambda: array("d"))  # recorded over rebuilt, less 1
    changes: Counter[tuple[str, str]] = field(default_factory=Counter)  # of routes; the same one: other workers
    refused: int = 0  # that the rules found no worker for
    unpredicted: int = 0  # of workers without a profile

    @property
    def count(self) -> int:
        return len(self.sessions)


def replay(
    turns: Sequence[PastTurn],
    rules: Rules,
    laws: Laws,
    *,
    capacity_tokens: int,
    targets: GivenTargets | None = None,
    sessions: SessionLimits = USUAL_LIMITS,
) -> Compared:
    """turns: in order of their decisions. targets: those given, in place of their own."""
    fleet, compared, numbers = PastFleet(turns, capacity_tokens), Compared(), _Numbers()
    beliefs = PastBeliefs(fleet.engine, fleet.when, sessions, prefills_answer=rules.prefills_answer)
    returns = beliefs.returns if sessions.returns else rules.returns
    rules = replace(rules, returns=returns, targets=TargetRules(usual=_usual(turns, targets)))
    for past in turns:
        now_s = past.decided_s
        views = fleet.at(now_s, past.model)
        known = beliefs.came(past)
        turn = _turn(past, known, beliefs, views, targets)
        way, went = _way(views, past), None
        try:
            decision = decide(turn, views, rules, qps=past.qps, now_s=now_s)
        except NoWorkerError:
            compared.refused += 1
        else:
            went = None if way is None else _prediction(turn, decision, way, laws, now_s)
            _compare(compared, past, turn, decision, (way, went), laws, numbers.of(past.session))
        if way is not None and went is None:
            went = _predicted(turn, way, laws, now_s)
        computed_s = fleet.begin(past, _taken(past, turn, way, went, laws))
        beliefs.begin(past, known, turn.held, turn.held_tokens, computed_s)
    return compared


def _usual(turns: Sequence[PastTurn], given: GivenTargets | None) -> SloTargets:
    """The targets that most of the turns have."""
    counted = Counter(turn.slo for turn in turns).most_common(1)
    most = counted[0][0] if counted else USUAL
    return most if given is None else given.over(most)


class _Numbers:
    """Of sessions, from 0; turns without a session are alone."""

    def __init__(self) -> None:
        self._by_name: dict[str, int] = {}
        self._next = count()

    def of(self, session: str) -> int:
        number = self._by_name.get(session)
        if number is None:
            number = next(self._next)
            if session:
                self._by_name[session] = number
        return number


def _taken(past: PastTurn, turn: Turn, way: Way | None, prediction: Prediction | None, laws: Laws) -> LegEstimates:
    """What the turn took of its workers. way: None: a worker of it is not there."""
    if way is None:
        return LegEstimates(prompt_tokens=turn.prompt_tokens, new_tokens=turn.prompt_tokens)
    idle_s, patience_s = _idle_ttft_s(turn, way, laws), 0.0
    if idle_s is not None:
        patience_s = max(turn.slo.ttft_s, turn.slo.ttft_factor * idle_s) - idle_s
    reads = turn.readable if way.route == Route.READBACK else None
    decision = Decision(
        route=Route(way.route),
        reason=past.reason,
        decode=way.decode,
        prefill=way.prefill,
        wanted=Route(way.route),
        held=turn.held.get(way.decode.id),
        fetched_tokens=0 if reads is None else reads.tokens,
        prediction=prediction,
        patience_s=patience_s if patience_s > 0.0 else math.inf,  # as in the proxy: late in any case
    )
    first_s = past.answering.first_s
    return decision.estimates(turn, shows_first_token=first_s is not None and first_s < past.answering.ended_s)


def _turn(
    past: PastTurn, known: KnownSession, beliefs: PastBeliefs, views: Fleet, targets: GivenTargets | None
) -> Turn:
    held_tokens = min(known.tokens, past.prompt_tokens)
    if past.kind == "branch":  # where it parts from its session, only the receipt knows
        held_tokens = min(held_tokens, past.cached_tokens)
    readable = None
    if past.route == Route.READBACK:  # of other turns nothing tells whether a P could have read anything back
        readable = Readable(WorkerId(past.answering.address), min(past.cached_tokens, past.prompt_tokens - 1))
    return Turn(
        model=past.model,
        session_id=past.session,
        number=past.number,
        prompt_tokens=past.prompt_tokens,
        held_tokens=held_tokens,
        output_tokens=past.output_tokens,
        held=beliefs.held(past, known, held_tokens, views.views),
        decode=known.decode,
        affinity=known.affinity,
        single_engine="replayed" if past.reason == "single_engine" else None,
        stored_response=past.reason == "stored_response",
        forced=Route(past.forced) if past.forced in ROUTES else None,
        readable=readable,
        slo=past.slo if targets is None else targets.over(past.slo),
    )


def _compare(
    compared: Compared,
    past: PastTurn,
    turn: Turn,
    decision: Decision,
    went: tuple[Way | None, Prediction | None],
    laws: Laws,
    session: int,
) -> None:
    """went: as the turn went, and what is predicted of that."""
    before, old = went
    after = Way(decision.route, decision.decode, decision.prefill)
    new = decision.prediction or _predicted(turn, after, laws, past.decided_s)
    if before is None or old is None or new is None:
        compared.unpredicted += 1
        return
    if not before.is_same(after.route, after.decode, after.prefill):
        compared.changes[before.route, after.route] += 1
    compared.sessions.append(session)
    for place, prediction, way in ((0, old, before), (1, new, after)):
        compared.ttft_s[place].append(prediction.ttft_s)
        compared.tpot_s[place].append(prediction.tpot_s)
        compared.missed[place].append(_misses(turn, way, prediction, laws))
    if past.ttft_s is not None:
        compared.ttft_errors.append(past.ttft_s / old.ttft_s - 1.0)
    if past.tpot_s is not None:
        compared.tpot_errors.append(past.tpot_s / old.tpot_s - 1.0)
    if past.recorded_ttft_s is not None:
        compared.recorded_errors.append(past.recorded_ttft_s / old.ttft_s - 1.0)


@dataclass(frozen=True, slots=True)
class Way:
    route: str
    decode: WorkerView
    prefill: WorkerView | None

    @property
    def computing(self) -> WorkerView:
        return self.decode if self.prefill is None else self.prefill

    def is_same(self, route: str, decode: WorkerView, prefill: WorkerView | None) -> bool:
        """All views are of one moment."""
        return decode is self.decode and prefill is self.prefill and route == self.route


def _way(views: Fleet, past: PastTurn) -> Way | None:
    """As the turn went."""
    decode, prefill = views.views.get(WorkerId(past.answering.address)), None
    if past.prefill is not None and (prefill := views.views.get(WorkerId(past.prefill.address))) is None:
        return None
    return None if decode is None else Way(past.route, decode, prefill)


def _prediction(turn: Turn, decision: Decision, way: Way, laws: Laws, now_s: float) -> Prediction | None:
    """Nearly always a mode that predicts has judged the way already."""
    for one in decision.candidates:
        if one.prediction is not None and way.is_same(one.route, one.decode, one.prefill):
            return one.prediction
    return _predicted(turn, way, laws, now_s)


def _predicted(turn: Turn, way: Way, laws: Laws, now_s: float) -> Prediction | None:
    decode_laws = laws.of(way.decode)
    if decode_laws is None:
        return None
    size = TurnSize(turn.prompt_tokens, turn.output_tokens, turn.held_tokens)
    decode = Outlook.of(way.decode, decode_laws, size, now_s)
    if way.prefill is None:
        return on_one(decode, work_on(decode, size, turn.held_by(way.decode)))
    prefill_laws = laws.of(way.prefill)
    if prefill_laws is None:
        return None
    prefill = Outlook.of(way.prefill, prefill_laws, size, now_s)
    if way.route == Route.READBACK and turn.readable is not None:
        work = work_on(prefill, size, 0, decode, turn.readable.tokens)
    else:
        work = work_on(prefill, size, turn.held_by(way.prefill))
    return on_two(prefill, work, decode, turn.prompt_tokens - turn.held_by(way.decode))


def _misses(turn: Turn, way: Way, prediction: Prediction, laws: Laws) -> bool:
    if prediction.tpot_s > turn.slo.tpot_s:
        return True
    if prediction.ttft_s <= turn.slo.ttft_s:
        return False
    idle_s = _idle_ttft_s(turn, way, laws)
    assert idle_s is not None, "it was predicted by"
    return prediction.ttft_s > turn.slo.ttft_factor * idle_s


def _idle_ttft_s(turn: Turn, way: Way, laws: Laws) -> float | None:
    """None: the engine has no profile."""
    engine = laws.of(way.computing)
    return None if engine is None else idle_ttft_s(engine.costs, turn.prompt_tokens, turn.held_tokens)
