"""A streamed answer: which bytes the client gets for each piece of the worker's, and what the proxy learns meanwhile.

The data plane that moves the bytes calls `begin`, then `feed` for each piece, then `end` or `fail` once, and `written`
after each of them. Or it reads `chunks`, which awaits the worker and does all that.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from enum import Enum
from typing import Protocol

from ..bodies.shared_bytes import STEP_BYTES, SharedBytes
from ..errors import LegError
from ..failures import Cause
from ..openai.answer import ABORTED
from ..openai.stream_relay import BROKE_OFF
from ..sessions.table import SessionMatch
from ..telemetry.receipts import Receipt
from ..upstream.call import Answer
from .attempt import Attempt, OpenAnswer
from .learning import SeenAnswer
from .state import State

log = logging.getLogger(__name__)


class StreamedBody(Protocol):
    def chunks(self) -> AsyncGenerator[bytes, None]: ...

    def abandon(self) -> None:
        """The client has stopped reading. Its owner always calls this last; after a whole answer it does nothing."""


class TurnEnd(Protocol):
    """Who is told how an answer has ended; see `Learner`."""

    def completed(self, match: SessionMatch, attempt: Attempt, answer: SeenAnswer, now_s: float) -> None: ...

    def cancelled(self, receipt: Receipt, ended_s: float, *, is_answered: bool) -> None: ...

    def broken(self, receipt: Receipt, ended_s: float) -> None: ...


class LargeBody:
    """A whole answer that is written in pieces, as the client takes them."""

    def __init__(self, body: SharedBytes) -> None:
        self._view = body.view()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        for start in range(0, len(self._view), STEP_BYTES):
            yield bytes(self._view[start : start + STEP_BYTES])

    def abandon(self) -> None: ...


class _Stage(Enum):
    NEW = "nothing was written yet"
    BEGUN = "the client has the beginning"
    ENDED = "the last bytes are made"


# Looking up an enum's members by name is slow.
_NEW, _BEGUN, _ENDED = _Stage.NEW, _Stage.BEGUN, _Stage.ENDED


class Streaming:
    """One turn's answer; `abandon` may come at any time.

    Who writes what was returned calls `written` next, before anything else comes of the client: no token need wait for
    what is noted there.
    """

    __slots__ = (
        "_attempt",
        "_first",
        "_first_token_s",
        "_is_untold",
        "_learner",
        "_match",
        "_relay",
        "_reply",
        "_stage",
        "_state",
        "_summary",
        "answer",
        "is_over",
    )

    def __init__(
        self, state: State, learner: TurnEnd, match: SessionMatch, attempt: Attempt, opened: OpenAnswer
    ) -> None:
        assert attempt.answer is not None and opened.relay is not None, "a stream is open"
        self.answer: Answer = attempt.answer
        self._state = state
        self._learner = learner
        self._match = match
        self._attempt = attempt
        assert isinstance(opened.first, bytes), "the start of a stream"
        self._first = opened.first
        self._reply = opened.reply
        self._relay = opened.relay
        self._summary = opened.observer.summary
        self._first_token_s: float | None = None
        self._stage = _NEW
        self._is_untold: bool | None = None  # what the answer teaches; None: it is not whole
        self.is_over = False  # the answer is whole; the worker still has to end its HTTP message

    def begin(self) -> bytes:
        self.answer.reached_the_client()
        self._note()
        first, self._first = self._first, b""  # not kept: the stream may be open for long
        return first

    def written(self) -> None:
        """What was returned last has been written, or is about to be without a pause."""
        try:
            if self._stage is _NEW:
                self._settle()
            if self._is_untold:
                self._learn()
        finally:
            if self._stage is _ENDED:
                if self._attempt.receipt.outcome == "running":
                    self._learner.broken(self._attempt.receipt, self._elapsed_s())
                self._attempt.close()

    @property
    def plain(self) -> tuple[bytes, bytes] | None:
        """How events are known that may be passed on by others, who then tell by `passed`; None: none may."""
        return None if self._first_token_s is None else self._relay.plain

    def passed(self, text: str, events: int) -> None:
        self._relay.passed(text, events)

    def feed(self, data: bytes) -> bytes:
        """The client's bytes for this piece."""
        relay = self._relay
        if self._first_token_s is None:
            out = relay.feed(data)
        elif relay.passes(data):
            return data  # nearly every piece is one event of text
        else:
            out = relay.edited(data)
        self._note()
        return out

    def end(self) -> bytes:
        """The last bytes, once the worker has ended its answer."""
        rest, summary = self._relay.rest(), self._summary
        if summary.error is not None:
            return rest + self.fail(self.answer.failure("the worker ended its answer with an error", Cause.ERROR_EVENT))
        if not summary.ended:
            return rest + self.fail(self.answer.failure(BROKE_OFF, Cause.RESET))
        return rest + self._finish()

    def fail(self, error: LegError) -> bytes:
        """The last bytes of a broken answer: an error event in the endpoint's shape, unless the answer was whole."""
        rest = self._relay.rest()
        self._note()
        if self._is_untold:  # it was whole, so it has not failed
            self._learn()
        self._break_off(error)
        return rest + self._finish()

    def abandon(self) -> None:
        self.written()
        if self._attempt.receipt.outcome == "running":
            self._learner.cancelled(self._attempt.receipt, self._elapsed_s(), is_answered=True)
        self._attempt.close()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        out = self.begin()
        try:
            while True:
                self.written()  # who takes a piece may pause, and the client send its next turn meanwhile
                if out:
                    yield out
                data = await self.answer.chunk(is_over=self.is_over)
                if not data:
                    break
                out = self.feed(data)
            tail = self.end()
        except LegError as exc:
            tail = self.fail(exc)
        self.written()
        if tail:
            yield tail

    def _finish(self) -> bytes:
        tail = self._relay.finish()
        self._note()
        if self._stage is _NEW:
            self._settle()
        self._stage = _ENDED
        return tail

    def _note(self) -> None:
        """Notes the first token's time, and once that the answer is whole. Other processes know before the client."""
        summary = self._summary
        self.is_over = summary.ended
        if self._first_token_s is None and summary.first_token_seen:
            self._first_token_s = self._state.now()
        if summary.completed and self._is_untold is None and summary.finish_reason != ABORTED:
            self._is_untold = True
            if self._state.sessions.replicated is not None:
                self._learn()

    def _settle(self) -> None:
        """The beginning of the answer is with the client, or nobody takes it any more."""
        self._stage = _BEGUN
        self._attempt.has_answered()
        self._attempt.settle(self._state.bare_views)

    def _learn(self) -> None:
        self._is_untold = False
        if self._stage is _NEW:
            self._settle()
        if self._attempt.receipt.outcome == "running":
            times_s = None if self._first_token_s is None else (self._first_token_s, self._state.now())
            answer = SeenAnswer(self._summary, self._reply, times_s)
            complete(self._state, self._learner, self._match, self._attempt, answer)
            tell(self._state)

    def _break_off(self, exc: LegError) -> None:
        """Books a failure after the client got bytes; a failure after the last event counts for nothing."""
        attempt, events = self._attempt, self._summary.events
        if attempt.receipt.outcome != "running":
            return
        leg, record = attempt.answering_leg, attempt.leg
        assert record is not None, "it answers"
        record.fail(exc)
        record.events = events
        attempt.receipt.error = f"{leg} {exc.phase}: {exc.cause}"
        log.warning(
            "request %s: %s on %s %s: %s at %s after %d events; the client was told",
            *(attempt.receipt.id, leg, record.worker, exc.worker, exc.cause, exc.phase, events),
        )
        self._state.health.failed(leg, exc, attempt.decision, attempt.asked_s)
        self._state.metrics.failures.labels(leg, exc.phase, exc.cause).inc()

    def _elapsed_s(self) -> float:
        return self._state.now() - self._attempt.started_s


def end_whole(state: State, learner: TurnEnd, match: SessionMatch, attempt: Attempt, opened: OpenAnswer) -> None:
    """Ends the turn of an answer that came whole."""
    attempt.has_answered()
    try:
        complete(state, learner, match, attempt, SeenAnswer(opened.observer.summary, opened.reply))
    finally:
        attempt.close()


def complete(state: State, learner: TurnEnd, match: SessionMatch, attempt: Attempt, answer: SeenAnswer) -> None:
    """Gives back what the turn holds of its workers and its place in the fleet, and learns.

    Before the answer's last bytes go to the client, the other processes are to be told: its next turn may reach any.
    """
    now_s = state.now()
    attempt.booking.release(now_s)  # the worker has ended its leg; other processes hear of that with the session
    permit, attempt.permit = attempt.permit, None
    if permit is not None:
        permit.release()  # after that: the next turn finds the worker free
    learner.completed(match, attempt, answer, now_s)
    if not attempt.is_finished_on_prefill:
        state.health.completed(attempt.decision)


def tell(state: State) -> None:
    """When this returns, the other processes know of all turns that have been completed."""
    if (others := state.sessions.replicated) is not None:
        others.tell()
