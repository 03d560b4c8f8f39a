"""The tries of one turn: who asks, what has failed, and whether it may be tried again. Pure but for the seat held."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from ..admission.gate import Seat
from ..admission.keys import Client
from ..admission.queue import effective_priority
from ..connectors.leg import encoded
from ..errors import LegError
from ..failures import Cause, ClientGets, FailureRule, HealthEffect, Leg
from ..fleet.view import WorkerView
from ..fleet.worker import Role
from ..health.worker_health import OVERLOAD_S, Key, blamed
from ..openai.request import Request
from ..policy import Route, Turn
from ..telemetry.receipts import Receipt
from .attempt import Attempt


class TurnContext(msgspec.Struct, frozen=True):
    """Who sent a request: the client of its key, what each leg carries of its headers, and the operator's wish."""

    client: Client
    headers: Mapping[str, str]
    forced: Route | None = None
    patience_s: float = math.inf  # in the queue; the proxy's own limit counts where it is the smaller
    is_counted: bool = False  # its request counts as a part of another, so that only its tokens do


def in_class(request: Request, client: Client) -> Request:
    """The request with a `priority` that its client's key allows: engines that schedule by it must see no other."""
    if not client.name or request.priority is None:
        return request
    allowed = effective_priority(client.priority, request.priority)
    return replace(request, priority=allowed, fields={**request.fields, "priority": encoded(allowed)})


class Job(msgspec.Struct, frozen=True):
    """What stays the same over a turn's tries."""

    request: Request
    turn: Turn
    receipt: Receipt
    asker: TurnContext
    started_s: float
    seat: Seat


@dataclass(slots=True)
class FailedAttempts:
    """What failed one turn so far.

    Hand-overs and answers have a limit each: with the first used up, the turn is computed without a hand-over.
    """

    limit: int
    last: LegError | None = None
    handing_over: int = 0
    answering: int = 0
    overloaded_until_s: float | None = None  # when the first of the answering workers that asked for time may be asked
    keys: dict[Key, LegError] = field(default_factory=dict)

    def avoid(self, views: Iterable[WorkerView]) -> tuple[Key, ...]:
        """Whom the next try does without."""
        if self.handing_over < self.limit:
            return tuple(self.keys)
        return (*self.keys, *(view.id for view in views if view.role is Role.PREFILL))

    def may_try_again(self, running: Attempt, exc: LegError, row: FailureRule, now_s: float) -> bool:
        """Notes the failure; whether its row leaves another try, and the limit does."""
        leg, decision = running.failed_leg, running.decision
        self.last = exc
        if row.client_gets(stream=running.request.stream) not in (ClientGets.ANOTHER, ClientGets.ANOTHER_OR_QUEUE):
            return False
        if row.standing is HealthEffect.PAIR and decision.prefill is not None:
            self.keys[decision.prefill.id, decision.decode.id] = exc
        else:
            self.keys[blamed(leg, decision)] = exc
        if leg is Leg.PREFILL or row.standing is HealthEffect.PAIR:
            self.handing_over += 1
        elif row.client is ClientGets.ANOTHER_OR_QUEUE:
            until_s = now_s + (exc.retry_after_s or OVERLOAD_S)
            self.overloaded_until_s = min(until_s, self.overloaded_until_s or until_s)
        else:
            self.answering += 1
        return self.answering < self.limit

    def forgive(self) -> None:
        """After a wait in the queue those that were overloaded may be asked again."""
        self.overloaded_until_s = None
        self.keys = {key: exc for key, exc in self.keys.items() if exc.cause is not Cause.OVERLOADED}
