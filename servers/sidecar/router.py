"""One turn in the sidecar: the E and the P that its head names, then the engine; if P fails, what the operator chose.

The legs are the proxy's own, by its dispatcher: how they are sent, cancelled, checked and wound up, and which failures
are a client's fault. What the proxy's router has beside them, sessions, the queue and the decision, is the picker's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from ppd.proxy.beliefs.turn_touches import NO_TOUCHES
from ppd.proxy.connectors import answers_alone, missing_coordinates, splits, stops_at_plain
from ppd.proxy.encoders.choosing import NamedEncoders
from ppd.proxy.errors import ConfigError, LegError, NoWorkerError, Overloaded, PPDError
from ppd.proxy.failures import ROWS, Cause, ClientGets, HealthEffect, Leg, Phase
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.ledger import LegEstimates
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.gateway.headers import TURN
from ppd.proxy.openai.request import Request
from ppd.proxy.policy import Decision, Route
from ppd.proxy.routing.attempt import Attempt, OpenAnswer, TurnContext
from ppd.proxy.routing.dispatch import Dispatcher
from ppd.proxy.routing.receipt_notes import error_name
from ppd.proxy.routing.router import TurnReply
from ppd.proxy.routing.state import State
from ppd.proxy.routing.stream import Streaming, whole
from ppd.proxy.telemetry.receipts import LegRecord, Receipt, new_id

from .encoders import Encoders
from .prefills import Prefills
from .records import NO_SESSION, NOT_NAMED, Records, explained

log = logging.getLogger(__name__)

PAUSE_S = 0.2  # before P is asked again
PASSING = (502, 503, 504)  # statuses of a P that may answer soon
OK = 200
SIDECARS_FAULT = (401, 403, 408)  # of a P that is asked with the sidecar's own key; else they are the client's
AGAIN = (ClientGets.ANOTHER, ClientGets.ANOTHER_OR_QUEUE, ClientGets.AFRESH)  # what allows another attempt
UNKNOWN = LegEstimates(prompt_tokens=0, new_tokens=0)  # nobody reads the load that legs bring here


class OnFailure(StrEnum):
    """What follows when P fails before D has begun to answer, by no fault of the request."""

    DECODE = "decode"  # the engine computes the prompt itself
    ERROR = "error"  # the client gets what P answered
    RETRY = "retry"  # P is asked again where it answered 502 to 504, or not at all; then as `error`


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    on_failure: OnFailure = OnFailure.DECODE
    retries: int = 0

    def __post_init__(self) -> None:
        if (self.on_failure is OnFailure.RETRY) != (self.retries > 0):
            allowed = "at least 1 with --on-prefill-failure retry, and 0 without"
            raise ConfigError(f"prefill_retries = {self.retries}: must be {allowed}", param="prefill_retries")


@dataclass(slots=True)
class _Turn:
    request: Request
    receipt: Receipt
    context: TurnContext
    started_s: float
    encoders: NamedEncoders | None = None
    asked_again: int = 0  # of its P


class HeaderRouter:
    """Routes turns by their heads. engine: the one behind this sidecar; own: its address, and the sidecar's."""

    def __init__(
        self,
        state: State,
        dispatcher: Dispatcher,
        records: Records,
        prefills: Prefills,
        encoders: Encoders,
        engine: WorkerView,
        own: frozenset[str],
        policy: FailurePolicy,
        pause: Callable[[float], Awaitable[None]],
    ) -> None:
        self._state = state
        self._dispatcher = dispatcher
        self._records = records
        self._prefills = prefills
        self._encoders = encoders
        self._engine = engine
        self._own = own
        self._policy = policy
        self._pause = pause
        self._now = state.now

    async def answer(self, request: Request, receipt: Receipt, context: TurnContext) -> TurnReply:
        """Raises PPDError where the client gets an error."""
        turn = _Turn(request, receipt, context, self._now())
        records = self._records.of(context.given.get(TURN, ""))
        self._state.receipts.open(receipt)
        try:
            prefill, turn.encoders = self._prefills.named(context.given), self._encoders.named(context.given)
            decision = self._decision(prefill, self._alone(request, prefill))
            attempt, opened = await self._first_success(turn, decision)
        except PPDError as exc:
            receipt.status, receipt.error = exc.status, exc.code or error_name(exc)
            records.failed(receipt, self._now() - turn.started_s)
            raise
        except asyncio.CancelledError:
            records.cancelled(receipt, self._now() - turn.started_s, is_answered=False)
            raise
        headers = {**opened.headers, **explained(receipt, attempt)}
        if opened.relay is not None:
            stream = Streaming(self._state, records, NO_SESSION, attempt, opened)
            return TurnReply(opened.content_type, headers, stream)
        body = whole(self._state, records, NO_SESSION, attempt, opened)
        return TurnReply(opened.content_type, headers, body)

    def _decision(self, prefill: WorkerView | None, alone: str = "") -> Decision:
        """alone: why the engine is to compute the prompt, whatever P is named; NoWorkerError if it cannot."""
        if prefill is None or alone:
            reason = alone or NOT_NAMED
            if stops_at_plain(self._engine.worker):
                raise NoWorkerError(f"the engine cannot compute a prompt without a P ({reason})")
            return Decision(route=Route.LOCAL, reason=reason, decode=self._engine, wanted=Route.LOCAL)
        return Decision(
            route=Route.SPLIT, reason="prefill_named", decode=self._engine, prefill=prefill, wanted=Route.SPLIT
        )

    def _alone(self, request: Request, prefill: WorkerView | None) -> str:
        """Why the engine computes the prompt even where a P is named: what a picker may not know."""
        if prefill is not None and prefill.id in self._own:
            return "prefill_is_own"  # its KV is there already
        if prefill is not None and not splits(prefill.worker, request.endpoint):
            return "endpoint_not_split"
        if request.prompt.previous_response_id is not None:
            return "stored_response"  # the history is in the engine
        if prefill is not None and missing_coordinates(prefill.worker):
            return "missing_coordinates"
        return "" if request.single_engine is None else "single_engine"

    async def _first_success(self, turn: _Turn, decision: Decision) -> tuple[Attempt, OpenAnswer]:
        while True:
            turn.receipt.route, turn.receipt.reason = decision.route, decision.reason
            attempt = self._attempt(turn, decision)
            try:
                return attempt, await self._dispatcher.open(attempt)
            except LegError as exc:
                decision = await self._after(turn, attempt, exc)

    def _attempt(self, turn: _Turn, decision: Decision) -> Attempt:
        prefill, receipt = decision.prefill, turn.receipt
        return Attempt(
            request=turn.request,
            decision=decision,
            decode=decision.decode.id,
            receipt=receipt,
            client=turn.context.client,
            booking=LegBooking(
                self._state.registry, decision.decode.id, None if prefill is None else prefill.id, UNKNOWN
            ),
            touches=NO_TOUCHES,
            charged_tokens=0,
            headers=turn.context.headers,
            started_s=turn.started_s,
            asked_s=self._now(),
            history=0,
            encoders=turn.encoders,
            given_id=f"{receipt.id}-{new_id()}",  # engines' logs can be joined with the gateway's, and it is unique
        )

    async def _after(self, turn: _Turn, attempt: Attempt, exc: LegError) -> Decision:
        """The next decision, once it is time for it; raises what the client gets where none follows."""
        record = attempt.failed(exc)
        leg = record.kind
        self._note(attempt, exc)
        row = ROWS[leg, exc.phase, exc.cause]
        gets, prefill = row.client_gets(stream=turn.request.stream), attempt.decision.prefill
        if gets not in AGAIN:
            raise exc
        is_by_prefill = leg is Leg.PREFILL
        is_by_handoff = prefill is not None and (gets is ClientGets.AFRESH or row.health is HealthEffect.PAIR)
        if not is_by_prefill and not is_by_handoff:
            raise _of_engine(exc)
        if self._policy.on_failure is OnFailure.DECODE and answers_alone(self._engine.worker):
            return self._decision(None, "prefill_failed" if is_by_prefill else "handoff_failed")
        if not is_by_prefill:
            raise exc
        told = _as_it_is(exc, record)
        if turn.asked_again < self._policy.retries and _may_pass(exc, record):
            turn.asked_again += 1
            await self._pause(PAUSE_S)
            return attempt.decision
        raise told

    def _note(self, attempt: Attempt, exc: LegError) -> None:
        leg, receipt = attempt.failed(exc).kind, attempt.receipt
        self._state.metrics.failures.labels(leg, exc.phase, exc.cause).inc()
        log.log(
            logging.DEBUG if exc.cause is Cause.REQUEST else logging.WARNING,
            "request %s: %s on %s: %s at %s",
            *(receipt.id, leg, exc.worker, exc.cause, exc.phase),
        )


