"""Who computes a turn in the simulation, and what the proxy learns from it.

`PolicyRouting` is the proxy's own code, fed with virtual time: its session table, registry, estimates and `decide`.
What its legs take of the workers goes through the dispatcher's own `LegBooking`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from ppd.proxy.beliefs.beliefs import Beliefs
from ppd.proxy.beliefs.held import PromptEntry
from ppd.proxy.beliefs.turn_touches import TurnTouches
from ppd.proxy.config import Mode
from ppd.proxy.errors import AllBusy
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.places import UNKNOWN
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import Fleet, taking_turns
from ppd.proxy.fleet.worker import Announcement, Load, Source, Worker, WorkerId
from ppd.proxy.policy import Route, Rules, Turn, decide
from ppd.proxy.sessions.hasher import KEY_BITS, Hasher
from ppd.proxy.sessions.prefix_chain import Chain, PrefixEnd
from ppd.proxy.sessions.session import Prompt, marks_of_prompt
from ppd.proxy.sessions.table import SessionMatch, SessionTable, TurnOutcome
from ppd.proxy.sessions.token_estimates import TokenEstimator

from ..experiment.plan import Conversation, PlannedTurn
from .fleet import SimulatedFleet, SimulatedWorker
from .kv_cache import KvCache
from .timeline import Timeline

MODEL = "simulated"
BYTES_PER_TOKEN = 4  # of the prompts that the simulated clients send
_RULES = Rules(mode=Mode.FRACTION)  # for turns that a sweep does not force: those of D with an x of their own


@dataclass(slots=True, eq=False)
class Routed:
    """One turn under way: where it goes, and what to book when it gets there."""

    route: Route
    decode: SimulatedWorker  # the D, or the R of a REPLICA turn
    prefill: SimulatedWorker | None = None
    claimed_tokens: int = 0  # of the prompt, that `decode` was believed to hold
    prefilled: Callable[[int], None] = lambda cached: None  # P is done; it had found so many tokens cached
    answering: Callable[[], None] = lambda: None  # the first token is here
    completed: Callable[[int, int, int], None] = lambda prompt, output, cached: None  # as the engine counts its tokens


class Routing(Protocol):
    def route(self, conversation: Conversation, turn: int, prompt_tokens: int) -> Routed:
        """Where to compute turn `turn` (from 1) of a conversation, whose prompt has so many tokens."""
        ...


class PolicyRouting:
    """The proxy's own routing; each turn's route is what the run's plan forces, as far as nothing stands against it."""

    def __init__(
        self, timeline: Timeline, fleet: SimulatedFleet, *, heartbeat_s: float, heartbeat_delay_s: float
    ) -> None:
        self._timeline = timeline
        self._workers: Mapping[WorkerId, SimulatedWorker] = {_address(worker): worker for worker in fleet.workers}
        self._registry = Registry()
        self._beliefs = Beliefs(self._registry.engine)
        self._sessions = SessionTable(ttl_s=3600.0, capacity=1_000_000, beliefs=self._beliefs)
        self._tokens = TokenEstimator()
        self._hasher = Hasher(bytes(16))
        self._heartbeat_s = heartbeat_s
        self._delay_s = heartbeat_delay_s
        for worker in fleet.workers:
            self._registry.apply(_announcement(worker), 0.0)
            timeline.after(heartbeat_s, self._beat, worker)

    def route(self, conversation: Conversation, turn: int, prompt_tokens: int) -> Routed:
        now_s = self._timeline.now_s
        said = self._prompt(conversation, turn)
        match = self._sessions.find(said, now_s)
        entry, asked = self._turn(match, said, conversation.turns[turn - 1])
        try:
            decision = decide(asked, self._registry.fleet(asked.model), _RULES, qps=0.0, now_s=now_s)
        except AllBusy:
            decision = decide(asked, self._roomy_fleet(), _RULES, qps=0.0, now_s=now_s)
        decode, prefill = decision.decode.id, decision.prefill.id if decision.prefill is not None else None
        prompt_estimate, new_tokens = asked.prompt_tokens, max(1, asked.prompt_tokens - decision.cached_tokens)
        booking = LegBooking(self._registry, decode, prefill, prompt_tokens=prompt_estimate, new_tokens=new_tokens)
        touches = TurnTouches(
            self._beliefs, entry, asked.held, decode=decode, prefill=prefill, prompt_tokens=prompt_estimate
        )
        booking.reserve()
        touches.sent()

        def prefilled(cached_tokens: int) -> None:
            booking.free_prefill()
            touches.prefilled(cached_tokens)

        def answering() -> None:
            booking.computed()
            touches.answering()

        def completed(prompt: int, output: int, cached: int) -> None:
            booking.release()
            touches.close()
            touches.answered(cached)
            self._tokens.learn(MODEL, match.added, prompt - match.held_tokens, output)
            residency = self._beliefs.residency
            outcome = TurnOutcome(
                prompt_tokens=prompt,
                completion_tokens=output,
                reply_key=PrefixEnd(_key(conversation, 2 * turn)),
                decode=residency(decode, prompt + output),
                prefill=residency(prefill, prompt) if prefill is not None else None,
            )
            self._sessions.finish(match, said, outcome, self._timeline.now_s)

        return Routed(
            decision.route,
            self._workers[decode],
            self._workers[prefill] if prefill is not None else None,
            decision.cached_tokens,
            prefilled,
            answering,
            completed,
        )

    def _turn(self, match: SessionMatch, prompt: Prompt, planned: PlannedTurn) -> tuple[PromptEntry, Turn]:
        prompt_tokens = match.held_tokens + self._tokens.estimate(MODEL, match.added)
        entry = PromptEntry(match.history, match.source, marks_of_prompt(prompt, prompt_tokens), match.decode)
        turn = Turn(
            model=MODEL,
            session_id=match.session_id,
            number=match.turn,
            prompt_tokens=prompt_tokens,
            held_tokens=match.held_tokens,
            output_tokens=self._tokens.expected_output(MODEL, match.output_tokens, planned.output_tokens),
            held=self._beliefs.held(self._registry.fleet(MODEL).views, entry, match.held_tokens),
            decode=None if match.decode is None else match.decode.worker,
            lost=self._beliefs.why_lost(match.decode),
            forced=planned.route,
        )
        return entry, turn

    def _roomy_fleet(self) -> Fleet:
        """Where the live proxy's queue would hold a turn back, it waits in an engine: there is no queue here."""
        views = [replace(view, places=UNKNOWN) for view in self._registry.views()]
        return Fleet.of({view.id: view for view in views}, taking_turns(views, MODEL))

    def _prompt(self, conversation: Conversation, turn: int) -> Prompt:
        """What `parse_request` makes of a chat body with this history; the keys are made up instead of hashed."""
        keys, ends = [_key(conversation, 0)], [0]
        for number, planned in enumerate(conversation.turns[:turn], start=1):
            keys.append(_key(conversation, 2 * number - 1))
            ends.append(ends[-1] + planned.new_tokens * BYTES_PER_TOKEN)
            if number < turn:
                keys.append(_key(conversation, 2 * number))
                ends.append(ends[-1] + planned.output_tokens * BYTES_PER_TOKEN)
        return Prompt(chain=Chain(tuple(keys), tuple(ends), self._hasher))

    def _beat(self, worker: SimulatedWorker) -> None:
        """The engine's load as it is now reaches the registry a moment later."""
        said = _announcement(worker)
        self._timeline.after(self._delay_s, lambda: self._registry.apply(said, self._timeline.now_s))
        self._timeline.after(self._heartbeat_s, self._beat, worker)


def _key(conversation: Conversation, place: int) -> int:
    """The chain's key after so many messages: unique in a simulation, spread as hashes are."""
    return ((conversation.number << 16 | place) * 0x9E3779B97F4A7C15) & ((1 << KEY_BITS) - 1)


def _address(worker: SimulatedWorker) -> WorkerId:
    return WorkerId(f"{worker.name.lower()}:8000")


def _announcement(worker: SimulatedWorker) -> Announcement:
    cache: KvCache = worker.engine.cache
    known = Worker(
        role=worker.role,
        address=_address(worker),
        models=(MODEL,),
        engine_version="simulated",
        incarnation="0",
        source=Source.AGENT,
        x=worker.x,
    )
    load = Load(worker.engine.running, worker.engine.waiting, cache.usage, cache.capacity_tokens)
    return Announcement(known, load)
