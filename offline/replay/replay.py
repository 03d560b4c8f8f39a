"""Each turn of a log decided again, with all others as they were; and what the laws say that it changes.

So each decision is compared by itself: what a whole fleet under the other rules would come to, a simulation tells.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ppd.proxy.errors import NoWorkerError
from ppd.proxy.fleet.view import Fleet, WorkerView
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.laws.prediction import Laws, Outlook, Prediction, TurnSize, idle_ttft_s, on_one, on_two, work_on
from ppd.proxy.laws.targets import GivenTargets
from ppd.proxy.policy import Decision, Route, Rules, Turn, decide

from .past_fleet import PastFleet
from .past_turns import PastTurn


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


@dataclass(slots=True)
class _Session:
    number: int
    tokens: int = 0  # of its newest turn
    decode: WorkerId | None = None


def replay(
    turns: Sequence[PastTurn], rules: Rules, laws: Laws, *, capacity_tokens: int, targets: GivenTargets | None = None
) -> Compared:
    """turns: in order of their decisions. targets: those given, in place of their own."""
    fleet, compared, sessions = PastFleet(turns, laws, capacity_tokens), Compared(), dict[str, _Session]()
    for past in turns:
        now_s = past.decided_s
        views = fleet.at(now_s, past.model)
        session = sessions.get(past.session)
        if session is None:
            session = sessions[past.session] = _Session(len(sessions))
        turn = _turn(past, session, fleet, targets)
        try:
            decision = decide(turn, views, rules, qps=past.qps, now_s=now_s)
        except NoWorkerError:
            compared.refused += 1
        else:
            _compare(compared, past, turn, decision, views, laws, session.number)
        computing = past.answering if past.prefill is None else past.prefill
        fleet.begin(past, max(1, past.prompt_tokens - _held(turn, computing.address)))
        session.tokens = past.prompt_tokens + past.output_tokens
        if past.prompt_counted is not None:
            session.tokens = past.prompt_counted + (past.completion_counted or 0)
        session.decode = WorkerId(past.answering.address)
    return compared


def _held(turn: Turn, address: str) -> int:
    held = turn.held.get(WorkerId(address))
    return 0 if held is None else min(held.tokens, turn.prompt_tokens)


def _turn(past: PastTurn, session: _Session, fleet: PastFleet, targets: GivenTargets | None) -> Turn:
    goes_on = past.kind in ("next", "retry", "branch")
    held_tokens = min(session.tokens, past.prompt_tokens) if goes_on else 0
    if past.kind == "branch":  # where it parts from its session, only the receipt knows
        held_tokens = min(held_tokens, past.cached_tokens)
    return Turn(
        model=past.model,
        session_id=past.session,
        number=past.number,
        prompt_tokens=past.prompt_tokens,
        held_tokens=held_tokens,
        output_tokens=past.output_tokens,
        held=fleet.held(past, held_tokens),
        decode=session.decode if goes_on else None,
        affinity=session.decode,
        single_engine="replayed" if past.reason == "single_engine" else None,
        stored_response=past.reason == "stored_response",
        forced=Route(past.forced) if past.forced in [*Route] else None,
        slo=past.slo if targets is None else targets.over(past.slo),
    )


def _compare(
    compared: Compared, past: PastTurn, turn: Turn, decision: Decision, views: Fleet, laws: Laws, session: int
) -> None:
    before = _way(views, past.route, past.answering.address, None if past.prefill is None else past.prefill.address)
    after = Way(decision.route, decision.decode, decision.prefill)
    predictions = [None if way is None else _predicted(turn, way, laws, past.decided_s) for way in (before, after)]
    old, new = predictions
    if before is None or old is None or new is None:
        compared.unpredicted += 1
        return
    if before != after:
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


def _way(views: Fleet, route: str, decode: str, prefill: str | None) -> Way | None:
    at, by = views.views.get(WorkerId(decode)), None if prefill is None else views.views.get(WorkerId(prefill))
    return None if at is None or (prefill is not None and by is None) else Way(route, at, by)


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
    work, missing = work_on(prefill, size, turn.held_by(way.prefill)), turn.prompt_tokens - turn.held_by(way.decode)
    return on_two(prefill, work, decode, missing)


def _misses(turn: Turn, way: Way, prediction: Prediction, laws: Laws) -> bool:
    engine = laws.of(way.computing)
    assert engine is not None, "it was predicted by"
    idle_s = idle_ttft_s(engine.costs, turn.prompt_tokens, turn.held_tokens)
    limit_s = max(turn.slo.ttft_s, turn.slo.ttft_factor * idle_s)
    return prediction.ttft_s > limit_s or prediction.tpot_s > turn.slo.tpot_s
