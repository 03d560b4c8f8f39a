"""A streamed answer under a client that reads from it: what it gets of each piece, and what is learnt on the way.

Whoever moves the bytes calls `begin`, then `feed` for each piece of the worker's, then `end` or `fail` once; or reads
`chunks`, which does all that by awaiting the worker.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Protocol

from ..errors import LegError
from ..failures import Cause
from ..openai.stream_relay import BROKE_OFF
from ..sessions.table import SessionMatch
from ..upstream.answer import Answer
from .attempt import ABORTED, Attempt, OpenAnswer
from .learning import Learner
from .state import State

log = logging.getLogger(__name__)


class StreamedBody(Protocol):
    """A client's answer that comes in pieces."""

    def chunks(self) -> AsyncGenerator[bytes, None]: ...

    def abandon(self) -> None:
        """Nobody reads on, if ever anybody did; at its end that changes nothing. Whoever has it calls this at last."""


class Streaming:
    """One turn's answer; `abandon` at any time, as long as it has not ended."""

    def __init__(
        self, state: State, learner: Learner, match: SessionMatch, attempt: Attempt, opened: OpenAnswer
    ) -> None:
        assert attempt.answer is not None and opened.relay is not None, "a stream is open"
        self.answer: Answer = attempt.answer
        self._state = state
        self._learner = learner
        self._match = match
        self._attempt = attempt
        self._opened = opened
        self._relay = opened.relay
        self._summary = opened.observer.summary
        self._first_token_s: float | None = None
        self._is_learnt = False
        self.is_over = False  # the answer is whole; what the worker still owes is the end of its message
        attempt.request = attempt.request.without_prompt()

    def begin(self) -> bytes:
        """What the client gets first."""
        self.answer.reached_the_client()
        self._note()
        return self._opened.first

    def feed(self, data: bytes) -> bytes:
        """What the client gets of this piece. All that it tells was learnt before: the next turn may come at once."""
        if self._first_token_s is not None and self._relay.passes(data):
            return data  # as nearly every piece, it is one event of text: the answer goes on
        out = self._relay.feed(data)
        self._note()
        return out

    def end(self) -> bytes:
        """The last bytes, after the worker's own end."""
        summary = self._summary
        if summary.error is not None:
            return self.fail(self.answer.failure("the worker ended its answer with an error", Cause.ERROR_EVENT))
        if not summary.ended:
            return self.fail(self.answer.failure(BROKE_OFF, Cause.RESET))
        return self._finish()

    def fail(self, error: LegError) -> bytes:
        """The same where it broke: an error event in the endpoint's own shape, unless the answer was whole."""
        self._break_off(error)
        return self._finish()

    def abandon(self) -> None:
        """The client is gone; after the end of the answer that changes nothing."""
        if self._attempt.receipt.outcome == "running":
            self._learner.cancelled(self._attempt.receipt, self._elapsed_s(), is_answered=True)
        self._attempt.close()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The client's bytes as they come."""
        out = self.begin()
        try:
            while True:
                if out:
                    yield out
                data = await self.answer.chunk(is_over=self.is_over)
                if not data:
                    break
                out = self.feed(data)
            tail = self.end()
        except LegError as exc:
            tail = self.fail(exc)
        if tail:
            yield tail

    def _finish(self) -> bytes:
        tail = self._relay.finish()
        self._note()
        if self._attempt.receipt.outcome == "running":
            self._learner.broken(self._attempt.receipt, self._elapsed_s())
        self._attempt.close()
        return tail

    def _note(self) -> None:
        """The time of the first token, and, once, all there is to learn."""
        summary = self._summary
        self.is_over = summary.ended
        if self._first_token_s is None and summary.first_token_seen:
            self._first_token_s = self._state.now()
        if summary.completed and not self._is_learnt and summary.finish_reason != ABORTED:
            self._is_learnt = True
            if self._attempt.receipt.outcome == "running":
                times_s = None if self._first_token_s is None else (self._first_token_s, self._state.now())
                complete(self._state, self._learner, self._match, self._attempt, self._opened, times_s)

    def _break_off(self, exc: LegError) -> None:
        """A stream failed under a client that has read from it; after its last event that is of no account."""
        attempt, events = self._attempt, self._summary.events
        if attempt.receipt.outcome != "running":
            return
        leg, record = attempt.answering_leg, attempt.receipt.legs[-1]
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


def complete(
    state: State,
    learner: Learner,
    match: SessionMatch,
    attempt: Attempt,
    opened: OpenAnswer,
    times_s: tuple[float, float] | None = None,
) -> None:
    """What an answer that is all there teaches; times_s: of its first and its last token."""
    learner.completed(match, attempt, opened, state.now(), token_times_s=times_s)
    state.health.completed(attempt.decision)
