"""Runs the legs of one decision, in the connector's order, up to the answer's first event.

Nothing goes to the client from here. When `open` returns, the answering worker's status is known and its first event
has come. When it raises, all its legs are closed, and another attempt may follow.
"""

from __future__ import annotations

import asyncio

import msgspec

from ..admission.auth import SESSION
from ..bodies.body_reader import BodyReader
from ..bodies.body_worker import ReadAnswer
from ..bodies.received import ReceivedBody
from ..bodies.shared_bytes import SharedBytes
from ..config import ProxyConfig
from ..connectors import CONNECTORS, Connector, plain_leg
from ..connectors.leg import REQUEST_ID, Handoff, LegRequest, NoHandoff, Pair
from ..errors import LegError, refusal
from ..failures import Cause, Leg, Phase
from ..fleet.booking import LegBooking
from ..fleet.view import WorkerView
from ..fleet.worker import Worker
from ..openai.answer import AnswerObserver, AnswerSummary
from ..openai.body_members import Edited, encoded
from ..openai.edits import Redaction, edited_body
from ..openai.reply_key import ReplyKey
from ..openai.request import CHOOSING, Endpoint, Fields
from ..openai.stream_relay import Edits, StreamRelay
from ..telemetry.receipts import LegRecord
from ..upstream.call import Answer, Call, Expiry, Timeouts
from ..upstream.client import Upstream
from ..upstream.relayed_headers import RelayedHeaders
from .attempt import ABORTED, Attempt, OpenAnswer
from .handoff_release import HandoffRelease
from .state import State

