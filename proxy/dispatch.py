"""Runs one decision: the legs in the connector's order, up to the answer's first event.

Nothing goes to the client from here. When `open` returns, the answering worker's status is known and its first event
is at hand; when it raises, whatever it had asked for is closed and may be tried elsewhere.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from .answers import AnswerObserver
from .config import ProxyConfig
from .connectors import CONNECTORS, Connector, plain_leg
from .edits import edited_body
from .errors import AnswerTimeout, LegError, WorkerRefused, WorkerTimeout, WorkerUnreachable
from .legs import REQUEST_ID, Handoff, LegRequest, NoHandoff, Pair
from .policy import Decision, Route
from .receipts import LegRecord, Receipt
from .relay import Edits, StreamRelay
from .replies import ReplyKey
from .state import State
from .turns import Endpoint, Request
from .upstream import Answer, Timeouts, Upstream
from .views import WorkerView

ABORTED = "abort"  # the finish reason of an engine that gave up


@dataclass(slots=True, kw_only=True)
class Running:
    """One attempt at a turn and all it holds; `close` gives everything back and may be called at any time, twice."""

    request: Request
    decision: Decision
    receipt: Receipt
    headers: Mapping[str, str]  # what every leg carries: authorization, content type, tracing
    reply: ReplyKey
    started_s: float
    attempt_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    answer: Answer | None = None
    releases: list[Callable[[], None]] = field(default_factory=list)

    def close(self) -> None:
        if self.answer is not None:
            self.answer.close()
            self.answer = None
        while self.releases:
            self.releases.pop()()

    def leg_id(self, kind: str) -> str:
        """Unique, whatever ids clients send: engines and P2pNccl tell requests apart by it."""
        return f"{self.attempt_id}-{kind}"


@dataclass(slots=True)
class Opened:
    """An answer whose first event is here: for a stream the relay and its first bytes, else the whole body."""

    content_type: str
    first: bytes
    observer: AnswerObserver
    relay: StreamRelay | None  # None: `first` is all of it
    handoff: Handoff | None


class Dispatcher:
    """Runs legs; what it reserves and opens is in the `Running` it is given."""

    def __init__(self, config: ProxyConfig, state: State, upstream: Upstream) -> None:
        self._registry = state.registry
        self._ledger = state.ledger
        self._metrics = state.metrics
        self._now = state.now
        self._upstream = upstream
        self._prefill_timeouts = Timeouts(config.connect_timeout_s, config.prefill_timeout_s, config.idle_timeout_s)
        self._stream_timeouts = Timeouts(config.connect_timeout_s, config.first_event_timeout_s, config.idle_timeout_s)
        # The head of an answer that is not streamed comes when all of it is there.
        self._answer_timeouts = Timeouts(config.connect_timeout_s, config.answer_timeout_s, config.idle_timeout_s)

    async def open(self, running: Running) -> Opened:
        """The decision's answer at its first event; LegError, with everything closed, where a leg fails."""
        try:
            if running.decision.route is not Route.SPLIT:
                kind = "replica" if running.decision.route is Route.REPLICA else "local"
                leg = plain_leg(running.request.endpoint, running.request.fields, running.leg_id(kind[0]))
                return await self._decode(running, leg, kind, None)
            return await self._split(running)
        except BaseException:
            running.close()
            raise

    async def _split(self, running: Running) -> Opened:
        decision, request = running.decision, running.request
        assert decision.prefill is not None, "a SPLIT has a P"
        connector = CONNECTORS[decision.prefill.worker.connector]
        pair = Pair(decision.prefill.worker, decision.decode.worker)
        prefill = connector.prefill_leg(request.endpoint, request.fields, pair, running.leg_id("p"))
        handoff = await self._prefill(running, connector, pair, prefill)
        leg_id = prefill.headers[REQUEST_ID] if connector.shares_request_id else running.leg_id("d")
        leg = connector.decode_leg(request.endpoint, request.fields, pair, leg_id, handoff)
        return await self._decode(running, leg, "decode", handoff)

    async def _prefill(self, running: Running, connector: Connector, pair: Pair, leg: LegRequest) -> Handoff | None:
        view = running.decision.prefill
        assert view is not None, "a SPLIT has a P"
        record = self._start_leg(running, "prefill", view)
        tokens = running.receipt.estimated_prompt_tokens
        self._registry.reserve(view.id, tokens)
        try:
            body = await self._whole_answer(view, leg, running.headers)
            record.status = 200
        except LegError as exc:
            self._fail_leg(record, exc)
            raise
        finally:
            self._registry.prefilled(view.id, tokens)
            self._registry.release(view.id)
            self._end_leg(running, record)
        found = connector.handoff(body, pair)
        if isinstance(found, NoHandoff):
            running.receipt.handoff_missing = found.reason
            self._metrics.handoffs_missing.labels(found.reason).inc()
            return None
        if connector.needs_handoff:
            self._ledger.open(running.leg_id("p"), self._now())
        self._registry.wrote(view.id, max(0, tokens - (found.cached_tokens or 0)))
        return found

    async def _whole_answer(self, view: WorkerView, leg: LegRequest, headers: Mapping[str, str]) -> bytes:
        """A prefill leg's body, within its time-out as a whole."""
        try:
            async with (
                asyncio.timeout(self._prefill_timeouts.connect_s + self._prefill_timeouts.first_s),
                self._upstream.answer(
                    view.worker.address,
                    leg.path,
                    body=leg.body,
                    headers={**headers, **leg.headers},
                    timeouts=self._prefill_timeouts,
                ) as answer,
            ):
                body = await answer.body()
                if answer.status != 200:
                    raise WorkerRefused(answer.status, body, worker=view.id)
                return body
        except TimeoutError as exc:
            raise WorkerTimeout("the prompt was not computed in time", worker=view.id) from exc

    async def _decode(self, running: Running, leg: LegRequest, kind: str, handoff: Handoff | None) -> Opened:
        """The leg that answers the client: on D, or on R."""
        view = running.decision.decode
        record = self._start_leg(running, kind, view)
        tokens = 0 if kind == "decode" else running.receipt.estimated_new_tokens
        self._registry.reserve(view.id, tokens)
        running.releases.append(lambda: self._end_leg(running, record))
        running.releases.append(lambda: self._registry.release(view.id))
        was_asked = True
        try:
            running.answer = await self._upstream.ask(
                view.worker.address,
                leg.path,
                body=leg.body,
                headers={**running.headers, **leg.headers},
                timeouts=self._stream_timeouts if running.request.stream else self._answer_timeouts,
            )
            record.status = running.answer.status
            if running.answer.status != 200:
                raise WorkerRefused(running.answer.status, await running.answer.body(), worker=view.id)
            opened = await self._first_event(running, running.answer, record, handoff)
        except LegError as exc:
            self._fail_leg(record, exc)
            was_asked = not isinstance(exc, WorkerUnreachable)
            raise _blamed(exc, running, handoff) from exc
        finally:
            self._registry.prefilled(view.id, tokens)
            if was_asked:
                # A D that was asked has P free the blocks, also when it refuses or is told to stop.
                self._ledger.close(running.leg_id("p"))
        # The prompt's KV is on the worker from here on, whatever becomes of its answer.
        self._registry.wrote(view.id, running.receipt.estimated_new_tokens)
        return opened

    async def _first_event(
        self, running: Running, answer: Answer, record: LegRecord, handoff: Handoff | None
    ) -> Opened:
        request = running.request
        observer = AnswerObserver(request.endpoint, running.reply)
        hide_usage = not request.wants_usage and request.endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS)
        edits = Edits(hide_usage=hide_usage, cached_tokens=handoff.cached_tokens if handoff else None)
        if not answer.is_event_stream:
            body = await answer.body()
            observer.observe_body(body)
            _check_whole(observer, running.decision.decode)
            record.first_event_s = self._now() - running.started_s
            first, relay = edited_body(body, edits), None
        else:
            relay = StreamRelay(request.endpoint, edits, observer)
            first = await self._until_first_event(answer, relay, observer, running)
            record.first_event_s = self._now() - running.started_s
        return Opened(answer.content_type, first, observer, relay, handoff)

    async def _until_first_event(
        self, answer: Answer, relay: StreamRelay, observer: AnswerObserver, running: Running
    ) -> bytes:
        """What the client gets first; an error in its place is raised while a retry is still possible."""
        view, summary, parts = running.decision.decode, observer.summary, list[bytes]()
        try:
            # One limit for all of it: a worker that only sends comments has not answered.
            async with asyncio.timeout(self._stream_timeouts.first_s):
                while not _has_begun(running.request.endpoint, observer):
                    chunk = await answer.chunk()
                    if not chunk:
                        raise WorkerUnreachable("the worker ended its answer before it began", worker=view.id)
                    parts.append(relay.feed(chunk))
        except TimeoutError as exc:
            raise WorkerTimeout("the worker did not begin its answer in time", worker=view.id) from exc
        if summary.error is not None and not summary.first_token_seen:
            raise WorkerRefused(_error_status(summary.error), summary.error, worker=view.id)
        if summary.finish_reason == ABORTED and not summary.first_token_seen:
            raise WorkerUnreachable("the worker gave up before it answered", worker=view.id)
        return b"".join(parts)

    def _start_leg(self, running: Running, kind: str, view: WorkerView) -> LegRecord:
        record = LegRecord(
            kind=kind, worker=view.name, address=view.worker.address, started_s=self._now() - running.started_s
        )
        running.receipt.legs.append(record)
        return record

    def _end_leg(self, running: Running, record: LegRecord) -> None:
        record.ended_s = self._now() - running.started_s
        self._metrics.legs.labels(record.kind).observe(record.ended_s - record.started_s)

    def _fail_leg(self, record: LegRecord, exc: LegError) -> None:
        record.error = type(exc).__name__
        if isinstance(exc, WorkerRefused):
            record.status = exc.status


