"""One turn from request to answer: choose its workers, run the legs, learn.

As long as no byte has gone to the client, a failed attempt is followed by a new decision without the workers that
failed. With no P left, the policy falls back to a turn without a handoff.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial

import msgspec

from ..admission.keys import Client
from ..admission.scoped_requests import no_such_response
from ..config import ProxyConfig
from ..errors import LegError, PPDError
from ..failures import ROWS, Cause, FailureRule, Leg
from ..fleet.worker import WorkerId
from ..health.poisoned_prompts import is_loss, life_of
from ..health.worker_health import blamed_view
from ..leg_moves import LegsState
from ..openai.request import Request
from ..sessions.table import SessionMatch
from ..telemetry.receipts import Receipt
from .attempt import Attempt, Job, OpenAnswer, TurnContext
from .choosing import Chooser
from .failed_attempts import FailedAttempts, workers_lost
from .learning import Learner
from .legs.dispatch import Dispatcher
from .receipt_notes import decision_headers
from .state import State
from .stream import LargeBody, StreamedBody, Streaming, TurnEnd, end_whole

log = logging.getLogger(__name__)

MOST_SEARCHED = 64


class TurnReply(msgspec.Struct):
    content_type: str
    headers: dict[str, str]
    body: bytes | StreamedBody
    status: int = 200
    end: Callable[[], None] | None = None  # of a turn that is not over yet, although its answer is whole

    def written(self) -> None:
        """To be called when `body` has been written, or will not be, and before anything else comes of its client.

        So the client need not wait for what its answer teaches.
        """
        end, self.end = self.end, None
        if end is not None:
            try:
                end()
            except Exception:  # its client is to have the answer all the same
                log.exception("a turn whose answer is whole could not be ended")


class Router:
    """Routes turns to the workers that `chooser` names."""

    def __init__(
        self, config: ProxyConfig, state: State, chooser: Chooser, dispatcher: Dispatcher, learner: Learner
    ) -> None:
        self._attempts = config.attempts
        self._state = state
        self._chooser = chooser
        self._dispatcher = dispatcher
        self._learner = learner

    async def answer(self, request: Request, receipt: Receipt, context: TurnContext) -> TurnReply:
        """Raises PPDError where the client gets an error."""
        job = await self._chooser.enter(request, receipt, context)
        try:
            attempt, opened = await self._first_success(job)
        except BaseException as exc:
            self._chooser.left(job, exc)
            raise
        attempt.permit = job.permit
        job.permit.settle()
        headers = decision_headers(receipt)
        if opened.headers:
            headers = {**opened.headers, **headers}
        others = self._state.sessions.replicated
        reply = reply_of(
            *(self._state, self._learner, job.match, attempt, opened, headers), ends_first=others is not None
        )
        if others is not None and opened.relay is None:
            await others.told()
        return reply

    async def _first_success(self, job: Job) -> tuple[Attempt, OpenAnswer]:
        """Attempts until one succeeds, each without the workers that failed before."""
        failed: FailedAttempts | None = None
        state, health = self._state, self._state.health
        while True:
            attempt = await self._chooser.choose(job, failed)
            decision = attempt.decision
            try:
                health.asked(decision, attempt.asked_s)
                try:
                    opened = await self._dispatcher.open(attempt)
                except LegError as exc:
                    await self._examine(attempt, exc)
                    raise
            except LegError as exc:
                row = self._give_up(attempt, exc)
                failed = failed or self._failed(job)
                may = failed.may_try_again(attempt, exc, row)
                if is_loss(exc):
                    await self._lost(attempt, exc, failed)
                if not may or _has_lost_response(exc, job):
                    raise _error(failed, job) from None
            except BaseException:
                health.left(decision, attempt.asked_s)
                raise
            else:
                if attempt.is_finished_on_prefill:
                    health.ended_on_prefill(decision, attempt.asked_s)
                else:
                    health.began(decision)
                if job.request.media:
                    job.doubts.answered()
                if (poisoned := state.poisoned).suspects:
                    poisoned.answered(job.request.prompt.chain.end())
                return attempt, opened

    def _failed(self, job: Job) -> FailedAttempts:
        previous = job.request.prompt.previous_response_id
        return FailedAttempts(self._attempts, search_limit(job.context.client, previous or ""))

    async def _examine(self, attempt: Attempt, exc: LegError) -> None:
        """Raises another failure where the worker turns out to be dead."""
        record = attempt.failed(exc)
        found = await self._dispatcher.examine(exc, blamed_view(record.kind, attempt.decision).worker)
        if found is not exc:
            record.fail(found)
            raise found from exc

    async def _lost(self, attempt: Attempt, exc: LegError, failed: FailedAttempts) -> None:
        """Notes that a worker ended this prompt's connection, and raises where it is not to be asked of another."""
        record = attempt.failed(exc)
        life = life_of(blamed_view(record.kind, attempt.decision))
        if self._state.poisoned.lost(attempt.request.prompt.chain.end(), life, self._state.now()):
            raise workers_lost(exc) from exc
        other = attempt.unanswered_beside(record)
        if other is not None and await self._dispatcher.is_dead(other.worker):
            failed.ask_one()

    def _count(self, attempt: Attempt, leg: Leg, exc: LegError) -> FailureRule:
        """Against whom a leg's failure is held, perhaps later."""
        health, decision = self._state.health, attempt.decision
        count = partial(health.count, leg, exc, decision, attempt.asked_s)
        row = ROWS[leg, exc.phase, exc.cause] if attempt.doubts.hold(exc, count) else count()
        health.left(decision, attempt.asked_s)
        return row

    def _give_up(self, attempt: Attempt, exc: LegError) -> FailureRule:
        """Books a leg's failure, and has a handoff taken that P still pins KV for."""
        record = attempt.failed(exc)
        leg = record.kind
        row = self._count(attempt, leg, exc)
        self._state.metrics.failures.labels(leg, exc.phase, exc.cause).inc()
        log.log(
            logging.DEBUG if exc.cause is Cause.REQUEST else logging.WARNING,
            "request %s: %s on %s %s: %s at %s",
            *(attempt.receipt.id, leg, record.worker, exc.worker, exc.cause, exc.phase),
        )
        if exc.cause is Cause.UNKNOWN_MODEL:
            self._state.registry.lost_model(WorkerId(exc.worker), attempt.request.model)
        if attempt.legs is not None and attempt.legs.state is LegsState.UNTAKEN:
            self._dispatcher.release(attempt)
        return row


