"""Who computes a turn in the simulation, and what the proxy learns from it.

`PolicyRouting` is the proxy's own code, fed with virtual time: its session table, registry, estimates, arrival rates
and `decide`. What its legs take of the workers goes through the dispatcher's own `LegBooking`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from ppd.proxy.admission.arrival_rate import Arrivals
from ppd.proxy.beliefs.beliefs import Beliefs
from ppd.proxy.beliefs.held import Held, PromptEntry
from ppd.proxy.config import Mode
from ppd.proxy.connectors.nixl import KEPT_USUALLY_S, READS_BACK
from ppd.proxy.encoders.choosing import EncoderRules
from ppd.proxy.errors import AllBusy, ConfigError, NoWorkerError
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import Fleet
from ppd.proxy.fleet.worker import Announcement, Load, Role, Source, Worker, WorkerId
from ppd.proxy.laws.forecasts import Forecasts, SessionReturned
from ppd.proxy.laws.targets import USUAL, SloTargets, TargetRules
from ppd.proxy.policy import Decision, Route, Rules, Turn, decide, has_room
from ppd.proxy.policy.decision import Readable
from ppd.proxy.policy.returns import Returns
from ppd.proxy.readback.handles import LEAST_LEFT_S, MARGIN_S
from ppd.proxy.sessions.hasher import Hasher
from ppd.proxy.sessions.matching import MatchKind
from ppd.proxy.sessions.prefix_chain import NO_MARKS, Chain, Marks
from ppd.proxy.sessions.session import Prompt, marks_of_prompt
from ppd.proxy.sessions.table import SessionMatch, SessionTable
from ppd.proxy.sessions.token_estimates import TokenEstimator

from .attempt import MODEL, Attempt, ProxyBooks, Routed, WaitingTurn
from .believed import drawn_factor, laws_of, with_room, without_ledger
from .encoding import Encoding
from .sessions import Asked
from .setup import Setup
from .timeline import Timeline
from .workers.fleet import SimulatedFleet, SimulatedWorker
from .workers.kv_cache import HeardCache

WORKER_TTL_S = 30.0  # the proxy's default: a worker that is silent for longer is dropped
AUTO = EncoderRules()
FORCED = Rules(mode=Mode.FRACTION)  # for sweeps, which force all turns but those of D with an x of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySetup:
    """The simulated proxy's settings. Turns that a plan forces go its way, whatever the rules say."""

    rules: Rules = FORCED
    slo: SloTargets = USUAL  # of every turn
    qps_window_s: float = 30.0
    max_tokens: int | None = None  # that clients ask for; the proxy sees no other limit of an answer
    oracle: bool = False  # the proxy knows how long each answer will be
    queues: bool = False  # turns wait in the proxy while every engine is full, and not in an engine
    kv_events_delay_s: float | None = None  # after which the proxy hears what caches hold; None: it never does
    laws: bool = True  # it has the engines' profile
    laws_factor: float = 1.0  # by which all times in that profile are wrong
    estimates_factor: float = 1.0  # by which its counts of the tokens that a prompt adds are wrong
    estimates_spread: float = 0.0  # and by up to so much more, or less, in each session
    residency_elsewhere: bool = True  # False: it believes only the session's last worker to hold anything
    returns: bool = True  # it goes by when sessions are likely to return
    first_turns_split: bool = False  # as far as the fleet can
    encoder: EncoderRules = AUTO  # which images an E encodes, where there is one
    reads_back: bool = False  # P may read the KV of a turn that it was part of back from its D, once
    ledger: bool = True  # False: it knows only what engines report, requests and tokens that queue

    def __post_init__(self) -> None:
        limits = (("qps_window_s", 1e-3), ("max_tokens", 1), ("kv_events_delay_s", 0), ("estimates_spread", 0))
        for name, least in (*limits, ("laws_factor", 1e-3), ("estimates_factor", 1e-3)):
            if (value := getattr(self, name)) is not None and not least <= value < float("inf"):
                raise ConfigError(f"{name} = {value}: must be at least {least:g}", param=name)