def _check_whole(observer: AnswerObserver, view: WorkerView) -> None:
    """WorkerUnreachable for a 200 that is no answer: garbage, or an abort before the first token."""
    summary = observer.summary
    if summary.undecodable or (summary.finish_reason == ABORTED and not summary.first_token_seen):
        raise WorkerUnreachable("the worker gave up before it answered", worker=view.id)


def _has_begun(endpoint: Endpoint, observer: AnswerObserver) -> bool:
    """Whether the answer can no longer fail unseen: Responses and Messages open with events that promise nothing."""
    summary = observer.summary
    if endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        return summary.events > 0
    return summary.first_token_seen or summary.ended or summary.error is not None


def _blamed(exc: LegError, running: Running, handoff: Handoff | None) -> LegError:
    """The failure with the worker that is to be avoided next.

    A D that answers 500 to a handoff could not load the KV (vLLM's policy `fail`), and can still compute the prompt:
    the P is avoided. A whole answer that took too long is not tried again at all.
    """
    prefill = running.decision.prefill
    if isinstance(exc, WorkerRefused) and exc.status == 500 and handoff is not None and prefill is not None:
        return WorkerRefused(exc.status, exc.body, worker=prefill.id)
    if isinstance(exc, WorkerTimeout) and not running.request.stream:
        return AnswerTimeout(exc.message, worker=exc.worker)
    return exc


def _error_status(body: bytes) -> int:
    """The HTTP status that an error event stands for; 500 where it says none."""
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return 500
    return code if isinstance(code, int) and 400 <= code < 600 else 500
