"""What the proxy believed while it served the log's turns: what each worker held, and which sessions would return.

The proxy's own books, sessions and forecasts, which are told of each turn at the times that its receipt names. Prompts
are not in a log: a session is known by its name, and what several begin alike with is not known at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count

import msgspec

from ppd.proxy.beliefs.beliefs import Beliefs
from ppd.proxy.beliefs.held import BeliefEvidence, Held, PromptEntry
from ppd.proxy.beliefs.turn_touches import TurnCaches, TurnTouches
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.laws.forecasts import AnswerEnded, Forecasts, SessionReturned
from ppd.proxy.policy.returns import Returns
from ppd.proxy.sessions.session import Session
from ppd.proxy.sessions.table import SessionTable

from .past_turns import PastTurn

TOOL_CALLS = frozenset(("tool_calls", "tool_use", "function_call"))  # reasons why an answer ended
SPARE_NAMES = 1024  # of sessions that the table has forgotten

When = Callable[[float, Callable[[float], None]], None]
"""Has something happen at a time, once the log's turns have been played up to there."""


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """As the config says."""

    ttl_s: float = 3600.0
    most: int = 200_000
    returns: bool = True  # whether decisions go by when sessions return


USUAL_LIMITS = SessionLimits()


class KnownSession(msgspec.Struct, frozen=True, gc=False):
    """What was known of a turn's session when the turn came."""

    history: int
    source: int | None = None  # see `PromptEntry`
    tokens: int = 0  # of `source`, with its newest answer
    decode: WorkerId | None = None  # that answered it last
    affinity: WorkerId | None = None  # the same, of a session whose history the prompt does not go on with


class PastBeliefs:
    """`came` and `held` are asked in the order in which turns were decided, and each turn is begun then."""

    def __init__(
        self,
        engine: Callable[[WorkerId], WorkerView | None],
        when: When,
        limits: SessionLimits,
        *,
        prefills_answer: bool,
    ) -> None:
        """engine: with the capacity of its cache; None: it is not there."""
        self._beliefs = Beliefs(engine)
        self._when = when
        self._ttl_s = limits.ttl_s
        self._sessions = SessionTable(ttl_s=limits.ttl_s, capacity=limits.most, beliefs=self._beliefs)
        self._forecasts = Forecasts()
        self._histories: dict[str, int] = {}  # by name: the newest
        self._numbers = count(1)
        self.returns = Returns(self._sessions, self._beliefs, self._forecasts, prefills_answer=prefills_answer)

    def __len__(self) -> int:
        """Sessions that are known, and names."""
        return len(self._sessions) + len(self._histories)

    def came(self, turn: PastTurn) -> KnownSession:
        session = self._named(turn)
        if session is None or turn.kind not in ("next", "retry", "branch"):
            return KnownSession(self._new_history(turn), affinity=None if session is None else session.decode)
        where = session.decode_residency
        tokens = 0 if where is None else where.tokens
        if turn.kind == "branch":
            # At a first turn any worker that shares the beginning will do, as in the proxy.
            decode = session.decode if turn.number > 1 else None
            return KnownSession(self._new_history(turn), session.history, tokens, decode)
        if turn.kind == "next" and (calls_tool := session.came_back()) is not None:
            ended_s = session.seen_s
            came_s = max(turn.arrived_s, ended_s)  # receipts tell when a turn came to the millisecond below
            self._forecasts.take(SessionReturned(turn.model, session.turn, calls_tool, ended_s, came_s))
        return KnownSession(session.history, session.history, tokens, session.decode)

    def held(
        self, turn: PastTurn, known: KnownSession, most: int, views: Mapping[WorkerId, WorkerView]
    ) -> dict[WorkerId, Held]:
        """Of the turn's prompt. What its own receipt says of the worker that answered counts before all.

        most: tokens that it has in common with its session.
        """
        own = WorkerId(turn.answering.address)
        found = self._beliefs.held(views, PromptEntry(known.history, known.source), most) if most else {}
        found.pop(own, None)
        if turn.cached_tokens:
            evidence = turn.evidence if turn.evidence in EVIDENCE else BeliefEvidence.OWN_TURNS
            found[own] = Held(turn.cached_tokens, BeliefEvidence(evidence))
        return found

    def begin(
        self, turn: PastTurn, known: KnownSession, held: Mapping[WorkerId, Held], shared: int, computed_s: float
    ) -> None:
        """The turn goes the way that it went. shared: tokens that it has in common with its session."""
        decode = WorkerId(turn.answering.address)
        prefill = None if turn.prefill is None else WorkerId(turn.prefill.address)
        entry = PromptEntry(known.history, known.source, shared=shared)
        touches = TurnTouches(self._beliefs, entry, held, turn.prompt_tokens, TurnCaches(decode, prefill))
        touches.sent()
        answers_s = computed_s
        if turn.prefill is not None:
            cached = turn.cached_counted
            if turn.prefill.first_s is not None:
                self._when(computed_s, lambda _: touches.prefilled(cached))
            answers_s = turn.answering.ended_s if turn.answering.first_s is None else turn.answering.first_s
        if turn.answering.first_s is not None or turn.is_completed:
            self._when(answers_s, lambda _: touches.answering())

        def end(now_s: float) -> None:
            if turn.prompt_counted is not None:
                touches.answered(None if turn.route == "READBACK" else turn.cached_counted)
            touches.close()
            if turn.is_completed:
                self._completed(turn, known, decode, prefill, now_s)

        self._when(max(turn.answering.ended_s, answers_s), end)

    def _completed(
        self, turn: PastTurn, known: KnownSession, decode: WorkerId, prefill: WorkerId | None, now_s: float
    ) -> None:
        session, before = Session(known.history, None), self._sessions.of_history(known.history)
        prompt, output, calls_tool = turn.prompt_tokens, turn.output_tokens, None
        if turn.prompt_counted is not None:
            prompt, output = turn.prompt_counted, turn.completion_counted or 0
            calls_tool = turn.finish_reason in TOOL_CALLS
            self._forecasts.take(AnswerEnded(turn.model, turn.number, calls_tool, now_s))
        residency = self._beliefs.residency
        on_prefill = None if before is None else before.prefill_residency  # what P held before is kept, and not touched
        if prefill is not None and turn.route != "READBACK":
            on_prefill = residency(prefill, prompt)
        session.learn(None, residency(decode, prompt + output), on_prefill, calls_tool=calls_tool)
        session.turn, session.seen_s = turn.number, now_s
        self._sessions.adopt(session, None, ())
        if turn.session:
            self._histories[turn.session] = known.history

    def _named(self, turn: PastTurn) -> Session | None:
        history = self._histories.get(turn.session)
        session = None if history is None else self._sessions.of_history(history)
        return None if session is None or turn.decided_s - session.seen_s > self._ttl_s else session

    def _new_history(self, turn: PastTurn) -> int:
        if len(self._histories) > 2 * len(self._sessions) + SPARE_NAMES:
            known = self._sessions.of_history
            self._histories = {name: number for name, number in self._histories.items() if known(number) is not None}
        return next(self._numbers)


EVIDENCE = frozenset(BeliefEvidence)
