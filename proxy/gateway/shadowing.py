"""A picker beside the one that rules: Envoy shows it each turn, waits for nothing, and takes no answer.

It decides as if it ruled, and notes that in the receipt. What it books and learns is what was done: the workers that
the ruling picker has named, in the request's own headers, and what became of the turn there. So its beliefs stay those
of a picker that has seen all turns, and each of its decisions could have been taken.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from google.protobuf.message import DecodeError
from prometheus_client.core import CounterMetricFamily, Metric

from ..app.request_body import check_coding, decoded
from ..assembly import Proxy
from ..bodies.received import ReceivedBody
from ..encoders.choosing import NamedEncoders
from ..errors import NoWorkerError, PPDError
from ..fleet.worker import WorkerId
from ..openai.request import Endpoint
from ..routing.attempt import Attempt, Job
from ..routing.receipt_notes import as_shadow
from ..routing.service import Caller
from .headers import DESTINATION, ENCODER_ITEMS, ENCODERS, PREFILLER, TURN, item_numbers, served
from .messages import Stage, read_stage
from .picked_encoders import PickedEncoders
from .picked_turn import PickedTurn
from .reports import Reports
from .wire.grpc import GrpcCall, GrpcStatus

log = logging.getLogger(__name__)

HELD_MESSAGES = 256  # of an answer, that come before the decision; a turn with more is not followed
HELD_BYTES = 8 * 1024 * 1024  # of these; the same
_TURNS = frozenset(Endpoint)


class Shadow:
    """What the decisions came to, of one process."""

    def __init__(self) -> None:
        self.decided: Counter[str] = Counter()

    def gauges(self) -> tuple[Metric, ...]:
        counter = CounterMetricFamily(
            "ppd_shadow_turns",
            "Decisions beside the ruling picker's, by what they would have changed",
            labels=("result",),
        )
        for result in ("same", "other", "refused", "unknown_worker"):
            counter.add_metric((result,), self.decided[result])
        return (counter,)


class ShadowCall:
    """One HTTP request that Envoy only shows."""

    def __init__(self, proxy: Proxy, reports: Reports, shadow: Shadow, call: GrpcCall) -> None:
        self._proxy = proxy
        self._reports = reports
        self._shadow = shadow
        self._call = call
        self._headers: dict[str, str] = {}
        self._caller: Caller | None = None
        self._body = ReceivedBody()
        self._room = proxy.body_memory.room()
        self._has_room = asyncio.Event()  # for what has come of the body
        self._task: asyncio.Task[None] | None = None
        self._turn: PickedTurn | None = None
        self._held: list[Stage] = []
        self._held_bytes = 0
        self._is_over = False

    # -- called with what comes

    def message(self, data: bytes | memoryview) -> None:
        if self._is_over:
            return
        try:
            stage = read_stage(data)
        except DecodeError:
            self._end(GrpcStatus.INVALID_ARGUMENT, "the message is no ProcessingRequest")
            return
        if not stage.is_only_shown:
            self._end(GrpcStatus.UNIMPLEMENTED, "this picker only watches: observability_mode")
            return
        if stage.name == "request_headers":
            self._request_headers(stage)
        elif stage.name in ("request_body", "request_trailers") and self._caller is not None and self._task is None:
            self._request_body(stage.piece, is_last=stage.is_last or stage.name == "request_trailers")
        elif self._turn is not None:
            self._answer(stage)
        elif self._task is not None:
            self._held.append(stage)
            self._held_bytes += len(data)
            if len(self._held) > HELD_MESSAGES or self._held_bytes > HELD_BYTES:
                self._end()

    def half_closed(self) -> None:
        if not self._is_over:
            self._call.finish()
        self.lost()

    def lost(self) -> None:
        self._is_over = True
        self._ended()

    # -- the request

    def _request_headers(self, head: Stage) -> None:
        self._headers = headers = head.headers
        path = headers.get(":path", "").partition("?")[0]
        if headers.get(":method") != "POST" or path not in _TURNS or not headers.get(DESTINATION):
            self._end()  # no turn, or one that the ruling picker has refused
            return
        try:
            self._caller = self._proxy.turns.caller(Endpoint(path), headers, asks_key=False)
        except PPDError:
            self._refused()

    def _request_body(self, piece: bytes, *, is_last: bool) -> None:
        self._body.add(piece)
        if self._body.size > self._proxy.settings.config.body_limit_bytes:
            self._refused()
            return
        try:
            if self._room.want(self._body.size, self._has_room.set, lambda _: self._refused()):
                self._has_room.set()
            else:
                self._has_room.clear()
        except PPDError:
            self._refused()
            return
        if is_last:
            self._task = asyncio.get_running_loop().create_task(self._decide())

    async def _decide(self) -> None:
        assert self._caller is not None, "its body was taken"
        try:
            await self._has_room.wait()
            body = self._body.take()
            if check_coding(self._headers.get("content-encoding", "")):
                body = await decoded(body, self._proxy.settings.config.body_limit_bytes, self._room)
            request, context = await self._proxy.turns.read(self._caller, body)
            job = await self._proxy.chooser.enter(request, self._caller.receipt, context)
            try:
                self._follow(job, await self._proxy.chooser.choose(job))
            except BaseException as exc:
                if self._turn is None:
                    self._proxy.chooser.left(job, exc)
                raise
        except PPDError:
            self._refused()
        except Exception as exc:
            log.error("request %s failed in the shadow", self._caller.receipt.id, exc_info=exc)
            self._end()
        finally:
            self._room.free()

    def _follow(self, job: Job, attempt: Attempt) -> None:
        """What has been done with it, from here on."""
        registry, receipt = self._proxy.state.registry, attempt.receipt
        first = registry.view(WorkerId(self._headers[DESTINATION].partition(",")[0].strip()))
        prefill = registry.view(WorkerId(self._headers.get(PREFILLER, "").partition(",")[0].strip()))
        receipt.shadow = would = as_shadow(receipt)
        if first is None:
            self._shadow.decided["unknown_worker"] += 1
            self._proxy.chooser.left(job, NoWorkerError("the worker that was named is not known here"))
            self._end()
            return
        is_same = (would.decode, would.prefill) == (first.name, "" if prefill is None else prefill.name)
        self._shadow.decided["same" if is_same else "other"] += 1
        proxy = self._proxy
        ruled = proxy.chooser.ruled(job, attempt, first, prefill)
        ruled.permit, ruled.encoders, ruled.given_id = job.permit, self._encoders(), self._headers.get(TURN, "")
        encoders = PickedEncoders.of(proxy.state, ruled)
        self._turn = PickedTurn(proxy.state, proxy.learner, proxy.chooser, self._reports, job, ruled)
        self._turn.encoders = encoders
        held, self._held = self._held, []
        for stage in held:
            self._answer(stage)
        if self._is_over:
            self._turn.ended()

    def _encoders(self) -> NamedEncoders:
        """Those that the ruling picker has named, as far as they are known here."""
        registry, named = self._proxy.state.registry, self._headers.get(ENCODERS, "").split(",")
        known = [view for each in named if (view := registry.view(WorkerId(each.strip()))) is not None]
        try:
            numbers = item_numbers(self._headers.get(ENCODER_ITEMS, ""))
        except ValueError:
            known = []
        return NamedEncoders(tuple(known), numbers if known else frozenset())

    # -- the answer

    def _answer(self, stage: Stage) -> None:
        assert self._turn is not None, "it is followed"
        if stage.name == "response_headers":
            self._turn.head(stage.headers, served(stage.metadata))
            if stage.is_last:
                self._turn.ended()
        elif stage.name == "response_body":
            self._turn.observe(stage.piece)
            if stage.is_last:
                self._turn.ended()
        elif stage.name == "response_trailers":
            self._turn.ended()

    # -- its end

    def _refused(self) -> None:
        """It would have been, or could not be decided."""
        self._shadow.decided["refused"] += 1
        self._end()

    def _ended(self) -> None:
        if self._turn is not None:
            self._turn.ended()
        elif self._task is None:
            self._room.free()

    def _end(self, status: GrpcStatus = GrpcStatus.OK, why: str = "") -> None:
        self._room.free()
        self._held.clear()
        self._body = ReceivedBody()
        if self._turn is not None:
            self._turn.ended()
        if self._task is not None and self._turn is None and self._task is not asyncio.current_task():
            self._task.cancel()
        if not self._is_over:
            self._is_over = True
            self._call.finish(status, why)