SESSION_MEMBER = "session_id"
OPENING_LIMIT_BYTES = 8 * 1024 * 1024  # of a stream before its first event; a single event of 4 MiB is in pieces


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
        self._ledger = state.ledger
        self._admission = state.admission
        self._metrics = state.metrics
        self._now = state.now
        self._bodies = bodies
        self._session_id = state.engine_caches.session_id
        self._shows_own_key = bool(config.worker_api_key or config.keys_file)
        self._header_rules = RelayedHeaders(config.relay_headers)
        self._upstream = upstream
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
            if attempt.decision.prefill is not None:
                return await self._handoff_release.shielded(self._split(attempt), attempt)
            kind = attempt.answering_leg
            fields = self._fields(attempt, attempt.decision.decode.worker)
            leg = plain_leg(attempt.request.endpoint, fields, attempt.leg_id(kind[0]))
            return await self._answered(attempt, leg, kind)
        except BaseException:
            if not attempt.is_left:  # else `HandoffRelease` closes it
                attempt.close()
            raise

    async def examine(self, exc: LegError, worker: Worker) -> LegError:
        """A leg's failure, once it is known whether its worker is dead."""
        return await self._upstream.examine(exc, worker)

    def _fields(self, attempt: Attempt, worker: Worker) -> Fields:
        """The request's members. A name of the session in them would count before the one in the head."""
        fields = attempt.request.fields
        if SESSION_MEMBER not in fields or (name := self._session_id(worker, attempt.history)) is None:
            return fields
        return Edited.of(fields, {SESSION_MEMBER: encoded(name)})

    def _headers(self, attempt: Attempt, leg: LegRequest, worker: Worker) -> dict[str, str]:
        headers = {**attempt.headers, **leg.headers}
        if (name := self._session_id(worker, attempt.history)) is not None:
            headers[SESSION] = name
        return headers

    def _closed(self, attempt: Attempt) -> None:
        if attempt.leg is not None:
            self._end_leg(attempt, attempt.leg)
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

    async def _split(self, attempt: Attempt) -> OpenAnswer:
        decision, request = attempt.decision, attempt.request
        assert decision.prefill is not None, "a SPLIT has a P"
        connector = CONNECTORS[decision.prefill.worker.connector]
        pair = Pair(decision.prefill.worker, decision.decode.worker)
        fields = self._fields(attempt, pair.prefill)
        prefill = connector.prefill_leg(request.endpoint, fields, pair, attempt.leg_id("p"))
        attempt.handoff = await self._prefilled(attempt, connector, pair, prefill)
        if attempt.is_left:
            raise asyncio.CancelledError  # `HandoffRelease` frees the handoff
        leg_id = prefill.headers[REQUEST_ID] if connector.shares_request_id else attempt.leg_id("d")
        fields = self._fields(attempt, pair.decode)
        leg = connector.decode_leg(request.endpoint, fields, pair, leg_id, attempt.handoff)
        opened = await self._answered(attempt, leg, Leg.DECODE)
        self._ledger.close(attempt.leg_id("p"))  # D has begun to answer, so it has the KV
        return opened

    async def _prefilled(self, attempt: Attempt, connector: Connector, pair: Pair, leg: LegRequest) -> Handoff | None:
        view = attempt.decision.prefill
        assert view is not None, "a SPLIT has a P"
        record = self._start_leg(attempt, Leg.PREFILL, view, leg)
        asked_s = self._upstream.uptime()
        try:
            body = await self._prefill_body(view, leg, attempt, record)
            found = connector.handoff(body, pair)
        except LegError as exc:
            record.fail(exc)
            raise
        finally:
            self._free_prefill(attempt.booking)
            self._end_leg(attempt, record)
        if isinstance(found, NoHandoff):
            attempt.receipt.handoff_missing = found.reason
            self._metrics.handoffs_missing.labels(found.reason).inc()
            return None
        if connector.needs_handoff:
            attempt.expiry = Expiry.of(asked_s, self._handoff_max_age_s)
            self._ledger.open(attempt.leg_id("p"), self._now())
        attempt.touches.prefilled(found.cached_tokens)
        return found

    async def _prefill_body(self, view: WorkerView, leg: LegRequest, attempt: Attempt, record: LegRecord) -> bytes:
        """P's whole answer, within one time-out for all of it."""
        call, timeouts = Call(view.worker), self._prefill_timeouts
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
        _check_whole(attempt.request.endpoint, observer, view, _redaction(view, None))
        return body

    async def _answered(self, attempt: Attempt, leg: LegRequest, kind: Leg) -> OpenAnswer:
        """The leg that answers the client: on D, or on R."""
        view = attempt.decision.decode
        record = attempt.leg = self._start_leg(attempt, kind, view, leg)
        attempt.call = Call(view.worker, once=attempt.handoff is not None, expiry=attempt.expiry)
        timeouts = self._stream_timeouts if attempt.request.stream else self._answer_timeouts
        try:
            headers = self._headers(attempt, leg, view.worker)
            answer = attempt.answer = await self._upstream.ask(
                attempt.call, leg.path, body=leg.parts, headers=headers, timeouts=timeouts
            )
            record.status = answer.status
            if answer.status != 200:
                raise self._refusal(answer, await answer.body(), attempt, view)
            opened = await self._first_event(attempt, answer, record)
        except LegError as exc:
            record.fail(exc)
            raise
        finally:
            attempt.booking.computed(self._now())
        attempt.touches.answering()
        return opened

    async def _first_event(self, attempt: Attempt, answer: Answer, record: LegRecord) -> OpenAnswer:
        request, handoff, view = attempt.request, attempt.handoff, attempt.decision.decode
        reply = ReplyKey(request)
        observer = AnswerObserver(request.endpoint, reply)
        hide_usage = not request.wants_usage and request.endpoint in CHOOSING
        redaction = _redaction(view, handoff)
        edits = Edits(hide_usage, handoff.cached_tokens if handoff else None, redaction)
        if not answer.is_event_stream:
            received = ReceivedBody()
            async for part in answer.parts():
                received.add(part)
            body = received.take()
            if isinstance(body, bytes):
                observer.observe_body(body)
                first: bytes | SharedBytes = edited_body(body, edits)
            else:
                how = ReadAnswer(endpoint=request.endpoint, cached_tokens=edits.cached_tokens)
                first = await self._bodies.answer(body, how, observer, reply)
            _check_whole(request.endpoint, observer, view, redaction)
            record.first_event_s = self._now() - attempt.started_s
            relay = None
        else:
            relay = StreamRelay(request.endpoint, edits, observer)
            first = await self._until_first_event(answer, relay, observer, request.endpoint)
            _check_begun(observer, view, redaction)
            record.first_event_s = self._now() - attempt.started_s
        headers = answer.relayed(self._header_rules)
        return OpenAnswer(answer.content_type, first, observer, reply, relay, handoff, headers)

    async def _until_first_event(
        self, answer: Answer, relay: StreamRelay, observer: AnswerObserver, endpoint: Endpoint
    ) -> bytes:
        """The client's first bytes."""
        parts, events, held_bytes = list[bytes](), 0, 0
        now = asyncio.get_running_loop().time
        # One limit for all reads: a worker that only sends comments has not answered.
        by_s = now() + self._stream_timeouts.first_s
        while not _has_begun(endpoint, observer):
            chunk = await answer.chunk(by_s=by_s)
            if not chunk:
                raise answer.failure("the worker ended its answer before it began", Cause.RESET)
            parts.append(relay.feed(chunk))
            held_bytes += len(parts[-1])
            if observer.summary.events == 0 and held_bytes > OPENING_LIMIT_BYTES:
                raise answer.failure("the worker sends only comments", Cause.MALFORMED)
            if events == 0 < observer.summary.events:
                events = observer.summary.events
                by_s = now() + self._stream_timeouts.idle_s
        return b"".join(parts)

    def _refusal(self, answer: Answer, body: bytes, attempt: Attempt, view: WorkerView) -> LegError:
        """A worker's error as ours; only its status where the text names this worker or its P."""
        if _redaction(view, attempt.handoff).applies_to(body):
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
        attempt.receipt.legs.append(record)
        return record

    def _end_leg(self, attempt: Attempt, record: LegRecord) -> None:
        record.ended_s = self._now() - attempt.started_s
        self._metrics.legs.observe(record.ended_s - record.started_s, record.kind)


