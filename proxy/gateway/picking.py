"""The endpoint picker: Envoy asks, by external processing, where each request goes (Endpoint Picker Protocol 1.0.0).

One call is one HTTP request, told stage by stage: the request's head, its body, then what is sent of the answer. Each
stage is answered once. A body comes whole, or in pieces that are sent back behind the decision (FULL_DUPLEX_STREAMED);
which it is, the first message says. What the proxy would refuse, Envoy refuses with the proxy's own status and body.

https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/docs/proposals/004-endpoint-picker-protocol
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from google.protobuf.message import DecodeError
from msgspec.structs import replace

from ..app.request_body import check_coding, decoded
from ..assembly import Proxy
from ..bodies.body_memory import ROOM, BodyRoom
from ..bodies.body_reader import Body
from ..bodies.received import ReceivedBody
from ..errors import BodyTooLarge, HeadTooLarge, PPDError
from ..fleet.worker import WorkerId
from ..openai.request import Endpoint
from ..passthrough.passthrough import ONLY
from ..routing.attempt import Attempt, Job
from ..routing.receipt_notes import decision_headers
from ..routing.service import Caller, error_reply
from ..telemetry.access_log import AccessRecord
from . import answers
from .headers import DESTINATION, TURN, removed, served, subset, to_worker
from .messages import BUFFERED, FULL_DUPLEX_STREAMED, Stage, read_stage
from .other_requests import App, OtherRequest, decoded_path
from .picked_encoders import PickedEncoders
from .picked_turn import PickedTurn
from .reports import Reports
from .wire.grpc import GrpcCall, GrpcStatus

log = logging.getLogger(__name__)

_TURNS = frozenset(Endpoint)
HEAD_MESSAGE_BYTES = 1024 * 1024  # of a request's head, with what Envoy tells beside it


class PickerCall:
    """One HTTP request of Envoy's."""

    def __init__(self, proxy: Proxy, app: App, reports: Reports, call: GrpcCall) -> None:
        """app: answers what is no turn."""
        self._proxy = proxy
        self._app = app
        self._reports = reports
        self._call = call
        self._headers: dict[str, str] = {}
        self._caller: Caller | None = None
        self._body = ReceivedBody()
        self._body_bytes = 0
        self._is_whole = False  # the body
        self._room: BodyRoom = proxy.body_memory.room()
        self._has_room = True
        self._only: frozenset[WorkerId] | None = None
        self._sends_back = self._answer_is_sent_back = False  # bodies go on through here
        self._has_trailers = False
        self._other: OtherRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._turn: PickedTurn | None = None
        self._access: AccessRecord | None = None  # until its line is written
        self._is_over = False  # no more is answered

    # -- called with what comes

    def message(self, data: bytes | memoryview) -> None:
        if self._is_over:
            return
        try:
            stage = read_stage(data)
        except DecodeError:
            self._end(GrpcStatus.INVALID_ARGUMENT, "the message is no ProcessingRequest")
            return
        if not stage.name:
            self._end(GrpcStatus.INVALID_ARGUMENT, "the message is of no known stage")
        elif stage.is_only_shown:  # its answers would be ignored, and the worker booked for nothing
            self._end(GrpcStatus.UNIMPLEMENTED, "this picker only decides")
        elif stage.name == "request_headers" and len(data) > HEAD_MESSAGE_BYTES:  # it is kept until the call ends
            self._end(GrpcStatus.RESOURCE_EXHAUSTED, f"the head's message is longer than {HEAD_MESSAGE_BYTES} bytes")
        else:
            _STAGES[stage.name](self, stage)

    def half_closed(self) -> None:
        """Envoy has no more to tell."""
        self._end()

    def lost(self) -> None:
        """Envoy 1.40 resets the call where it has nothing more to tell, so this is no sign that the client has gone."""
        self._is_over = True
        self._let_go()

    # -- the request

    def _request_headers(self, head: Stage) -> None:
        if self._headers:
            self._end(GrpcStatus.INVALID_ARGUMENT, "the request's head came twice")
            return
        self._headers = headers = head.headers
        request_mode, response_mode = head.modes or (BUFFERED, 0)
        self._sends_back = request_mode == FULL_DUPLEX_STREAMED
        self._answer_is_sent_back = response_mode == FULL_DUPLEX_STREAMED
        self._only = subset(head.metadata)
        path = decoded_path(headers)
        config = self._proxy.settings.config
        if self._proxy.access_log is not None:
            self._access = self._proxy.access_log.opened(headers.get(":method", ""), path)
        if request_mode not in (BUFFERED, FULL_DUPLEX_STREAMED):
            log.warning("Envoy's processing_mode must have request_body_mode BUFFERED or FULL_DUPLEX_STREAMED")
            self._refuse(PPDError("the gateway does not show its picker whole requests"))
            return
        if sum(map(len, headers)) + sum(map(len, headers.values())) > config.head_limit_bytes:
            self._refuse(HeadTooLarge(f"the head is larger than {config.head_limit_bytes} bytes"))
            return
        if headers.get(":method") != "POST" or path not in _TURNS:
            self._answer_other(is_whole=head.is_last)
            return
        try:
            self._caller = caller = self._proxy.turns.caller(Endpoint(path), headers)
            if self._access is not None:
                self._access.receipt = caller.receipt
            check_coding(headers.get("content-encoding", ""))
            size = headers.get("content-length", "")
            if size.isdecimal() and int(size[-20:]) > config.body_limit_bytes:
                raise self._too_large()
        except PPDError as exc:
            self._refuse(exc)
            return
        if head.is_last:
            self._ends_body()
        elif not self._sends_back:
            self._hear_on()

    def _request_body(self, stage: Stage) -> None:
        piece = stage.piece
        if self._is_whole or (self._caller is None and self._other is None):
            self._end(GrpcStatus.INVALID_ARGUMENT, "a body came without its head, or after its end")
            return
        self._body_bytes += len(piece)
        if self._other is not None:
            self._other.take(piece)
        else:
            self._body.add(piece)
        try:
            if self._body_bytes > self._proxy.settings.config.body_limit_bytes:
                raise self._too_large()
            self._has_room = self._room.want(self._body_bytes, self._got_room, self._refuse)
        except PPDError as exc:
            self._refuse(exc)
            return
        # A body that Envoy holds comes in one piece. If trailers follow, that does not say that it is the last one.
        if stage.is_last or not self._sends_back:
            self._ends_body()

    def _request_trailers(self, _: Stage) -> None:
        self._has_trailers = True
        if not self._is_whole and (self._caller is not None or self._other is not None):
            self._ends_body()
        elif self._task is None or self._task.done():
            self._send(answers.carry_on("request_trailers"))

    def _hear_on(self) -> None:
        """The body is to come. An Envoy that sends none would follow what a client names."""
        if DESTINATION in self._headers:
            self._send(answers.picked("request_headers", {}, [DESTINATION]))
        else:
            self._send(answers.carry_on("request_headers"))

    def _got_room(self) -> None:
        self._has_room = True
        if self._is_whole:
            self._begin()

    def _ends_body(self) -> None:
        self._is_whole = True
        if self._has_room:
            self._begin()

    def _begin(self) -> None:
        if self._other is not None:
            self._other.ends()
        else:
            self._task = asyncio.get_running_loop().create_task(self._pick())

    async def _pick(self) -> None:
        caller = self._caller
        assert caller is not None, "it was let in"
        try:
            body = given = self._body.take()
            if check_coding(self._headers.get("content-encoding", "")):
                body = await decoded(given, self._proxy.settings.config.body_limit_bytes, self._room)
            await self._choose(caller, body, is_same=body is given)
        except PPDError as exc:
            self._refuse(exc, caller)
        except Exception as exc:
            # Its text may hold addresses: the client gets none of it.
            log.error("request %s failed", caller.receipt.id, exc_info=exc)
            self._refuse(PPDError("internal error"), caller)
        finally:
            self._room.free()

    async def _choose(self, caller: Caller, body: Body, *, is_same: bool) -> None:
        proxy = self._proxy
        request, context = await proxy.turns.read(caller, body)
        request = proxy.turns.in_scope(caller, request)
        if self._only is not None:
            context = replace(context, only=self._only)
        job = await proxy.chooser.enter(request, caller.receipt, context)
        try:
            attempt = await proxy.chooser.choose(job)
            attempt.permit = job.permit
            edited = answers.edited(request)
            if not is_same and edited is None:
                edited = answers.whole(body)
            fallbacks = proxy.settings.config.picker_fallbacks
            others = proxy.chooser.next_best(job, attempt, fallbacks) if fallbacks else []
            sent = self._sent(job, attempt, others)
            self._turn = PickedTurn(proxy.state, proxy.learner, proxy.chooser, self._reports, job, attempt, others)
        except BaseException as exc:
            proxy.chooser.left(job, exc)
            raise
        self._turn.on_end = self._log_turn
        self._turn.encoders = encoders = PickedEncoders.of(proxy.state, attempt)
        self._send_on(sent if encoders is None else {**sent, **encoders.headers}, edited, body)

    def _sent(self, job: Job, attempt: Attempt, others: Sequence[WorkerId]) -> dict[str, str]:
        decision, state, config = attempt.decision, self._proxy.state, self._proxy.settings.config
        worker = decision.decode.worker
        prefill = None if decision.prefill is None else decision.prefill.worker.address
        legs = {**job.context.headers, TURN: attempt.attempt_id}
        if worker.is_trusted and config.worker_api_key:
            legs["authorization"] = f"Bearer {config.worker_api_key}"
        session = state.engine_caches.session_id(worker, attempt.history)
        return to_worker(legs, attempt.receipt.id, (worker.address, *others), prefill, session)

    def _send_on(self, sent: dict[str, str], edited: bytes | None, body: Body) -> None:
        """edited: what goes on in place of the body that came."""
        assert self._caller is not None, "its turn was decided"
        if self._headers.get(":path") != self._caller.endpoint:  # escapes, a query: a worker may read them otherwise
            sent[":path"] = self._caller.endpoint
        gone = removed(tuple(self._headers), frozenset(sent))
        if edited is not None and "content-encoding" in self._headers:
            gone = (*gone, "content-encoding")
        if edited is not None and "content-length" in self._headers:  # Envoy does not correct it, and then answers 503
            sent = {**sent, "content-length": str(len(edited))}
        if not self._sends_back:
            self._send(answers.picked("request_body", sent, gone, edited))
            return
        self._send(answers.picked("request_headers", sent, gone))
        carried = answers.whole(body) if edited is None else edited
        self._send_pieces("request_body", carried, is_last=not self._has_trailers)
        if self._has_trailers:
            self._send(answers.carry_on("request_trailers"))

    # -- what is no turn

    def _answer_other(self, *, is_whole: bool) -> None:
        state = {ONLY: self._only, ROOM: self._room}
        self._other = OtherRequest(self._app, self._headers, state, self._answered, self._refuse)
        self._other.begin(self._access)
        if is_whole:
            self._ends_body()
        elif not self._sends_back:
            self._hear_on()

    def _answered(self, status: int, headers: dict[str, str], body: bytes) -> None:
        if self._access is not None:
            self._access.status = status
        self._log("completed")
        self._send(answers.refusal(status, headers, body))
        self._end()

    # -- the answer

    def _response_headers(self, head: Stage) -> None:
        sent: dict[str, str] = {}
        if self._turn is not None and self._caller is not None:
            self._turn.head(head.headers, served(head.metadata))
            sent = self._told_of(self._caller)
            if head.is_last:
                self._turn.ended()
        self._send(answers.told(sent))

    def _response_body(self, stage: Stage) -> None:
        if self._turn is not None:
            if stage.piece:
                self._turn.observe(stage.piece)
            if stage.is_last:
                self._turn.ended()
        if self._answer_is_sent_back:
            self._send_pieces("response_body", stage.piece, is_last=stage.is_last)
        else:
            self._send(answers.carry_on("response_body"))

    def _response_trailers(self, _: Stage) -> None:
        if self._turn is not None:
            self._turn.ended()
        self._send(answers.carry_on("response_trailers"))

    # -- what is answered

    def _send(self, message: bytes) -> None:
        if not self._is_over:
            self._call.send(message)

    def _send_pieces(self, stage: str, body: bytes, *, is_last: bool) -> None:
        if not self._is_over:
            for head, piece in answers.pieces(stage, body, is_last=is_last):
                self._call.send(head, piece)

    def _refuse(self, exc: PPDError, caller: Caller | None = None) -> None:
        known = caller or self._caller
        if self._other is None:
            self._proxy.turns.rejected(exc.status, None if known is None else known.receipt)
        path = self._headers.get(":path", "") if known is None else known.endpoint
        reply = error_reply(exc, path)
        assert isinstance(reply.body, bytes), "an error is told at once"
        headers = {"content-type": reply.content_type, **reply.headers}
        if known is not None:
            headers |= self._told_of(known)
        self._answered(reply.status, headers, reply.body)

    def _let_go(self) -> None:
        """Of all that is held for the request, as Envoy may leave the call open. Nothing more is learnt of its turn."""
        self._room.free()
        if self._task is not None and self._turn is None and self._task is not asyncio.current_task():
            self._task.cancel()
        if self._other is not None:
            self._other.leave()
        self._body, self._headers, self._other = ReceivedBody(), {}, None
        if self._turn is not None:
            self._turn.ended()
        else:
            self._log("left")

    def _end(self, status: GrpcStatus = GrpcStatus.OK, why: str = "") -> None:
        self._let_go()
        if not self._is_over:
            self._is_over = True
            self._call.finish(status, why)

    def _log_turn(self, ended_s: float) -> None:
        assert self._caller is not None, "it has a turn"
        receipt = self._caller.receipt
        if self._access is not None:
            self._access.status = receipt.status
        self._log("left" if receipt.outcome == "cancelled" else "completed", ended_s)

    def _log(self, ended: str, at_s: float | None = None) -> None:
        """Once. at_s: when it ended, if not just now."""
        record, self._access = self._access, None
        if record is not None and self._proxy.access_log is not None:
            self._proxy.access_log.closed(record, ended, at_s)

    def _told_of(self, caller: Caller) -> dict[str, str]:
        """What a client is told of its turn and of its key's allowance."""
        limits = self._proxy.state.rate_limits.headers(caller.client, self._proxy.state.now())
        return {**decision_headers(caller.receipt), **limits}

    def _too_large(self) -> PPDError:
        return BodyTooLarge(f"the body is larger than {self._proxy.settings.config.body_limit_bytes} bytes")


_STAGES = {
    "request_headers": PickerCall._request_headers,
    "request_body": PickerCall._request_body,
    "request_trailers": PickerCall._request_trailers,
    "response_headers": PickerCall._response_headers,
    "response_body": PickerCall._response_body,
    "response_trailers": PickerCall._response_trailers,
}