def reply_of(
    state: State,
    learner: TurnEnd,
    match: SessionMatch,
    attempt: Attempt,
    opened: OpenAnswer,
    headers: dict[str, str],
    *,
    ends_first: bool,
) -> TurnReply:
    """ends_first: others are to know what a whole answer teaches before its client has it."""
    kind, first = opened.content_type, opened.first
    if opened.relay is not None:
        return TurnReply(kind, headers, Streaming(state, learner, match, attempt, opened))
    if isinstance(first, bytes) and not ends_first:
        return TurnReply(kind, headers, first, end=partial(end_whole, state, learner, match, attempt, opened))
    end_whole(state, learner, match, attempt, opened)  # a large one takes long to write
    return TurnReply(kind, headers, first if isinstance(first, bytes) else LargeBody(first))


def search_limit(client: Client, response_id: str) -> int:
    """How many workers are asked for a stored response, where it is not known which one has it.

    One wrong id shall not cost a large fleet a request each; but who shows an id that was made for him has not guessed.
    """
    return sys.maxsize if client.scope is not None and client.scope.owns(response_id) else MOST_SEARCHED


def _error(failed: FailedAttempts, job: Job) -> PPDError:
    previous = job.request.prompt.previous_response_id
    if previous is None or not failed.has_searched:
        return failed.error()
    return no_such_response(previous, "previous_response_id", int(failed.search_limit))


def _has_lost_response(exc: LegError, job: Job) -> bool:
    """Whether the very worker that has stored the response says that it has not: then no other has it."""
    is_unknown = job.turn.stored_response and exc.cause is Cause.UNKNOWN_RESPONSE
    return is_unknown and exc.worker == job.turn.decode
