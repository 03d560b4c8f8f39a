"""Who computes a prompt, and how the proxy decides it.

`ProxyRouting` is the proxy's own code without sockets, fed with virtual time: it parses the body, finds the session,
decides, and learns from the answer what `routing/learning.py` would. All that it knows of the engines is what they
report. `_turn` and `_learn` are the wiring that follows `routing/router.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ppd.proxy.assembly import new_state
from ppd.proxy.beliefs.held import Held, PromptEntry
from ppd.proxy.beliefs.turn_touches import TurnCaches, TurnTouches
from ppd.proxy.config import Mode, ProxyConfig
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.registry import WorkerChange
from ppd.proxy.fleet.worker import Announcement, Source, Worker, WorkerId
from ppd.proxy.kv_events.event_stream import EventStream
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import ReadingRules, Request, parse_request
from ppd.proxy.peers.channels import Member
from ppd.proxy.peers.events import Appliers, WorkerSeen
from ppd.proxy.peers.turn_replication import Copies, EventSender, TurnReplication
from ppd.proxy.policy import Decision, Route, Rules, Turn, decide
from ppd.proxy.sessions.session import marks_of_prompt, points_of_prompt
from ppd.proxy.sessions.table import SessionMatch, TurnOutcome

from .engines.workers import TimedWorker, VirtualTime
from .requests import MODEL, Asked
from .templates import Message

HEARTBEAT_S = 10.0  # as the agents' default


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedMember(Member):
    """Of processes that number all their sessions in one order."""

    numbers: Iterator[int]

    @property
    def serials(self) -> Iterator[int]:
        return self.numbers


def member(key: int, index: int = 0, numbers: Iterator[int] | None = None) -> Member:
    """key: of the hashes by which sessions are numbered, and ties between workers broken."""
    secret = key.to_bytes(16, "big")
    return (
        Member(index=index, secret=secret)
        if numbers is None
        else NumberedMember(index=index, secret=secret, numbers=numbers)
    )


ALONE = member(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an answer says of its turn. cached_tokens: P's after a handoff, as the proxy shows it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """What was believed of a turn as it was decided."""

    kind: str  # how the session was recognised
    claimed_tokens: int  # of the prompt, on the worker that answers
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True, kw_only=True)
class Placed:
    """One turn under way: where it goes, and whom to tell when it gets there."""

    route: Route
    decode: TimedWorker  # the D, or the R of a REPLICA turn
    prefill: TimedWorker | None = None
    belief: Belief | None = None  # None: of a rule that believes nothing
    session: str | None = None  # as its legs name it to the engines
    prefilled: Callable[[int], None] = lambda cached: None
    answering: Callable[[], None] = lambda: None
    completed: Callable[[Usage], None] = lambda usage: None


class Routing(Protocol):
    def place(self, asked: Asked, keys: Sequence[int], prompt_tokens: int) -> Placed:
        """keys: of the prompt's blocks, for a rule that knows engines' caches."""
        ...


class ProxyRouting:
    """One process of the proxy; `attach` joins it to the others."""

    def __init__(
        self,
        time: VirtualTime,
        workers: Sequence[TimedWorker],
        mode: Mode = Mode.ALWAYS_LOCAL,
        member: Member = ALONE,
    ) -> None:
        self._time = time
        self._workers = {_address(worker): worker for worker in workers}
        config = ProxyConfig(session_ttl_s=86_400.0, session_limit=1_000_000)
        state = self._state = new_state(config, member, lambda: time.now_s)
        self._registry, self._beliefs, self._sessions = state.registry, state.beliefs, state.sessions
        self._tokens, self._templates, self._hasher = state.tokens, state.templates, state.hasher
        self._caches = state.engine_caches
        for address, worker in self._workers.items():
            if worker.events is not None:
                worker.events.subscribe(_reader(self._caches.stream(address, 0)))
        self._rules = Rules(mode=mode)
        self._heard_s = -HEARTBEAT_S
        self._leads = member.leads
        self.turns = TurnReplication(member, state, lambda: config.max_worker_inflight)

    def attach(self, channels: EventSender) -> None:
        def changed(worker: WorkerId, change: WorkerChange) -> None:
            if self._leads and (view := self._registry.view(worker)) is not None:
                channels.queue(WorkerSeen(view))

        self.turns.attach(channels)
        self._registry.replicated = Copies(channels.drain, changed)

    def appliers(self) -> Appliers:
        return {**self.turns.appliers(), WorkerSeen: lambda _, event: self._registry.adopt(event.view)}

    def place(self, asked: Asked, keys: Sequence[int], prompt_tokens: int) -> Placed:
        self.hear()
        now_s = self._time.now_s
        request = parse_request(
            asked.endpoint,
            asked.body(),
            {},
            ReadingRules(hasher=self._hasher, tenant="", templates=self._templates.known),
        )
        match = self._sessions.find(request.prompt, now_s)
        entry, turn = self._turn(request, match)
        decision = decide(turn, self._registry.fleet(MODEL), self._rules, qps=1.0, now_s=now_s)
        decode, prefill = decision.decode.id, decision.prefill.id if decision.prefill is not None else None
        booking = LegBooking(self._registry, decode, prefill, decision.estimates(turn))
        touches = TurnTouches(self._beliefs, entry, turn.held, turn.prompt_tokens, TurnCaches(decode, prefill))
        booking.reserve(now_s)
        touches.sent()
        belief = Belief(
            kind=match.kind,
            claimed_tokens=decision.cached_tokens,
            prompt_tokens=turn.prompt_tokens,
            output_tokens=turn.output_tokens,
        )

        def completed(usage: Usage) -> None:
            touches.close()
            touches.answered(usage.cached_tokens)
            self._learn(asked.reply, request, match, decision, usage)
            self._await_events(decision, entry.history, usage)

        placed = self._placed(decision, booking, touches, belief, completed)
        placed.session = self._caches.session_id(decision.decode.worker, entry.history)
        return placed

    def _placed(
        self,
        decision: Decision,
        booking: LegBooking,
        touches: TurnTouches,
        belief: Belief,
        learn: Callable[[Usage], None],
    ) -> Placed:
        def prefilled(cached_tokens: int) -> None:
            booking.free_prefill(self._time.now_s)
            touches.prefilled(cached_tokens)

        def answering() -> None:
            booking.computed(self._time.now_s)
            touches.answering()

        def completed(usage: Usage) -> None:
            booking.release(self._time.now_s)
            learn(usage)

        prefill = decision.prefill
        return Placed(
            route=decision.route,
            decode=self._workers[decision.decode.id],
            prefill=self._workers[prefill.id] if prefill is not None else None,
            belief=belief,
            prefilled=prefilled,
            answering=answering,
            completed=completed,
        )

    def _await_events(self, decision: Decision, history: int, usage: Usage) -> None:
        """As `Learner._await_events` of routing/learning.py."""
        prompt, completion, computed = (
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.prompt_tokens - usage.cached_tokens,
        )
        now_s, stored = self._time.now_s, self._caches.stored
        if decision.prefill is not None:
            stored(decision.prefill.id, history, prompt, computed, now_s)
            computed = 0
        stored(decision.decode.id, history, prompt + completion, computed + completion, now_s)

    def _learn(self, reply: Message, request: Request, match: SessionMatch, decision: Decision, usage: Usage) -> None:
        """As `Learner._note_usage` of routing/learning.py does."""
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        hashed = reply_key(request, reply)
        self._tokens.learn(request.model, match.added, prompt - match.held_tokens, completion)
        if decision.prefill is not None:
            self._templates.computed(decision.decode.id, prompt)
        computed_on = (decision.prefill or decision.decode).id
        self._templates.learn(request.model, computed_on, request.prompt.chain, prompt, usage.cached_tokens)
        residency = self._beliefs.residency
        outcome = TurnOutcome(
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=usage.cached_tokens if decision.prefill is None and decision.cached_tokens else None,
            reply_key=hashed.key(),
            reasoned=hashed.reasoned,
            reply_alone=hashed.alone(),
            decode=residency(decision.decode.id, prompt + completion),
            prefill=residency(decision.prefill.id, prompt) if decision.prefill else None,
        )
        self._sessions.finish(match, request.prompt, outcome, self._time.now_s)
        if (others := self._sessions.replicated) is not None:
            others.tell()

    def _turn(self, request: Request, match: SessionMatch) -> tuple[PromptEntry, Turn]:
        """As `Router._turn` of routing/router.py makes it."""
        prompt_tokens = match.held_tokens + self._tokens.estimate(request.model, match.added)
        marks, points = (of(request.prompt, prompt_tokens) for of in (marks_of_prompt, points_of_prompt))
        entry = PromptEntry(match.history, match.source, marks, match.decode, points, match.held_tokens)
        turn = Turn(
            model=request.model,
            session_id=match.session_id,
            number=match.turn,
            prompt_tokens=prompt_tokens,
            held_tokens=match.held_tokens,
            output_tokens=self._tokens.expected_output(request.model, match.output_tokens, request.max_output_tokens),
            held=self._held(entry, match.held_tokens),
            decode=None if match.decode is None else match.decode.worker,
            affinity=match.affinity,
            lost=self._beliefs.why_lost(match.decode),
            single_engine=request.single_engine,
        )
        return entry, turn

    def _held(self, entry: PromptEntry, most: int) -> dict[WorkerId, Held]:
        """As `Router._with_beliefs` of routing/router.py asks for it."""
        observed = None
        if entry.source is not None:
            observed = self._caches.observed(entry.source, most, entry.last, self._time.now_s)
        return self._beliefs.held(self._registry.fleet(MODEL).views, entry, most, observed)

    def hear(self) -> bool:
        """Loads reach the proxy's first process every few seconds; between them it knows only what it has placed.

        Whether they did.
        """
        if not self._leads or self._time.now_s - self._heard_s < HEARTBEAT_S:
            return False
        self._heard_s = self._time.now_s
        for worker in self._workers.values():
            self._registry.apply(_announcement(worker), self._time.now_s)
        return True


def _reader(stream: EventStream) -> Callable[[int, bytes], None]:
    """Takes batches as a subscription does that nothing disturbs."""
    stream.is_behind = False
    return stream.take


def reply_key(request: Request, reply: Message) -> ReplyKey:
    """The reply as the proxy sees it pass."""
    hashed = ReplyKey(request)
    if reply.get("reasoning_content"):
        hashed.add_reasoning()
    if reply["content"]:
        hashed.add_text(reply["content"])
    for index, call in enumerate(reply.get("tool_calls") or ()):
        hashed.add_tool_call(index, call["id"], call["function"]["name"], call["function"]["arguments"])
    return hashed


def _address(worker: TimedWorker) -> WorkerId:
    return WorkerId(f"{worker.name.lower()}:8000")


def _announcement(worker: TimedWorker) -> Announcement:
    known = Worker(
        role=worker.role,
        address=_address(worker),
        models=(MODEL,),
        engine_version="virtual",
        incarnation="0",
        source=Source.AGENT,
    )
    return Announcement(known, worker.load)
