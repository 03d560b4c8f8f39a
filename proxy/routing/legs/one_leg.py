"""Sends one leg of an attempt, judges what comes back, and notes it in the receipt."""

from __future__ import annotations

from ...admission.auth import SESSION
from ...bodies.body_reader import Body, BodyReader
from ...bodies.body_worker import ReadAnswer
from ...bodies.received import ReceivedBody
from ...bodies.shared_bytes import SharedBytes
from ...config import ProxyConfig
from ...connectors import Connector, plain_leg
from ...connectors.leg import REQUEST_ID, Finished, Handoff, LegRequest, NoHandoff, Pair
from ...errors import LegError, refusal
from ...failures import Leg, Phase
from ...fleet.booking import LegBooking
from ...fleet.view import WorkerView
from ...fleet.worker import Worker
from ...openai.answer import AnswerObserver
from ...openai.body_members import Edited, encoded
from ...openai.edits import edited_body
from ...openai.request import Fields
from ...policy import Route
from ...telemetry.receipts import LegRecord
from ...upstream.answer_checks import check_begun, check_whole, until_begun
from ...upstream.call import Answer, Call, Expiry, Timeouts
from ...upstream.client import Upstream
from ...upstream.relayed_headers import RelayedHeaders
from ...upstream.sidecar import LEGS, legs_told
from ..attempt import Attempt, OpenAnswer
from ..reading_back import Reader
from ..state import State
from .answer_reading import AnswerReading
from .by_sidecar import error_by_prefill, note_legs

SESSION_MEMBER = "session_id"


