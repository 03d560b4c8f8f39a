"""Runs the legs of one decision, in the connector's order, up to the answer's first event.

Nothing goes to the client from here. When `open` returns, the answering worker's status is known and its first event
has come. When it raises, all its legs are closed, and another attempt may follow.
"""

from __future__ import annotations

import asyncio
import logging

from msgspec.structs import replace

from ..admission.auth import SESSION
from ..bodies.body_reader import BodyReader
from ..bodies.body_worker import ReadAnswer
from ..bodies.received import ReceivedBody
from ..bodies.shared_bytes import SharedBytes
from ..config import ProxyConfig
from ..connectors import CONNECTORS, Connector, plain_leg, writes_into_decode
from ..connectors.leg import REQUEST_ID, Finished, Handoff, LegOrder, LegRequest, NoHandoff, Pair
from ..connectors.nixl import READS_BACK
from ..encoders.legs import EncoderLegs
from ..errors import LegError, refusal
from ..failures import Cause, Leg, Phase
from ..fleet.booking import LegBooking
from ..fleet.view import WorkerView
from ..fleet.worker import Worker
from ..openai.answer import AnswerObserver
from ..openai.body_members import Edited, encoded
from ..openai.edits import edited_body, finished_body
from ..openai.reply_key import ReplyKey
from ..openai.request import Fields
from ..openai.stream_relay import StreamRelay
from ..policy import Route
from ..telemetry.receipts import LegRecord
from ..upstream.answer_checks import check_begun, check_whole, until_begun
from ..upstream.call import Answer, Call, Expiry, Timeouts
from ..upstream.client import Upstream
from ..upstream.relayed_headers import RelayedHeaders
from ..upstream.sidecar import LEGS, legs_told
from ..upstream.two_legs import NotHandedOver, TwoLegs
from .attempt import Attempt, OpenAnswer
from .by_sidecar import error_by_prefill, note_legs, sidecar_leg
from .handoff_release import HandoffRelease
from .reading_back import Reader
from .state import State

log = logging.getLogger(__name__)

SESSION_MEMBER = "session_id"
JSON, EVENT_STREAM = "application/json", "text/event-stream; charset=utf-8"


