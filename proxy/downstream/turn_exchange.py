"""`TurnExchange` serves one turn without ASGI.

Its head is checked and its body read here, the turn service answers it, and the answer is written as it comes.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum

from .. import plane
from ..admission.web_pages import Headers
from ..app.request_body import check_coding, decoded
from ..bodies.body_memory import BodyRoom
from ..bodies.body_reader import Body
from ..bodies.received import SHORT_BYTES, ReceivedBody
from ..errors import BodyTooLarge, PPDError
from ..openai.request import Endpoint
from ..openai.stream_relay import broken_off
from ..routing.router import TurnReply
from ..routing.service import Caller, TurnService, error_reply
from ..routing.stream import StreamedBody, Streaming
from ..runtime.tasks import draining
from ..telemetry.access_log import AccessRecord
from . import response
from .asgi_edge import EVENT_ENDS
from .http1_connection import ClientConnection
from .limits import OpenRequests
from .request_head import RequestHead
from .stream_splice import SilenceWatch, Splice
from .turn_reading import TurnReading

log = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"


class _State(Enum):
    WAITING = "waiting"  # the answers before this one are not written yet
    READING = "reading"  # the request's body is being read
    ASKING = "asking"  # a task awaits the turn service
    WITHHOLDING = "withholding"  # the key was wrong: the answer waits
    STREAMING = "streaming"  # the answer goes out in pieces
    WRITTEN = "written"  # all of it; what it teaches is noted next
    OVER = "over"


# Looking up an enum's members by name is slow.
_WAITING, _READING, _ASKING = _State.WAITING, _State.READING, _State.ASKING
_WITHHOLDING, _STREAMING, _WRITTEN, _OVER = _State.WITHHOLDING, _State.STREAMING, _State.WRITTEN, _State.OVER
_WRONG_KEY = 401


@dataclass(frozen=True, slots=True)
class TurnSite:
    """What all turns of one server share."""

    requests: OpenRequests
    service: TurnService
    silence: SilenceWatch
    body_limit_bytes: int


class TurnExchange:
    """One turn: an `Exchange` of its connection, and one of its open requests."""

    __slots__ = (
        *("_body", "_connection", "_endpoint", "_is_between_events", "_is_event_stream", "_is_old", "_may_keep_alive"),
        *("_reading", "_room", "_site", "_splice", "_state", "_task", "_unsent", "_withheld", "is_draining", "record"),
    )

    is_multiplexed = False

    def __init__(
        self,
        connection: ClientConnection,
        head: RequestHead,
        endpoint: Endpoint,
        site: TurnSite,
        room: BodyRoom,
        more: Headers,
    ) -> None:
        """more: headers of whatever answer."""
        self.is_draining = False
        self.record: AccessRecord | None = None
        self._connection = connection
        self._reading: TurnReading | None = TurnReading(head, ReceivedBody(), room, more)  # None once it is answered
        self._is_old, self._may_keep_alive = head.is_old, head.keeps_alive
        self._endpoint, self._site = endpoint, site
        self._state = _WAITING
        self._task: asyncio.Task[None] | None = None
        self._splice: Splice | None = None
        self._body: StreamedBody | None = None
        self._withheld: asyncio.TimerHandle | None = None
        self._room: asyncio.Event | None = None  # set when the client takes data again; None while it does
        self._is_event_stream = False
        self._unsent = b""
        self._is_between_events = True  # where another event may follow

    # -- the request

    def begin(self) -> None:
        self._state = _READING
        self.record = self._site.requests.opened("POST", self._endpoint)
        self._site.requests.began(self, self._connection.limits)
        reading = self._reading
        assert reading is not None and reading.head is not None, "it begins once"
        head, received = reading.head, reading.received
        refused = reading.refused or self._site.requests.refusal(
            self._endpoint, head.target, head.headers, read_bytes=head.read_bytes
        )
        if refused is not None:
            self.refuse(refused)
            return
        headers = head.fields
        try:
            reading.caller = self._site.service.caller(self._endpoint, headers)
            reading.is_compressed = check_coding(headers.get("content-encoding", ""))
        except PPDError as exc:
            self.refuse(exc)
            return
        if self.record is not None:
            self.record.receipt = reading.caller.receipt
        size = head.body_bytes
        if size > self._site.body_limit_bytes:
            self.refuse(self._too_large())
            return
        expects = headers.get("expect", "").lower() == "100-continue"
        reading.expects_continue = expects and not head.is_old and not received.size
        is_long = size > SHORT_BYTES and not reading.is_whole
        if is_long:
            reading.memory.watch(received.arrived, self.refuse)
        if self._has_room(reading, max(size, received.size)):
            if is_long:
                received.expect(size)
            self._go_on(reading)

    @property
    def buffer(self) -> plane.BodyBuffer | None:
        return None if self._reading is None else self._reading.received.buffer

    def take(self, data: bytes) -> None:
        reading = self._reading
        if reading is None or self._state is _WITHHOLDING or reading.refused is not None:
            return
        reading.received.add(data)
        if reading.received.size > self._site.body_limit_bytes:
            self.refuse(self._too_large())
        elif self._state is _READING:
            self._has_room(reading, reading.received.size)

    def taken(self) -> None:
        reading = self._reading
        if reading is not None:
            reading.is_whole = True
            if reading.memory.sender is not None:
                reading.memory.whole()
            if self._state is _READING and not reading.waits_for_room:
                self._start(reading)

    def _has_room(self, reading: TurnReading, size: int) -> bool:
        """Otherwise the client is not read until there is room, or the request refused."""
        try:
            has_room = reading.memory.want(size, self._room_came, self.refuse)
        except PPDError as exc:
            self.refuse(exc)
            return False
        if not has_room and not reading.waits_for_room:
            reading.waits_for_room = True
            self._connection.hold_back()
        return has_room

    def _room_came(self) -> None:
        reading = self._reading
        if reading is not None and reading.waits_for_room:
            reading.waits_for_room = False
            self._connection.read_on()
            self._go_on(reading)

    def _go_on(self, reading: TurnReading) -> None:
        if reading.is_whole:
            self._start(reading)
        elif reading.expects_continue:
            reading.expects_continue = False
            self._connection.write(response.CONTINUE)

    def _start(self, reading: TurnReading) -> None:
        self._state, reading.head = _ASKING, None
        self._task = self._connection.loop.create_task(self._answer(reading))

    # -- the answer

    async def _answer(self, reading: TurnReading) -> None:
        caller = reading.caller
        assert caller is not None, "it was let in"
        body = reading.received.take()
        try:
            if reading.is_compressed:
                reply = await self._reply_to_compressed(caller, body, reading.memory)
            else:
                reply = await self._site.service.answer(caller, body)
            if self._state in (_WRITTEN, _OVER):
                reply.written()
                if not isinstance(reply.body, bytes):
                    reply.body.abandon()
            elif isinstance(reply.body, bytes):
                self._reply(reply)
            else:
                await self._stream(reply, reply.body)
        except Exception:
            log.exception("an answer could not be written")
            self.fail()

    async def _reply_to_compressed(self, caller: Caller, body: Body, room: BodyRoom) -> TurnReply:
        try:
            body = await decoded(body, self._site.body_limit_bytes, room)
        except PPDError as exc:
            self._site.service.rejected(exc.status)
            return error_reply(exc, self._endpoint)
        return await self._site.service.answer(caller, body)

    async def _stream(self, reply: TurnReply, body: StreamedBody) -> None:
        self._body = body
        self._state = _STREAMING
        self._may_keep_alive = self._may_keep_alive and not self._is_old  # else the connection's end ends the body
        self._is_event_stream = reply.content_type.startswith(EVENT_STREAM)
        self._unsent = self._answer_head(reply, None)  # goes out with the first piece
        if isinstance(body, Streaming):
            splice = self._splice = Splice(body, self, self._connection.loop, self._site.silence)
            if self._room is not None:
                splice.pause()
            splice.start()
            self._free_body()
            self._connection.lasts()
            self._task = None  # this task ends here; the splice does the rest
            return
        self._free_body()
        async with aclosing(body.chunks()) as chunks:
            async for data in chunks:
                self.send(data)
                if self._room is not None:
                    await self._room.wait()
        body.abandon()
        self.send(b"", is_last=True)
        self.finish()

    # -- writing

    @property
    def chunked(self) -> asyncio.Transport | None:
        return None if self._is_old else self._connection.transport

    def send(self, data: bytes, *, is_last: bool = False) -> None:
        if self._state is not _STREAMING:
            return
        if data:
            self._is_between_events = data.endswith(EVENT_ENDS)
        out = response.chunk(data) if data and not self._is_old else data
        if is_last and not self._is_old:
            out += response.END
        if self._unsent:
            out, self._unsent = self._unsent + out, b""
        self._connection.write(out)

    def fail(self) -> None:
        self._connection.abort()
        self.leave()

    def refuse(self, error: PPDError) -> None:
        reading = self._reading
        if reading is None:
            return
        if self._state is _WAITING:
            reading.refused = reading.refused or error
        elif self._state is _READING:
            # What follows on the connection is the rest of an unread body, or no request at all.
            self.is_draining = self.is_draining or not reading.is_whole or reading.refused is not None
            self._site.service.rejected(error.status)
            self._reply(error_reply(error, self._endpoint))

    def _reply(self, reply: TurnReply) -> None:
        """Writes a whole answer; one that says that the key is wrong may have to wait."""
        wrong_keys = self._site.requests.wrong_keys
        if reply.status == _WRONG_KEY and (delay_s := wrong_keys.withhold(self._connection.limits.address)):
            self._state = _WITHHOLDING
            self._withheld = self._connection.loop.call_later(delay_s, self._write_reply, reply)
        else:
            self._write_reply(reply)

    def _write_reply(self, reply: TurnReply) -> None:
        assert isinstance(reply.body, bytes), "the answer is whole"
        try:
            self._connection.write(self._answer_head(reply, len(reply.body)) + reply.body)
        except BaseException:
            reply.written()
            raise
        # What it teaches is noted behind this round's other answers: one after the other, that takes less.
        self._state = _WRITTEN
        self._connection.loop.call_soon(self._end, reply)

    def _answer_head(self, reply: TurnReply, size: int | None) -> bytes:
        if self.record is not None:
            self.record.status = reply.status
        more = () if self._reading is None else self._reading.more
        headers = (("Content-Type", reply.content_type), *reply.headers.items(), *more)
        connection = response.connection(self._may_keep_alive and not self.is_draining, is_old=self._is_old)
        return response.head(reply.status, headers, size=size, is_chunked=not self._is_old, connection=connection)

    # -- the end

    def leave(self) -> None:
        if self._state is not _WRITTEN:
            held = self._held()
            self._over(left=True)
            _abandon(*held)

    def cut(self) -> None:
        """An answer that has not begun becomes an error; a stream ends with an error event if it can take one."""
        self.is_draining = True
        if self._state is _WRITTEN:
            return
        held = self._held()
        if self._state in (_READING, _ASKING, _WITHHOLDING):
            self._reply(error_reply(draining(), self._endpoint))
        elif self._state is _STREAMING and self._is_event_stream and self._is_between_events:
            is_whole = isinstance(self._body, Streaming) and self._body.is_over
            self.send(b"" if is_whole else broken_off(self._endpoint, draining().message, 503), is_last=True)
            self.finish(left=True)
        else:
            self._connection.abort()
        if self._state is not _WRITTEN:
            self._over(left=True)
        _abandon(*held)

    def pause(self) -> None:
        self._room = asyncio.Event()
        if self._splice is not None:
            self._splice.pause()

    def resume(self) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None
        if self._splice is not None:
            self._splice.resume()

    def _end(self, reply: TurnReply) -> None:
        reply.written()
        try:
            self.finish()
        except Exception:
            log.exception("a connection could not go on")
            self._connection.abort()

    def finish(self, *, left: bool = False) -> None:
        """The next exchange of the connection may begin."""
        self._over(left=left)
        self._connection.finished(keeps_alive=self._may_keep_alive and not self.is_draining)

    def _held(self) -> tuple[asyncio.Task[None] | None, Splice | None, StreamedBody | None]:
        return self._task, self._splice, self._body

    def _over(self, *, left: bool) -> None:
        if self._state is not _OVER:
            self._state = _OVER
            self._site.requests.ended(self, self._connection.limits, left=left)
        if self._withheld is not None:
            self._withheld.cancel()
            self._withheld = None
            self._site.requests.wrong_keys.release()
        self._free_body()
        self._task = self._splice = self._body = None  # breaks reference cycles, so that all is freed at once

    def _free_body(self) -> None:
        """The prompt is not needed any more, and a stream may be open for long."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.received.take()
            reading.memory.free()

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self._site.body_limit_bytes} bytes")


def _abandon(task: asyncio.Task[None] | None, splice: Splice | None, body: StreamedBody | None) -> None:
    if splice is not None:
        splice.abandon()
    elif body is not None:
        body.abandon()
    if task is not None:
        task.cancel()