class OneLeg:
    """What a leg reserves and opens is held by its `Attempt`."""

    def __init__(self, config: ProxyConfig, upstream: Upstream, state: State, bodies: BodyReader) -> None:
        self._state = state
        self._strips = config.encoder_strip
        self._handoffs = state.handoffs
        self._admission = state.admission
        self._metrics = state.metrics
        self._now = state.now
        self._bodies = bodies
        self._session_id = state.engine_caches.session_id
        self._shows_own_key = bool(config.worker_api_key or config.keys_file)
        self._header_rules = RelayedHeaders(config.relay_headers)
        self._upstream = upstream
        self._reader = Reader(state.handles)
        self._handoff_max_age_s = config.handoff_max_age_s
        self._prefill_timeouts = Timeouts(config.connect_timeout_s, config.prefill_timeout_s, config.idle_timeout_s)
        self._stream_timeouts = Timeouts(config.connect_timeout_s, config.first_event_timeout_s, config.idle_timeout_s)
        # The head of an answer that is not streamed comes when the whole answer is ready.
        self._answer_timeouts = Timeouts(config.connect_timeout_s, config.answer_timeout_s, config.idle_timeout_s)

    def fields(self, attempt: Attempt, worker: Worker) -> Fields:
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

    def plain(self, attempt: Attempt, leg_id: str) -> LegRequest:
        """Of the answering worker, which computes what it does not hold."""
        worker = attempt.decision.decode.worker
        return plain_leg(attempt.request.endpoint, self.fields(attempt, worker), attempt.leg_id(leg_id), worker.engine)

    async def prefilled(
        self, attempt: Attempt, connector: Connector, pair: Pair, leg: LegRequest
    ) -> Handoff | Finished | NoHandoff:
        """The leg on P, and what its answer is to D."""
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
            self.free_prefill(attempt.booking)
            self.end(attempt, record)
        if isinstance(found, NoHandoff):
            attempt.receipt.handoff_missing = found.reason
            self._metrics.handoffs_missing.labels(found.reason).inc()
            return found
        if connector.needs_handoff and isinstance(found, Handoff):
            attempt.expiry = Expiry.of(asked_s, self._handoff_max_age_s)
            self._handoffs.open(attempt.attempt_id, self._now())
        if attempt.decision.route is not Route.READBACK:  # P's cache then has it under a name that nobody asks for
            attempt.touches.prefilled(found.cached_tokens)
        return found

    async def answered(self, attempt: Attempt, leg: LegRequest, kind: Leg) -> OpenAnswer:
        """The leg that answers the client: on D, or on R."""
        view = attempt.decision.decode
        record = attempt.leg = self._start_leg(attempt, kind, view, leg)
        attempt.call = Call(view.worker, once=attempt.handoff is not None, expiry=attempt.expiry)
        timeouts = self._stream_timeouts if attempt.request.stream else self._answer_timeouts
        is_by_sidecar = attempt.is_by_sidecar
        if attempt.both is not None or is_by_sidecar:  # D waits for P
            timeouts = timeouts.after(self._prefill_timeouts.first_s)
        reading = AnswerReading(attempt, record)
        try:
            answer = attempt.answer = await self._upstream.ask(
                attempt.call,
                leg.path,
                body=leg.parts,
                headers=self._headers(attempt, leg, view.worker),
                timeouts=timeouts,
                meanwhile=reading.prepare if attempt.both is None else reading.prepare_soon,
            )
            record.status = answer.status
            if is_by_sidecar:
                self.free_prefill(attempt.booking)
                note_legs(attempt, record, legs_told(answer.header(LEGS)), self._state)
            if answer.status != 200:
                raise self._refusal(answer, await answer.body(), attempt, view)
            opened = await self._first_event(attempt, answer, record, reading)
        except BaseException as exc:
            if isinstance(exc, LegError):
                record.fail(exc)
            attempt.booking.computed(self._now())
            raise
        if opened.relay is not None:  # else this leg has ended, and all that it holds is given back next
            attempt.booking.computed(self._now())
        if attempt.encoded is not None:
            attempt.encoded.computed(well=True)
        return opened

    def end(self, attempt: Attempt, record: LegRecord) -> None:
        if record.ended_s is None:  # else its turn has ended, and its receipt says when it did
            record.ended_s = self._now() - attempt.started_s
        self._metrics.legs.observe(record.ended_s - record.started_s, record.kind)

    def free_prefill(self, booking: LegBooking) -> None:
        if booking.holds_prefill:
            booking.free_prefill(self._now())
            self._admission.admit_waiting()

    async def _prefill_body(self, view: WorkerView, leg: LegRequest, attempt: Attempt, record: LegRecord) -> bytes:
        """P's whole answer, which has `prefill_timeout_s` from when the request was sent."""
        answer = await self._upstream.ask(
            Call(view.worker, once=(attempt.both or attempt.handle) is not None),
            leg.path,
            body=leg.parts,
            headers=self._headers(attempt, leg, view.worker),
            timeouts=self._prefill_timeouts,
        )
        try:
            record.status = answer.status
            body = await answer.body()
        finally:
            answer.close()
        if answer.status != 200:
            raise self._refusal(answer, body, attempt, view)
        observer = AnswerObserver(attempt.request.endpoint)
        observer.observe_body(body)
        check_whole(attempt.request.endpoint, observer, view, attempt.redaction)
        return body

    def _headers(self, attempt: Attempt, leg: LegRequest, worker: Worker) -> dict[str, str]:
        headers = {**attempt.headers, **leg.headers}
        if attempt.handle is not None and worker.id == attempt.computes.id:
            return headers  # what it computes is under this leg's salt: nobody else finds it there
        if (name := self._session_id(worker, attempt.history)) is not None:
            headers[SESSION] = name
        return headers

    async def _first_event(
        self, attempt: Attempt, answer: Answer, record: LegRecord, reading: AnswerReading
    ) -> OpenAnswer:
        request, view, reply, observer = attempt.request, attempt.decision.decode, reading.reply, reading.observer
        if not answer.is_event_stream:
            body, edits = await _whole(answer), attempt.edits(record, attempt.redaction(view))
            if isinstance(body, bytes):
                observer.observe_body(body)
                first: bytes | SharedBytes = edited_body(body, edits)
            else:
                how = ReadAnswer(request.endpoint, edits.cached_tokens, attempt.asks_handle, edits.hides)
                first = await self._bodies.answer(body, how, observer, reply)
            check_whole(request.endpoint, observer, view, attempt.redaction)
            record.first_event_s = self._now() - attempt.started_s
            relay = None
        else:
            relay = reading.relay()
            first = await until_begun(request.endpoint, answer, relay, observer, self._stream_timeouts.idle_s)
            check_begun(observer, view, attempt.redaction)
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
        if legs:
            legs.insert(len(legs) - is_beside, record)  # P's before D's, also where D's has begun
        else:
            attempt.receipt.legs = [record]  # with room for no other, as `insert` would leave in every receipt
        return record


async def _whole(answer: Answer) -> Body:
    if (body := answer.at_once()) is not None:
        return body
    received = ReceivedBody()
    async for part in answer.parts():
        received.add(part)
    return received.take()