class Dispatcher:
    """Runs legs; what it reserves and opens is held by the `Attempt`."""

    def __init__(
        self,
        config: ProxyConfig,
        upstream: Upstream,
        handoff_release: HandoffRelease,
        state: State,
        bodies: BodyReader,
    ) -> None:
        self._encoders = EncoderLegs(
            config, upstream, state.encoders, state.registry, state.health, state.metrics, state.now
        )
        self._state = state
        self._strips = config.encoder_strip
        self._ledger = state.ledger
        self._admission = state.admission
        self._health = state.health
        self._metrics = state.metrics
        self._now = state.now
        self._bodies = bodies
        self._session_id = state.engine_caches.session_id
        self._shows_own_key = bool(config.worker_api_key or config.keys_file)
        self._header_rules = RelayedHeaders(config.relay_headers)
        self._upstream = upstream
        self._handles, self._reader = state.handles, Reader(state.handles)
        self._handoff_release = handoff_release
        self._handoff_max_age_s = config.handoff_max_age_s
        self._prefill_timeouts = Timeouts(config.connect_timeout_s, config.prefill_timeout_s, config.idle_timeout_s)
        self._stream_timeouts = Timeouts(config.connect_timeout_s, config.first_event_timeout_s, config.idle_timeout_s)
        # The head of an answer that is not streamed comes when the whole answer is ready.
        self._answer_timeouts = Timeouts(config.connect_timeout_s, config.answer_timeout_s, config.idle_timeout_s)

    async def open(self, attempt: Attempt) -> OpenAnswer:
        """The answer at its first event; LegError, with everything closed, where a leg fails."""
        try:
            attempt.booking.reserve(self._now())
            attempt.touches.sent()
            attempt.on_close = self._closed
            # A sidecar lets through nothing that encoders tell.
            if attempt.request.media and not attempt.decision.decode.worker.has_sidecar:
                await self._encode(attempt)
            if attempt.is_by_sidecar:
                fields = self._fields(attempt, attempt.decision.decode.worker)
                return await self._answered(attempt, sidecar_leg(attempt, fields), Leg.DECODE)
            if attempt.decision.prefill is not None:
                connector = CONNECTORS[attempt.decision.prefill.worker.connector]
                opening = (self._together if connector.order.is_joint else self._split)(attempt, connector)
                if connector.order.is_joint and not writes_into_decode(connector):
                    return await opening
                return await self._handoff_release.shielded(opening, attempt)
            return await self._alone(attempt, attempt.answering_leg)
        except BaseException:
            if not attempt.is_left:  # else `HandoffRelease` closes it
                attempt.close()
            raise

    async def examine(self, exc: LegError, worker: Worker) -> LegError:
        """A leg's failure, once it is known whether its worker is dead."""
        return await self._upstream.examine(exc, worker)

    async def _encode(self, attempt: Attempt) -> None:
        attempt.encoded = encoded = await self._encoders.encode(attempt.encoder_turn)
        attempt.receipt.note_encoders(encoded.record)
        attempt.asked_s = self._now()  # what was predicted is without encoders
        if encoded.is_late and attempt.foreseen is not None:
            attempt.foreseen = attempt.foreseen.without_ttft

    def _fields(self, attempt: Attempt, worker: Worker) -> Fields:
        """The request's members. A name of the session in them would count before the one in the head."""
        fields = attempt.request.fields
        if attempt.encoded is not None:
            computes = worker.id == attempt.computes.id
            # What was sent without its data cannot be made anew: after a failure, and to a D that may have to compute,
            # all is sent.
            has_failed = any(leg.error is not None for leg in attempt.receipt.legs)
            strips = self._strips and not has_failed and (computes or attempt.decode_gets_all)
            fields = attempt.encoded.items.fields(attempt.request, fields, computes=computes, strips=strips)
        if SESSION_MEMBER not in fields or (name := self._session_id(worker, attempt.history)) is None:
            return fields
        return Edited.of(fields, {SESSION_MEMBER: encoded(name)})

    def _headers(self, attempt: Attempt, leg: LegRequest, worker: Worker) -> dict[str, str]:
        headers = {**attempt.headers, **leg.headers}
        if attempt.handle is not None and worker.id == attempt.computes.id:
            return headers  # what it computes is under this leg's salt: nobody else finds it there
        if (name := self._session_id(worker, attempt.history)) is not None:
            headers[SESSION] = name
        return headers

    def _closed(self, attempt: Attempt) -> None:
        if attempt.leg is not None:
            self._end_leg(attempt, attempt.leg)
        if attempt.encoded is not None:
            attempt.encoded.computed(well=False)
        self._free_prefill(attempt.booking)
        attempt.booking.release(self._now())
        attempt.touches.close()

    def release(self, attempt: Attempt) -> None:
        """Has another D pull the KV of a handoff whose own D was never reached."""
        self._handoff_release.release(attempt)

    def _free_prefill(self, booking: LegBooking) -> None:
        if booking.holds_prefill:
            booking.free_prefill(self._now())
            self._admission.admit_waiting()

    async def _alone(self, attempt: Attempt, kind: Leg, leg_id: str = "") -> OpenAnswer:
        """The answering worker computes what it does not hold."""
        worker = attempt.decision.decode.worker
        fields = self._fields(attempt, worker)
        leg = plain_leg(attempt.request.endpoint, fields, attempt.leg_id(leg_id or kind[0]), worker.engine)
        return await self._answered(attempt, leg, kind)

    async def _together(self, attempt: Attempt, connector: Connector) -> OpenAnswer:
        """Both legs at once. P's counts may come after D's first event; P's KV cannot."""
        decision, endpoint = attempt.decision, attempt.request.endpoint
        assert decision.prefill is not None, "a SPLIT has a P"
        pair = Pair(decision.prefill.worker, decision.decode.worker, connector.new_key())
        attempt.handoff = untold = Handoff.untold(pair)
        to_p = connector.prefill_leg(endpoint, self._fields(attempt, pair.prefill), pair, attempt.leg_id("p"))
        to_d = connector.decode_leg(endpoint, self._fields(attempt, pair.decode), pair, attempt.leg_id("d"), None)
        waits = connector.order is LegOrder.D_FIRST

        async def prefilled() -> None:
            try:
                found = await self._prefilled(attempt, connector, pair, to_p)
            except LegError as exc:
                # It may be D that hangs.
                exc.is_of_pair = waits and (exc.phase, exc.cause) == (Phase.SENT, Cause.TIMEOUT)
                raise
            if not isinstance(found, Handoff):
                raise NotHandedOver
            attempt.handoff = replace(found, params=untold.params)

        attempt.both = both = TwoLegs(prefilled(), self._answered(attempt, to_d, Leg.DECODE), decode_first=waits)
        try:
            opened = await both.answer()
        except NotHandedOver:
            return await self._not_handed_over(attempt)
        both.when_prefilled(lambda error: self._beside(attempt, opened, error))
        return opened

    async def _not_handed_over(self, attempt: Attempt) -> OpenAnswer:
        """P has answered, but D's leg, which has ended, waited for nothing: D computes the prompt itself."""
        attempt.both = attempt.handoff = None
        if attempt.answer is not None:
            attempt.answer.close()
            attempt.answer = None
        if attempt.leg is not None:
            self._end_leg(attempt, attempt.leg)
        if attempt.is_left:
            raise asyncio.CancelledError
        return await self._alone(attempt, Leg.DECODE, "a")

    def _beside(self, attempt: Attempt, opened: OpenAnswer, error: BaseException | None) -> None:
        """P's leg has ended, and D answers: whatever became of P, that goes on. D counts as cached what P sent it."""
        decision, handoff = attempt.decision, attempt.handoff
        if error is None:
            self._health.prefilled(decision, moved=True)
            if opened.relay is not None and handoff is not None and handoff.cached_tokens is not None:
                opened.relay.recount(handoff.cached_tokens)
        elif isinstance(error, LegError):
            self._health.failed(Leg.PREFILL, error, decision, attempt.asked_s)
            self._metrics.failures.labels(Leg.PREFILL, error.phase, error.cause).inc()
            log.warning("request %s: P's leg failed after D's answer began: %s", attempt.receipt.id, error)
        elif isinstance(error, NotHandedOver):  # D did without
            self._health.prefilled(decision, moved=False)
        else:
            self._health.prefill_left(decision)
            if not isinstance(error, asyncio.CancelledError):
                log.error("request %s: P's leg failed", attempt.receipt.id, exc_info=error)

    async def _split(self, attempt: Attempt, connector: Connector) -> OpenAnswer:
        decision, request = attempt.decision, attempt.request
        assert decision.prefill is not None, "a SPLIT has a P"
        if decision.route is Route.READBACK:  # without a handle P computes all of the prompt
            attempt.handle = self._handles.take(attempt.history)
        pair = Pair(decision.prefill.worker, decision.decode.worker, connector.new_key(), attempt.handle)
        fields = self._fields(attempt, pair.prefill)
        prefill = connector.prefill_leg(request.endpoint, fields, pair, attempt.leg_id("p"))
        found = await self._prefilled(attempt, connector, pair, prefill)
        if isinstance(found, Finished):
            return self._finished(attempt, found)
        attempt.handoff = found
        if attempt.is_left:
            raise asyncio.CancelledError  # `HandoffRelease` frees the handoff
        fields = self._fields(attempt, pair.decode)
        if READS_BACK in pair.decode.coordinates:
            fields = self._reader.asking(attempt, fields)
        leg = connector.decode_leg(request.endpoint, fields, pair, attempt.leg_id("d"), attempt.handoff)
        opened = await self._answered(attempt, leg, Leg.DECODE)
        self._ledger.close(attempt.leg_id("p"))  # D has begun to answer, so it has the KV
        return opened

    async def _prefilled(
        self, attempt: Attempt, connector: Connector, pair: Pair, leg: LegRequest
    ) -> Handoff | Finished | None:
        view = attempt.decision.prefill
        assert view is not None, "a SPLIT has a P"
        record = self._start_leg(attempt, Leg.PREFILL, view, leg)
        asked_s = self._upstream.uptime()
        try:
            body = await self._prefill_body(view, leg, attempt, record)
            found = connector.handoff(body, pair)
            if attempt.handle is not None:
                found = self._reader.judged(attempt.handle, found)
        except LegError as exc:
            record.fail(exc)
            found = self._reader.after(exc, attempt.handle)
        finally:
            self._free_prefill(attempt.booking)
            self._end_leg(attempt, record)
        if isinstance(found, NoHandoff):
            attempt.receipt.handoff_missing = found.reason
            self._metrics.handoffs_missing.labels(found.reason).inc()
            return None
        if connector.needs_handoff and isinstance(found, Handoff):
            attempt.expiry = Expiry.of(asked_s, self._handoff_max_age_s)
            self._ledger.open(attempt.leg_id("p"), self._now())
        if attempt.decision.route is not Route.READBACK:  # P's cache then has it under a name that nobody asks for
            attempt.touches.prefilled(found.cached_tokens)
        return found

    def _finished(self, attempt: Attempt, found: Finished) -> OpenAnswer:
        """P's answer is all of it, and D is not asked. A stream of it comes in one piece."""
        request = attempt.request
        attempt.is_finished_on_prefill = True
        reply = ReplyKey(request)
        observer = AnswerObserver(request.endpoint, reply)
        observer.observe_body(found.answer)
        body = finished_body(found.answer, stream=request.stream, usage=request.wants_usage)
        return OpenAnswer(EVENT_STREAM if request.stream else JSON, body, observer, reply, None)

    async def _prefill_body(self, view: WorkerView, leg: LegRequest, attempt: Attempt, record: LegRecord) -> bytes:
        """P's whole answer, within one time-out for all of it."""
        call, timeouts = Call(view.worker, once=(attempt.both or attempt.handle) is not None), self._prefill_timeouts
        try:
            async with (
                asyncio.timeout(timeouts.connect_s + timeouts.first_s),
                self._upstream.answer(
                    call, leg.path, body=leg.parts, headers=self._headers(attempt, leg, view.worker), timeouts=timeouts
                ) as answer,
            ):
                record.status = answer.status
                body = await answer.body()
                if answer.status != 200:
                    raise self._refusal(answer, body, attempt, view)
        except TimeoutError as exc:
            raise call.error("the prompt was not computed in time", Cause.TIMEOUT) from exc
        observer = AnswerObserver(attempt.request.endpoint)
        observer.observe_body(body)
        check_whole(attempt.request.endpoint, observer, view, attempt.redaction(view))
        return body

    async def _answered(self, attempt: Attempt, leg: LegRequest, kind: Leg) -> OpenAnswer:
        """The leg that answers the client: on D, or on R."""
        view = attempt.decision.decode
        record = attempt.leg = self._start_leg(attempt, kind, view, leg)
        attempt.call = Call(view.worker, once=attempt.handoff is not None, expiry=attempt.expiry)
        timeouts = self._stream_timeouts if attempt.request.stream else self._answer_timeouts
        if attempt.both is not None or attempt.is_by_sidecar:  # D waits for P
            timeouts = timeouts.after(self._prefill_timeouts.first_s)
        try:
            headers = self._headers(attempt, leg, view.worker)
            answer = attempt.answer = await self._upstream.ask(
                attempt.call, leg.path, body=leg.parts, headers=headers, timeouts=timeouts
            )
            record.status = answer.status
            if attempt.is_by_sidecar:
                self._free_prefill(attempt.booking)
                note_legs(attempt, record, legs_told(answer.header(LEGS)), self._state)
            if answer.status != 200:
                raise self._refusal(answer, await answer.body(), attempt, view)
            opened = await self._first_event(attempt, answer, record)
        except LegError as exc:
            record.fail(exc)
            raise
        finally:
            attempt.booking.computed(self._now())
        if not attempt.is_finished_on_prefill:
            attempt.touches.answering()
        if attempt.encoded is not None:
            attempt.encoded.computed(well=True)
        return opened

    async def _first_event(self, attempt: Attempt, answer: Answer, record: LegRecord) -> OpenAnswer:
        request, view = attempt.request, attempt.decision.decode
        reply = ReplyKey(request)
        observer = AnswerObserver(request.endpoint, reply, reads_handle=attempt.asks_handle)
        redaction = attempt.redaction(view)
        if not answer.is_event_stream:
            received = ReceivedBody()
            async for part in answer.parts():
                received.add(part)
            body, edits = received.take(), attempt.edits(record, redaction)
            if isinstance(body, bytes):
                observer.observe_body(body)
                first: bytes | SharedBytes = edited_body(body, edits)
            else:
                how = ReadAnswer(request.endpoint, edits.cached_tokens, attempt.asks_handle, edits.hides)
                first = await self._bodies.answer(body, how, observer, reply)
            check_whole(request.endpoint, observer, view, redaction)
            record.first_event_s = self._now() - attempt.started_s
            relay = None
        else:
            relay = StreamRelay(request.endpoint, attempt.edits(record, redaction), observer)
            first = await until_begun(request.endpoint, answer, relay, observer, self._stream_timeouts.idle_s)
            check_begun(observer, view, redaction)
            record.first_event_s = self._now() - attempt.started_s
        headers = answer.relayed(self._header_rules)
        return OpenAnswer(answer.content_type, first, observer, reply, relay, headers)

    def _refusal(self, answer: Answer, body: bytes, attempt: Attempt, view: WorkerView) -> LegError:
        """A worker's error as ours; only its status where the text names this worker or its P."""
        if (lost := error_by_prefill(attempt, legs_told(answer.header(LEGS)))) is not None:
            return lost
        if attempt.redaction(view).applies_to(body):
            body = b""
        # A refused key of the proxy's own is not the client's fault, nor is a worker that read too slowly (408).
        is_own = answer.status == 408 or (self._shows_own_key and answer.status in (401, 403))
        return refusal(
            500 if is_own else answer.status,
            body,
            worker=view.id,
            phase=Phase.HEADERS,
            retry_after_s=answer.retry_after_s,
        )

    def _start_leg(self, attempt: Attempt, kind: Leg, view: WorkerView, leg: LegRequest) -> LegRecord:
        record = LegRecord(
            kind=kind,
            id=leg.headers[REQUEST_ID],
            worker=view.name,
            address=view.worker.address,
            started_s=self._now() - attempt.started_s,
        )
        legs, is_beside = attempt.receipt.legs, kind is Leg.PREFILL and attempt.leg is not None
        legs.insert(len(legs) - is_beside, record)  # P's before D's, also where D's has begun
        return record

    def _end_leg(self, attempt: Attempt, record: LegRecord) -> None:
        record.ended_s = self._now() - attempt.started_s
        self._metrics.legs.observe(record.ended_s - record.started_s, record.kind)