class Kept(NamedTuple):
    """What a D keeps of a session."""

    readable: Readable
    incarnation: str
    until_s: float


class Routing(Protocol):
    def route(self, session: int, asked: Asked, go: Callable[[Routed], None]) -> None:
        """Says where to compute a turn of the session with this number, now or when it has waited."""
        ...


class PolicyRouting:
    """The proxy's own routing; a turn that a plan forces goes its way as far as nothing stands against it."""

    def __init__(
        self,
        timeline: Timeline,
        fleet: SimulatedFleet,
        proxy: ProxySetup,
        setup: Setup,
    ) -> None:
        self._timeline = timeline
        self._proxy = proxy
        laws = laws_of(setup, proxy.laws_factor) if proxy.laws else None
        self._arrivals = Arrivals(proxy.qps_window_s, timeline.now_s)
        self._queue: deque[WaitingTurn] = deque()
        self._stranded: list[WaitingTurn] = []  # no worker is there that could take them
        self._heard: dict[WorkerId, HeardCache] = {}
        self._workers: Mapping[WorkerId, SimulatedWorker] = {_address(worker): worker for worker in fleet.workers}
        self._descriptions: dict[WorkerId, Worker] = {}
        self._registry = Registry()
        self._beliefs = Beliefs(self._registry.engine)
        self._sessions = SessionTable(ttl_s=3600.0, capacity=1_000_000, beliefs=self._beliefs)
        self._tokens = TokenEstimator()
        self._forecasts = Forecasts()
        answers = proxy.rules.prefills_answer
        returns = Returns(self._sessions, self._beliefs, self._forecasts, prefills_answer=answers)
        known_returns = returns if proxy.returns else None
        self._rules = replace(proxy.rules, laws=laws, returns=known_returns, targets=TargetRules(usual=proxy.slo))
        self._hasher = Hasher(bytes(16))
        self._heartbeat_s, self._delay_s = setup.heartbeat_s, setup.heartbeat_delay_s
        self._encoding = Encoding(
            timeline, self._registry, proxy.encoder, self._arrivals.turns, proxy.qps_window_s, fleet.encoders
        )
        self._handles: dict[int, Kept] = {}  # by history
        self._plain: tuple[Fleet, Fleet] | None = None  # a fleet, and the same without its ledger
        self._books = ProxyBooks(
            timeline,
            self._registry,
            self._beliefs,
            self._sessions,
            self._tokens,
            self._forecasts,
            laws,
            self._serve_queue,
        )
        for worker in fleet.workers:
            self._join(worker)
            self._registry.apply(self._announcement(worker), 0.0)
            timeline.after(self._heartbeat_s, self._beat, worker)
        fleet.restarted = self._came_back

    def route(self, session: int, asked: Asked, go: Callable[[Routed], None]) -> None:
        now_s = self._timeline.now_s
        marks = Marks(system=asked.head) if asked.head else NO_MARKS
        said = Prompt(chain=Chain(asked.keys, asked.ends, self._hasher, marks=marks))
        match = self._sessions.find(said, now_s)
        self._arrivals.count(now_s, opens=match.turn == 1)
        if match.ended_s is not None:
            self._forecasts.take(SessionReturned(MODEL, match.turn - 1, match.calls_tool, match.ended_s, now_s))
        factor, spread = self._proxy.estimates_factor, self._proxy.estimates_spread
        if spread:
            factor *= drawn_factor(spread, session)
        self._enter(WaitingTurn(asked, said, match, go, factor))

    def _enter(self, turn: WaitingTurn, *, first: bool = False) -> None:
        """first: before those who wait."""
        if not self._proxy.queues:
            self._start(turn)
            return
        if first:
            self._queue.appendleft(turn)
        else:
            self._queue.append(turn)
        self._serve_queue()

    def _serve_queue(self) -> None:
        """In order of arrival, as the proxy serves one tenant."""
        while self._queue and has_room(self._registry.fleet(MODEL), self._rules):
            turn = self._queue.popleft()
            try:
                self._start(turn)
            except AllBusy:
                self._queue.appendleft(turn)
                return

    def _start(self, waiting: WaitingTurn) -> None:
        entry, turn = self._turn(waiting)
        try:
            decision = self._decide(turn, self._timeline.now_s)
        except AllBusy:
            raise
        except NoWorkerError:  # until one comes back
            self._stranded.append(waiting)
            return
        attempt = Attempt(self._books, waiting, entry, turn, decision)
        attempt.begin()
        history = waiting.match.history
        if decision.route is Route.READBACK:
            del self._handles[history]

        def completed(prompt: int, output: int, cached: int) -> None:
            attempt.completed(prompt, output, cached)
            if self._proxy.reads_back:
                self._keep(history, decision, prompt + output - 1)

        routed = Routed(
            decision.route,
            self._workers[decision.decode.id],
            self._workers[decision.prefill.id] if decision.prefill is not None else None,
            self._workers[decision.source.id] if decision.source is not None else None,
            attempt.reach_tokens,
            prefilled=attempt.prefilled,
            answering=attempt.answering,
            completed=completed,
        )
        routed.failed = lambda: self._failed(attempt, routed)
        routed.again = lambda: self._enter(waiting, first=True)
        computes = decision.prefill or decision.decode
        held = turn.held_by(computes) if waiting.asked.media else 0

        def encoded(computed: Callable[[bool], None], is_late: bool) -> None:
            attempt.has_media(computed, is_late=is_late)
            waiting.go(routed)

        predicted_s = None if decision.prediction is None else decision.prediction.ttft_s
        on = self._workers[computes.id]
        self._encoding.encode(waiting.asked.media, held, computes, on, predicted_s, encoded)

    def _keep(self, history: int, decision: Decision, tokens: int) -> None:
        """D keeps the KV of what it has pulled; a session that moves leaves what another one keeps."""
        decode, kept = decision.decode, self._handles.get(history)
        if decision.prefill is not None and decision.prefill.role is Role.PREFILL and decode.role is Role.DECODE:
            until_s = self._timeline.now_s + KEPT_USUALLY_S - MARGIN_S
            self._handles[history] = Kept(Readable(decode.id, tokens), decode.incarnation, until_s)
        elif kept is not None and kept.readable.decode != decode.id:
            del self._handles[history]

    def _readable(self, match: SessionMatch) -> Readable | None:
        kept = self._handles.get(match.history)
        if kept is None or match.kind is not MatchKind.NEXT or match.held_tokens < kept.readable.tokens:
            return None
        view = self._registry.view(kept.readable.decode)
        is_there = view is not None and view.incarnation == kept.incarnation
        return kept.readable if is_there and self._timeline.now_s + LEAST_LEFT_S <= kept.until_s else None

    def _failed(self, attempt: Attempt, routed: Routed) -> None:
        """Its connection has ended, and a new one is refused: the worker gets no more turns until it is heard again."""
        attempt.failed()
        for worker in (routed.prefill, routed.decode):
            if worker is not None and worker.engine.is_lost:
                self._registry.remove(_address(worker))

    def _turn(self, waiting: WaitingTurn) -> tuple[PromptEntry, Turn]:
        match, prompt, asked = waiting.match, waiting.said, waiting.asked
        added_tokens = self._tokens.estimate(MODEL, match.added)
        if waiting.estimates_factor != 1.0:
            added_tokens = max(1, round(waiting.estimates_factor * added_tokens))
        prompt_tokens = match.held_tokens + added_tokens
        marks = marks_of_prompt(prompt, prompt_tokens)
        entry = PromptEntry(match.history, match.source, marks, match.decode, shared=match.held_tokens)
        output_tokens = asked.output_tokens
        if not self._proxy.oracle:
            output_tokens = self._tokens.expected_output(MODEL, match.output_tokens, self._proxy.max_tokens)
        turn = Turn(
            model=MODEL,
            session_id=match.session_id,
            number=match.turn,
            prompt_tokens=prompt_tokens,
            held_tokens=match.held_tokens,
            output_tokens=output_tokens,
            held=self._held(entry, match, asked),
            decode=None if match.decode is None else match.decode.worker,
            affinity=match.affinity,
            lost=self._beliefs.why_lost(match.decode),
            forced=Route.SPLIT if self._proxy.first_turns_split and match.turn == 1 else asked.forced,
            slo=self._proxy.slo,
            readable=self._readable(match) if self._handles else None,
        )
        return entry, turn

    def _held(self, entry: PromptEntry, match: SessionMatch, asked: Asked) -> Mapping[WorkerId, Held]:
        most, observed = match.held_tokens, dict[WorkerId, int]()
        if self._heard and match.source is not None:
            heard = ((worker, cache.held(asked.prompt, most)) for worker, cache in self._heard.items())
            observed = {worker: tokens for worker, tokens in heard if tokens is not None}
        held = self._beliefs.held(self._registry.fleet(MODEL).views, entry, most, observed)
        if not self._proxy.residency_elsewhere:
            last = None if match.decode is None else match.decode.worker
            return {worker: one for worker, one in held.items() if worker == last}
        return held

    def _fleet(self) -> Fleet:
        fleet = self._registry.fleet(MODEL)
        if self._proxy.ledger:
            return fleet
        if self._plain is None or self._plain[0] is not fleet:
            self._plain = fleet, without_ledger(fleet)
        return self._plain[1]

    def _decide(self, turn: Turn, now_s: float) -> Decision:
        rules, arrivals = self._rules, self._arrivals
        counts_turns = rules.scored is not None and rules.scored.table.axes.qps_counts == "turns"
        qps = (arrivals.turns if counts_turns else arrivals.conversations).rate_rps(now_s)
        try:
            return decide(turn, self._fleet(), rules, qps=qps, now_s=now_s)
        except AllBusy:
            if self._proxy.queues:
                raise
            # Where no queue holds a turn back, it waits in an engine.
            return decide(turn, with_room(self._fleet()), replace(rules, worker_limit=0), qps=qps, now_s=now_s)

    def _beat(self, worker: SimulatedWorker) -> None:
        """The engine's load as it is now reaches the registry a moment later. One that is lost is silent."""
        if not worker.engine.is_lost:
            self._timeline.after(self._delay_s, self._hear, self._announcement(worker))
        else:
            self._registry.expire(self._timeline.now_s, WORKER_TTL_S)
        self._timeline.after(self._heartbeat_s, self._beat, worker)

    def _came_back(self, worker: SimulatedWorker) -> None:
        """It announces itself as soon as its engine is ready."""
        self._join(worker)
        self._timeline.after(self._delay_s, self._hear, self._announcement(worker))

    def _join(self, worker: SimulatedWorker) -> None:
        self._descriptions[_address(worker)] = _description(worker, reads_back=self._proxy.reads_back)
        self._listen(worker)

    def _announcement(self, worker: SimulatedWorker) -> Announcement:
        engine, cache = worker.engine, worker.engine.cache
        load = Load(engine.running, engine.waiting, cache.usage, cache.capacity_tokens)
        return Announcement(self._descriptions[_address(worker)], load)

    def _listen(self, worker: SimulatedWorker) -> None:
        """To the events of its cache."""
        if self._proxy.kv_events_delay_s is not None:
            timeline = self._timeline
            heard = HeardCache(lambda: timeline.now_s, self._proxy.kv_events_delay_s)
            self._heard[_address(worker)] = heard
            worker.engine.cache.changed = heard.happened

    def _hear(self, said: Announcement) -> None:
        self._registry.apply(said, self._timeline.now_s)
        stranded, self._stranded = self._stranded, []
        for turn in stranded:
            self._enter(turn)
        self._serve_queue()


def _address(worker: SimulatedWorker) -> WorkerId:
    return WorkerId(f"{worker.name.lower()}:8000")


def _description(worker: SimulatedWorker, *, reads_back: bool) -> Worker:
    return Worker(
        role=worker.role,
        address=_address(worker),
        models=(MODEL,),
        engine_version="simulated",
        incarnation=str(worker.incarnation),
        source=Source.AGENT,
        x=worker.x,
        coordinates={READS_BACK: "true"} if reads_back else {},
    )
