"""One turn in the sidecar: the E and the P that its head names, then the engine; if P fails, what the operator chose.

The legs are the proxy's own, by its dispatcher: how they are sent, cancelled, checked and wound up, and which failures
are a client's fault. What the proxy's router has beside them, sessions, the queue and the decision, is the picker's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ppd.proxy.beliefs.turn_touches import NO_TOUCHES
from ppd.proxy.encoders.choosing import NamedEncoders
from ppd.proxy.errors import LegError, PPDError
from ppd.proxy.failures import Cause
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.ledger import LegEstimates
from ppd.proxy.gateway.headers import TURN
from ppd.proxy.openai.request import Request
from ppd.proxy.policy import Decision
from ppd.proxy.routing.attempt import Attempt, OpenAnswer, TurnContext
from ppd.proxy.routing.legs.dispatch import Dispatcher
from ppd.proxy.routing.receipt_notes import error_name
from ppd.proxy.routing.router import TurnReply, reply_of
from ppd.proxy.routing.state import State
from ppd.proxy.telemetry.receipts import Receipt, new_id

from .decisions import Decisions
from .failed_legs import FailedLegs
from .records import NO_SESSION, Records, explained

log = logging.getLogger(__name__)

UNKNOWN = LegEstimates(prompt_tokens=0, new_tokens=0)  # nobody reads the load that legs bring here


@dataclass(slots=True)
class _Turn:
    request: Request
    receipt: Receipt
    context: TurnContext
    started_s: float
    encoders: NamedEncoders | None = None


class HeaderRouter:
    """Routes turns by their heads."""

    def __init__(
        self, state: State, dispatcher: Dispatcher, records: Records, decisions: Decisions, failed_legs: FailedLegs
    ) -> None:
        self._state = state
        self._dispatcher = dispatcher
        self._records = records
        self._decisions = decisions
        self._failed_legs = failed_legs
        self._now = state.now

    async def answer(self, request: Request, receipt: Receipt, context: TurnContext) -> TurnReply:
        """Raises PPDError where the client gets an error."""
        turn, decisions = _Turn(request, receipt, context, self._now()), self._decisions
        records = self._records.of(context.given.get(TURN, ""))
        self._state.receipts.open(receipt)
        try:
            prefill, turn.encoders = decisions.prefills.named(context.given), decisions.encoders.named(context.given)
            attempt, opened = await self._first_success(turn, decisions.of(request, prefill))
        except BaseException as exc:
            records.unanswered(receipt, exc, self._now() - turn.started_s, _name)
            raise
        headers = {**opened.headers, **explained(receipt, attempt)}
        # The picker hears of it before the client's next turn may come there.
        return reply_of(self._state, records, NO_SESSION, attempt, opened, headers, ends_first=True)

    async def _first_success(self, turn: _Turn, decision: Decision) -> tuple[Attempt, OpenAnswer]:
        asked_again = 0  # its P
        while True:
            turn.receipt.route, turn.receipt.reason = decision.route, decision.reason
            attempt = self._attempt(turn, decision)
            try:
                return attempt, await self._dispatcher.open(attempt)
            except LegError as exc:
                self._note(attempt, exc)
                following = await self._failed_legs.after(attempt, exc, asked_again)
                asked_again += following is decision
                decision = following

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

    def _note(self, attempt: Attempt, exc: LegError) -> None:
        leg, receipt = attempt.failed(exc).kind, attempt.receipt
        self._state.metrics.failures.labels(leg, exc.phase, exc.cause).inc()
        log.log(
            logging.DEBUG if exc.cause is Cause.REQUEST else logging.WARNING,
            "request %s: %s on %s: %s at %s",
            *(receipt.id, leg, exc.worker, exc.cause, exc.phase),
        )


def _name(exc: PPDError) -> str:
    """As a receipt has it: the picker knows the sidecar's own refusals by their codes."""
    return exc.code or error_name(exc)
