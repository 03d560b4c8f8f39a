"""P then D, or both at once: two runs of `leg_moves` for one attempt, up to the answer's first event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from msgspec.structs import replace

from ...connectors import CONNECTORS, Connector, writes_into_decode
from ...connectors.leg import Finished, Handoff, LegRequest, NoHandoff, Pair
from ...connectors.nixl import READS_BACK
from ...errors import LegError
from ...failures import ROWS, Cause, HandoffEffect, Leg, Phase
from ...leg_moves import LegOrder, Legs, LegsAction, LegsEvent
from ...openai.answer import AnswerObserver
from ...openai.edits import finished_body
from ...openai.reply_key import ReplyKey
from ...policy import Route
from ...upstream.two_legs import TwoLegs
from ..attempt import Attempt, OpenAnswer
from ..reading_back import Reader
from ..state import State
from .handoff_release import HandoffRelease
from .one_leg import OneLeg

log = logging.getLogger(__name__)

JSON, EVENT_STREAM = "application/json", "text/event-stream; charset=utf-8"

Found = Handoff | NoHandoff | Finished  # what P's answer is to D


class Split:
    """What it opens is held by the `Attempt`."""

    def __init__(self, leg: OneLeg, handoff_release: HandoffRelease, state: State) -> None:
        self._leg = leg
        self._handoff_release = handoff_release
        self._handles, self._reader = state.handles, Reader(state.handles)
        self._handoffs = state.handoffs
        self._health = state.health
        self._metrics = state.metrics

    def answer(self, attempt: Attempt) -> Coroutine[Any, Any, OpenAnswer]:
        """The client's, D's or P's; LegError of the leg that ended the attempt."""
        prefill = attempt.decision.prefill
        assert prefill is not None, "a SPLIT has a P"
        connector = CONNECTORS[prefill.worker.connector]
        order = connector.order
        legs = attempt.legs = Legs(order)
        if order is LegOrder.P_THEN_D:
            return self._handoff_release.shielded(self._in_turn(attempt, connector, legs), attempt)
        opening = self._at_once(attempt, connector, legs)
        return self._handoff_release.shielded(opening, attempt) if writes_into_decode(connector) else opening

    async def _in_turn(self, attempt: Attempt, connector: Connector, legs: Legs) -> OpenAnswer:
        decision, endpoint = attempt.decision, attempt.request.endpoint
        assert decision.prefill is not None, "a SPLIT has a P"
        if decision.route is Route.READBACK:  # without a handle P computes all of the prompt
            attempt.handle = self._handles.take(attempt.history)
        pair = Pair(decision.prefill.worker, decision.decode.worker, connector.new_key(), attempt.handle)
        to_p = connector.prefill_leg(endpoint, self._leg.fields(attempt, pair.prefill), pair, attempt.leg_id("p"))
        try:
            found = await self._leg.prefilled(attempt, connector, pair, to_p)
        except LegError:
            legs.take(LegsEvent.PREFILL_FAILED)
            raise
        if isinstance(found, Handoff):
            attempt.handoff = found
        asked = legs.take(found.event)
        if LegsAction.ASK_DECODE in asked:
            fields = self._leg.fields(attempt, pair.decode)
            if READS_BACK in pair.decode.coordinates:
                fields = self._reader.asking(attempt, fields)
            to_d = connector.decode_leg(endpoint, fields, pair, attempt.leg_id("d"), attempt.handoff)
        elif LegsAction.COMPUTE in asked:
            to_d = self._leg.plain(attempt, "d")
        elif LegsAction.ANSWER in asked:
            return _by_prefill(attempt, found)
        else:
            raise asyncio.CancelledError  # the client has left
        return await self._last(attempt, legs, to_d)

    async def _at_once(self, attempt: Attempt, connector: Connector, legs: Legs) -> OpenAnswer:
        """P's counts may come after D's first event; P's KV cannot."""
        decision, endpoint = attempt.decision, attempt.request.endpoint
        assert decision.prefill is not None, "a SPLIT has a P"
        pair = Pair(decision.prefill.worker, decision.decode.worker, connector.new_key())
        attempt.handoff = untold = Handoff.untold(pair)
        found: Found = untold

        # Each makes its own body, so that whichever is asked first does not wait for the other's.
        async def prefilled() -> LegsEvent:
            nonlocal found
            fields = self._leg.fields(attempt, pair.prefill)
            to_p = connector.prefill_leg(endpoint, fields, pair, attempt.leg_id("p"))
            try:
                found = await self._leg.prefilled(attempt, connector, pair, to_p)
            except LegError as exc:
                # Where P waits for D, it may be D that hangs.
                is_late = (exc.phase, exc.cause) == (Phase.SENT, Cause.TIMEOUT)
                exc.is_of_pair = is_late and connector.order is LegOrder.D_FIRST
                raise
            if isinstance(found, Handoff):
                attempt.handoff = replace(found, params=untold.params)
            return found.event

        async def decoded() -> OpenAnswer:
            fields = self._leg.fields(attempt, pair.decode)
            to_d = connector.decode_leg(endpoint, fields, pair, attempt.leg_id("d"), None)
            return await self._leg.answered(attempt, to_d, Leg.DECODE)

        def note(action: LegsAction, opened: OpenAnswer, error: BaseException | None) -> None:
            cached_tokens = None if attempt.handoff is None else attempt.handoff.cached_tokens
            if action is LegsAction.NOTE_MOVED and opened.relay is not None and cached_tokens is not None:
                opened.relay.recount(cached_tokens)  # D counts as cached what P sent it
            self._note(attempt, action, error)

        attempt.both = both = TwoLegs(legs, prefilled(), decoded(), note)
        opened = await both.answer()
        return opened if opened is not None else await self._without_p(attempt, legs, found)

    async def _without_p(self, attempt: Attempt, legs: Legs, found: Found) -> OpenAnswer:
        """P has answered, and D's leg, which waited for nothing, has been ended."""
        attempt.both = attempt.handoff = None
        if attempt.answer is not None:
            attempt.answer.close()
            attempt.answer = None
        if attempt.leg is not None:
            self._leg.end(attempt, attempt.leg)
            attempt.leg = None
        if isinstance(found, Finished):
            return _by_prefill(attempt, found)
        return await self._last(attempt, legs, self._leg.plain(attempt, "a"))

    async def _last(self, attempt: Attempt, legs: Legs, leg: LegRequest) -> OpenAnswer:
        """D's, as P's has ended."""
        try:
            opened = await self._leg.answered(attempt, leg, Leg.DECODE)
        except LegError as exc:
            is_unreached = ROWS[Leg.DECODE, exc.phase, exc.cause].handoff is HandoffEffect.RELEASED
            legs.take(LegsEvent.UNREACHED if is_unreached and attempt.handoff is not None else LegsEvent.DECODE_FAILED)
            raise
        for came_to in legs.take(LegsEvent.BEGAN):  # nothing to note where the client has left
            self._note(attempt, came_to)
        return opened

    def _note(self, attempt: Attempt, action: LegsAction, error: BaseException | None = None) -> None:
        """What P's leg came to. An answer has begun, and goes on whatever it is."""
        decision = attempt.decision
        match action:
            case LegsAction.NOTE_MOVED:
                self._handoffs.close(attempt.attempt_id)  # D has begun to answer, so it has the KV
                self._health.prefilled(decision, attempt.asked_s, moved=True)
            case LegsAction.NOTE_UNMOVED:
                self._health.prefilled(decision, attempt.asked_s, moved=False)
            case LegsAction.NOTE_FAILED if isinstance(error, LegError):
                self._health.failed(Leg.PREFILL, error, decision, attempt.asked_s)
                self._metrics.failures.labels(Leg.PREFILL, error.phase, error.cause).inc()
                log.warning("request %s: P's leg failed after D's answer began: %s", attempt.receipt.id, error)
            case _:
                self._health.prefill_left(decision, attempt.asked_s)
                if error is not None and not isinstance(error, asyncio.CancelledError):
                    log.error("request %s: P's leg failed", attempt.receipt.id, exc_info=error)


def _by_prefill(attempt: Attempt, found: Found) -> OpenAnswer:
    """P's answer is all of it, and D is not asked. A stream of it comes in one piece."""
    assert isinstance(found, Finished), "a whole answer"
    request = attempt.request
    attempt.is_finished_on_prefill = True
    reply = ReplyKey(request)
    observer = AnswerObserver(request.endpoint, reply)
    observer.observe_body(found.answer)
    body = finished_body(found.answer, stream=request.stream, usage=request.wants_usage)
    return OpenAnswer(EVENT_STREAM if request.stream else JSON, body, observer, reply, None)
