"""The attempts of one turn: what a running one holds, what has failed, and whether another may follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from ..admission.gate import Permit
from ..admission.keys import Client
from ..admission.queue import effective_priority
from ..bodies.shared_bytes import SharedBytes
from ..connectors.leg import Handoff
from ..errors import LegError
from ..failures import Cause, ClientGets, FailureRule, HealthEffect, Leg, Phase
from ..fleet.booking import LegBooking
from ..fleet.view import WorkerView
from ..fleet.worker import Role, WorkerId
from ..health.worker_health import OVERLOAD_S, Key, blamed
from ..openai.answer import AnswerObserver
from ..openai.body_members import Members, encoded
from ..openai.reply_key import ReplyKey
from ..openai.request import Request
from ..openai.stream_relay import StreamRelay
from ..policy import Decision, Route, Turn
from ..telemetry.receipts import LegRecord, Receipt, new_id
from ..upstream.call import Answer, Call

_ANSWERING = {Route.LOCAL: Leg.LOCAL, Route.SPLIT: Leg.DECODE, Route.REPLICA: Leg.REPLICA}
ABORTED = "abort"  # the finish reason of an engine that gave up


class Attempt(msgspec.Struct, kw_only=True, eq=False):
    """One attempt and all that it holds. `close` gives everything back, at any time, and may be called twice."""

    request: Request
    decision: Decision
    decode: WorkerId  # the decision's
    receipt: Receipt
    client: Client
    booking: LegBooking
    charged_tokens: int  # the estimate that its key was charged with
    headers: Mapping[str, str]  # what every leg carries: authorization, content type, tracing
    started_s: float  # the turn's arrival
    asked_s: float  # when this attempt began
    attempt_id: str = msgspec.field(default_factory=new_id)
    handoff: Handoff | None = None  # what P announced, whether or not D has pulled it
    call: Call | None = None  # the answering leg's
    answer: Answer | None = None
    is_left: bool = False  # its client has gone: no further leg is begun
    leg: LegRecord | None = None  # the answering leg, once it is begun
    on_close: Callable[[Attempt], None] | None = None  # the dispatcher's
    permit: Permit | None = None  # the turn's, once this attempt answers it

    def close(self) -> None:
        if self.answer is not None:
            self.answer.close()
            self.answer = None
        if self.on_close is not None:
            on_close, self.on_close = self.on_close, None
            on_close(self)
        if self.permit is not None:
            self.permit.release()  # last, so that the next turn finds the worker free

    def leg_id(self, kind: str) -> str:
        """Unique, whatever ids clients send: engines and P2pNccl tell requests apart by it."""
        return f"{self.attempt_id}-{kind}"

    @property
    def answering_leg(self) -> Leg:
        return _ANSWERING[self.decision.route]

    @property
    def failed_leg(self) -> Leg:
        """The leg that was begun last."""
        return self.receipt.legs[-1].kind

    @property
    def has_asked_decode(self) -> bool:
        return self.call is not None and self.call.phase is not Phase.CONNECT


class OpenAnswer(msgspec.Struct):
    """An answer whose first event has come: of a stream the relay and the first bytes, else the whole body."""

    content_type: str
    first: bytes | SharedBytes
    observer: AnswerObserver
    reply: ReplyKey  # fed by the observer
    relay: StreamRelay | None  # None: `first` is all of it
    handoff: Handoff | None


class TurnContext(msgspec.Struct, frozen=True):
    """Who sent a request, the headers that each leg carries, and a route that the operator forces."""

    client: Client
    headers: Mapping[str, str]
    forced: Route | None = None
    patience_s: float = math.inf  # in the queue; the proxy's own limit may be shorter
    is_counted: bool = False  # part of a list that has been counted as one request: only its tokens count


def in_class(request: Request, client: Client) -> Request:
    """The request with a `priority` that its client's key allows: engines schedule by it."""
    if not client.name or request.priority is None:
        return request
    allowed = effective_priority(client.priority, request.priority)
    fields, value = request.fields, encoded(allowed)
    changed = fields.changed("priority", value) if isinstance(fields, Members) else {**fields, "priority": value}
    return replace(request, priority=allowed, fields=changed)


class Job(msgspec.Struct, frozen=True):
    """What is the same for all attempts of a turn."""

    request: Request
    turn: Turn
    receipt: Receipt
    context: TurnContext
    started_s: float
    permit: Permit


@dataclass(slots=True)
class FailedAttempts:
    """What has failed in one turn so far.

    Failed handoffs and failed answers are limited separately: after too many handoffs the turn is computed without one.
    """

    limit: int
    last: LegError | None = None
    handing_over: int = 0
    answering: int = 0
    overloaded_until_s: float | None = None  # when the first overloaded worker may be asked again
    keys: dict[Key, LegError] = field(default_factory=dict)

    def avoid(self, views: Iterable[WorkerView]) -> tuple[Key, ...]:
        """Workers and pairs that the next attempt leaves out."""
        if self.handing_over < self.limit:
            return tuple(self.keys)
        return (*self.keys, *(view.id for view in views if view.role is Role.PREFILL))

    def may_try_again(self, attempt: Attempt, exc: LegError, row: FailureRule, now_s: float) -> bool:
        """Books the failure. True where its row of the failure table and the limit allow another attempt."""
        leg, decision = attempt.failed_leg, attempt.decision
        self.last = exc
        if row.client_gets(stream=attempt.request.stream) not in (ClientGets.ANOTHER, ClientGets.ANOTHER_OR_QUEUE):
            return False
        if row.health is HealthEffect.PAIR and decision.prefill is not None:
            self.keys[decision.prefill.id, decision.decode.id] = exc
        else:
            self.keys[blamed(leg, decision)] = exc
        if leg is Leg.PREFILL or row.health is HealthEffect.PAIR:
            self.handing_over += 1
        elif row.client is ClientGets.ANOTHER_OR_QUEUE:
            until_s = now_s + (exc.retry_after_s or OVERLOAD_S)
            self.overloaded_until_s = min(until_s, self.overloaded_until_s or until_s)
        else:
            self.answering += 1
        return self.answering < self.limit

    def forgive(self) -> None:
        """Overloaded workers may be asked again."""
        self.overloaded_until_s = None
        self.keys = {key: exc for key, exc in self.keys.items() if exc.cause is not Cause.OVERLOADED}