def _redaction(view: WorkerView, handoff: Handoff | None) -> Redaction:
    return Redaction(view.worker.address, () if handoff is None else handoff.params.values())


def _has_begun(endpoint: Endpoint, observer: AnswerObserver) -> bool:
    """Whether the answer has begun, so that it goes to the client. The opening event of a stream is no answer yet."""
    summary = observer.summary
    if summary.first_token_seen or summary.ended or summary.error is not None or summary.undecodable:
        return True
    # Chat opens with the role; any event after it, even an empty delta, comes from the model. If that event ends the
    # answer, the usage after it tells whether there was a token.
    is_open = summary.events > 1 and summary.finish_reason is None
    return endpoint in CHOOSING and is_open


def _check_begun(observer: AnswerObserver, view: WorkerView, redaction: Redaction) -> None:
    """LegError for a stream that begins with an error, with something that is no event, or with an abort."""
    summary = observer.summary
    if summary.first_token_seen:
        return
    if summary.error is not None:
        raise _refused(summary.error, view, redaction)
    if summary.undecodable or _was_aborted(summary) or (summary.ended and not summary.events):
        raise _malformed(view)


def _check_whole(endpoint: Endpoint, observer: AnswerObserver, view: WorkerView, redaction: Redaction) -> None:
    """LegError for a 200 without an answer: not JSON, empty, an error, or aborted by the engine."""
    summary = observer.summary
    if summary.error is not None:
        raise _refused(summary.error, view, redaction)
    # A response that is computed in the background has only an id yet.
    is_queued = endpoint is Endpoint.RESPONSES and summary.response_id is not None and summary.finish_reason is None
    is_empty = not summary.first_token_seen and summary.finish_reason is None
    # The client has seen nothing, so an answer that the engine aborted half-way is tried again too.
    if summary.undecodable or _was_aborted(summary) or (is_empty and not is_queued):
        raise _malformed(view)


def _was_aborted(summary: AnswerSummary) -> bool:
    """Whether the engine aborted. Messages and Responses report a normal end then, but count no token, and a model that
    has nothing to say still generates its end of turn."""
    return summary.finish_reason == ABORTED or (summary.completion_tokens == 0 and not summary.first_token_seen)


def _refused(error: bytes, view: WorkerView, redaction: Redaction) -> LegError:
    told = b"" if redaction.applies_to(error) else error
    return refusal(_error_status(error), told, worker=view.id, phase=Phase.FIRST_EVENT)


def _malformed(view: WorkerView) -> LegError:
    message = "the worker's 200 holds no answer"
    return LegError(message, worker=view.id, phase=Phase.FIRST_EVENT, cause=Cause.MALFORMED)


def _error_status(body: bytes) -> int:
    """The HTTP status in an error event, 500 where it has none."""
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return 500
    return code if isinstance(code, int) and 400 <= code < 600 else 500