def _of_engine(exc: LegError) -> PPDError:
    """What the proxy would answer with no other worker left."""
    if exc.phase is Phase.CONNECT:
        return NoWorkerError("the engine cannot be reached")
    if exc.cause is Cause.OVERLOADED:
        error = Overloaded("the engine is overloaded", reason="workers_overloaded", retry_after_s=exc.retry_after_s)
        error.status = exc.status
        return error
    return exc


def _may_pass(exc: LegError, record: LegRecord) -> bool:
    """Whether P may answer soon: it said so, or could not be reached, or ended the connection without an answer.

    One that was too slow would begin anew, while its client has waited already.
    """
    if record.status is not None:
        return record.status in PASSING
    return exc.phase is Phase.CONNECT or exc.cause not in (Cause.TIMEOUT, Cause.MALFORMED)


def _as_it_is(exc: LegError, record: LegRecord) -> LegError:
    """P's own status, and its own words where they are an error in OpenAI's shape.

    Not where P has begun an answer, nor where it blames the sidecar: for its key, or for having been slow.
    """
    if record.status in (None, OK, *SIDECARS_FAULT):
        return exc
    return LegError(
        exc.message, worker=exc.worker, phase=exc.phase, cause=Cause.REQUEST, status=record.status, body=exc.body
    )
