"""What follows when a leg fails before the client has got anything: the engine alone, P again, or an error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from ppd.proxy.connectors import answers_alone
from ppd.proxy.errors import ConfigError, LegError, NoWorkerError, Overloaded, PPDError
from ppd.proxy.failures import ROWS, Cause, ClientGets, HealthEffect, Leg, Phase
from ppd.proxy.policy import Decision
from ppd.proxy.routing.attempt import Attempt
from ppd.proxy.telemetry.receipts import LegRecord

from .decisions import Decisions

PAUSE_S = 0.2  # before P is asked again
PASSING = (502, 503, 504)  # statuses of a P that may answer soon
OK = 200
SIDECARS_FAULT = (401, 403, 408)  # of a P that is asked with the sidecar's own key; else they are the client's
AGAIN = (ClientGets.ANOTHER, ClientGets.ANOTHER_OR_QUEUE, ClientGets.AFRESH)  # what allows another attempt


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


@dataclass(frozen=True, slots=True)
class FailedLegs:
    """pause: waits for so many seconds."""

    decisions: Decisions
    policy: FailurePolicy
    pause: Callable[[float], Awaitable[None]]

    async def after(self, attempt: Attempt, exc: LegError, asked_again: int) -> Decision:
        """The next decision, once it is time for it: the attempt's own where its P is asked again.

        asked_again: how often its P was already. Raises what the client gets where no attempt follows.
        """
        record = attempt.failed(exc)
        row = ROWS[record.kind, exc.phase, exc.cause]
        gets, prefill = row.client_gets(stream=attempt.request.stream), attempt.decision.prefill
        if gets not in AGAIN:
            raise exc
        is_by_prefill = record.kind is Leg.PREFILL
        is_by_handoff = prefill is not None and (gets is ClientGets.AFRESH or row.health is HealthEffect.PAIR)
        if not is_by_prefill and not is_by_handoff:
            raise _of_engine(exc)
        if self.policy.on_failure is OnFailure.DECODE and answers_alone(self.decisions.engine.worker):
            return self.decisions.alone("prefill_failed" if is_by_prefill else "handoff_failed")
        if not is_by_prefill:
            raise exc
        told = _as_it_is(exc, record)
        if asked_again < self.policy.retries and _may_pass(exc, record):
            await self.pause(PAUSE_S)
            return attempt.decision
        raise told


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
