"""One attempt of the simulated proxy at a turn: what it books and believes as the turn's legs go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ppd.proxy.beliefs.beliefs import Beliefs
from ppd.proxy.beliefs.held import PromptEntry
from ppd.proxy.beliefs.turn_touches import TurnCaches, TurnTouches
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.laws.forecasts import AnswerEnded, Forecasts
from ppd.proxy.laws.worker_laws import WorkerLaws
from ppd.proxy.policy import Decision, Route, Turn
from ppd.proxy.routing.foresight import Foreseen, came_to, foresee
from ppd.proxy.sessions.prefix_chain import PrefixEnd
from ppd.proxy.sessions.session import Prompt
from ppd.proxy.sessions.table import SessionMatch, SessionTable, TurnOutcome
from ppd.proxy.sessions.token_estimates import TokenEstimator

from .sessions import Asked
from .timeline import Timeline
from .workers.fleet import SimulatedWorker

MODEL = "simulated"


@dataclass(slots=True, eq=False)
class Routed:
    """One turn under way: where it goes, and what to book when it gets there."""

    route: Route
    decode: SimulatedWorker  # the D, or the R of a REPLICA turn
    prefill: SimulatedWorker | None = None
    source: SimulatedWorker | None = None  # whose cache is asked first by the worker that computes the prompt
    reach_tokens: int = 0  # of the prompt's start, that it then should have
    prefilled: Callable[[int], None] = lambda cached: None  # P is done; it had found so many tokens cached
    answering: Callable[[], None] = lambda: None  # the first token is here
    completed: Callable[[int, int, int], None] = lambda prompt, output, cached: None  # as the engine counts its tokens
    failed: Callable[[], None] = lambda: None  # a worker was lost that computed it, or was to
    again: Callable[[], None] = lambda: None  # after that, if no token was seen: it is decided anew


@dataclass(frozen=True, slots=True)
class WaitingTurn:
    asked: Asked
    said: Prompt
    match: SessionMatch
    go: Callable[[Routed], None]
    estimates_factor: float = 1.0  # of its tokens


@dataclass(frozen=True, slots=True)
class ProxyBooks:
    """What an attempt of the proxy writes to."""

    timeline: Timeline
    registry: Registry
    beliefs: Beliefs
    sessions: SessionTable
    tokens: TokenEstimator
    forecasts: Forecasts
    laws: WorkerLaws | None
    ended: Callable[[], None]  # told when a turn has ended


class Attempt:
    def __init__(
        self, books: ProxyBooks, waiting: WaitingTurn, entry: PromptEntry, turn: Turn, decision: Decision
    ) -> None:
        self._books = books
        self._waiting = waiting
        self._decode = decode = decision.decode.id
        self._prefill = prefill = None if decision.prefill is None else decision.prefill.id
        source, computing = decision.source, decision.prefill or decision.decode
        estimates = decision.estimates(turn)
        self._booking = LegBooking(books.registry, decode, prefill, estimates, None if source is None else source.id)
        # Of the prompt's start, what the worker that computes it is to have before it does.
        held = 0 if decision.route is Route.READBACK else turn.held_by(computing)
        self.reach_tokens = 0 if source is None else held + decision.fetched_tokens
        self._foreseen = None if books.laws is None else foresee(decision, turn, books.laws, None)
        self._cached_on_prefill: int | None = None
        self._on_computed: Callable[[bool], None] = lambda well: None  # the prompt; its media no longer wait
        self._asked_s = self._first_s = books.timeline.now_s
        caches = TurnCaches(decode, prefill, None if source is None else source.id, self.reach_tokens)
        self._touches = TurnTouches(books.beliefs, entry, turn.held, turn.prompt_tokens, caches)

    def begin(self) -> None:
        self._booking.reserve(self._books.timeline.now_s)
        self._touches.sent()

    def has_media(self, on_computed: Callable[[bool], None], *, is_late: bool) -> None:
        """Encoders are done. is_late: the first token waits until the worker has encoded some."""
        self._on_computed = on_computed
        self._asked_s = self._books.timeline.now_s
        if is_late and self._foreseen is not None:
            self._foreseen = self._foreseen.without_ttft

    def prefilled(self, cached_tokens: int) -> None:
        self._booking.free_prefill(self._books.timeline.now_s)
        self._touches.prefilled(cached_tokens)
        self._cached_on_prefill = cached_tokens

    def answering(self) -> None:
        self._first_s = self._books.timeline.now_s
        self._booking.computed(self._books.timeline.now_s)
        self._touches.answering()
        self._on_computed(True)

    def completed(self, prompt: int, output: int, cached: int) -> None:
        match, books, residency = self._waiting.match, self._books, self._books.beliefs.residency
        now_s = books.timeline.now_s
        self._booking.release(now_s)
        self._touches.answered(cached)
        self._touches.close()
        books.tokens.learn(MODEL, match.added, prompt - match.held_tokens, output)
        books.forecasts.take(AnswerEnded(MODEL, match.turn, False, now_s))
        outcome = TurnOutcome(
            prompt_tokens=prompt,
            completion_tokens=output,
            reply_key=PrefixEnd(self._waiting.asked.reply_key),
            decode=residency(self._decode, prompt + output),
            prefill=None if self._prefill is None else residency(self._prefill, prompt),
        )
        books.sessions.finish(match, self._waiting.said, outcome, now_s)
        if self._foreseen is not None:
            self._teach(self._foreseen, prompt, output, cached, now_s)
        books.ended()

    def _teach(self, foreseen: Foreseen, prompt: int, output: int, cached: int, now_s: float) -> None:
        """The laws, by the times that the turn took."""
        if self._cached_on_prefill is not None:
            cached = self._cached_on_prefill
        times = came_to(
            foreseen,
            self._first_s - self._asked_s,
            (now_s - self._first_s) / (output - 1) if output > 1 else None,
            computed_tokens=max(1, prompt - cached),
            output_tokens=output,
            choices=1,
        )
        if times.by_profile and self._books.laws is not None:
            self._books.laws.learn(times, now_s)

    def failed(self) -> None:
        self._on_computed(False)
        self._booking.release(self._books.timeline.now_s)
        self._touches.close()
