"""One request to a worker and its answer: phase, time limits, and the errors that it can end with.

The answer's head comes first; its body is awaited in chunks, or passed on as it comes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .. import plane
from ..errors import LegError
from ..failures import Cause, Phase
from ..fleet.worker import Worker
from ..runtime.loop_watch import STOOD_STILL_S, stood_still
from .connection import WorkerConnection
from .relayed_headers import EndToEndHeaders, RelayedHeaders

# Module names, as looking an enum's members up by name is slow.
CONNECT, SENT, HEADERS, STREAM = Phase.CONNECT, Phase.SENT, Phase.HEADERS, Phase.STREAM


class Trouble(NamedTuple):
    """Why a call failed; the phase is added when the error is raised."""

    message: str
    cause: Cause


GONE = Trouble("the worker is gone", Cause.WORKER_GONE)
LATE = Trouble("the worker did not answer in time", Cause.TIMEOUT)
BROKEN = Trouble("the worker closed the connection before the end of its answer", Cause.RESET)
NOT_HTTP = Trouble("the worker's answer is not HTTP", Cause.MALFORMED)
UNREACHABLE = Trouble("the worker could not be reached", Cause.REFUSED)
TOO_OLD = Trouble("the prompt's KV is too old to be handed over", Cause.STALE_HANDOFF)

UNASKABLE = Trouble("the worker cannot be asked: what it announced does not fit into a head", Cause.REFUSED)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: to connect, to the first byte of the answer's body, and between two reads after that.

    An answer that is awaited as a whole has `first_s` for all of it.
    """

    connect_s: float
    first_s: float
    idle_s: float

    def after(self, wait_s: float) -> Timeouts:
        """The same, for an answer that begins up to so much later."""
        return Timeouts(self.connect_s, self.first_s + wait_s, self.idle_s)


_HEARD_SHARE = 1.4  # of a handoff's greatest age: the default of 20 s makes 28 s, and the lease lasts 30 s


class Expiry(NamedTuple):
    """Until when a handoff may be used, by `uptime_s`. Later, P may have given its blocks to other prompts."""

    send_by_s: float  # its last byte must have left this process
    heard_by_s: float  # D must have shown that it reads what it is sent: a D that stands still reads it later

    @classmethod
    def of(cls, asked_s: float, max_age_s: float) -> Expiry:
        """asked_s: when P was asked. Its lease begins when it has computed the prompt, and only P knows when."""
        return cls(asked_s + max_age_s, asked_s + _HEARD_SHARE * max_age_s)


class Call:
    """once: it must not reach its worker twice, because it carries a handoff; `expiry`: nor late."""

    __slots__ = (
        *("expiry", "has_arrived", "is_gone", "on_failure", "once", "patience_s", "phase", "sent_s", "worker"),
        "worker_id",
    )

    def __init__(self, worker: Worker, *, once: bool = False, expiry: Expiry | None = None) -> None:
        self.worker = worker
        self.worker_id = worker.id
        self.once = once
        self.expiry = expiry
        self.patience_s = math.inf  # from `sent_s` until it is asked whether its worker still lives
        self.phase = CONNECT
        self.is_gone = False
        self.has_arrived = False  # the worker has answered something since this was sent
        self.sent_s = 0.0  # by the loop's clock
        self.on_failure: Callable[[Trouble], None] | None = None  # set by the code that waits for this call

    @property
    def may_arrive_late(self) -> bool:
        """It carries a handoff, was sent, and nothing shows that its worker has read it."""
        return self.once and self.phase is SENT and not self.has_arrived

    def sent(self, now_s: float) -> None:
        self.phase, self.sent_s = SENT, now_s

    def give_up(self) -> None:
        self.is_gone = True
        self.fail(GONE)

    def fail(self, trouble: Trouble) -> None:
        if self.on_failure is not None:
            self.on_failure(trouble)

    def error(self, message: str, cause: Cause) -> LegError:
        return LegError(message, worker=self.worker_id, phase=self.phase, cause=cause)


HELD_BYTES = 64 * 1024  # buffered of a body that is not taken; beyond this the worker is not read
RETRY_AFTER_LIMIT_S = 60.0
ANSWER_LIMIT_BYTES = 256 * 1024 * 1024
SHORT_LIMIT_BYTES = 8 * 1024 * 1024  # of answers that are never long: errors, model lists, what P says of a prompt
_READ: dict[bytes, bytes] = {}  # replaces headers that are no longer needed
END_S = 1.0  # for a worker to end its answer after the last event, so that the connection can be reused


class Sink(Protocol):
    """Takes a body as it comes."""

    def take(self, data: bytes, *, is_last: bool) -> None: ...

    def fail(self, error: LegError) -> None: ...


class Answer:
    """One answer. forget: called when it is over."""

    __slots__ = (
        "_call",
        "_connection",
        "_failure",
        "_forget",
        "_headers",
        "_held_bytes",
        "_is_paused",
        "_is_whole",
        "_loop",
        "_parts",
        "_read_any",
        "_timeouts",
        "_timer",
        "_waiter",
        "_worker_id",
        "sink",
        "status",
    )

    def __init__(
        self, connection: WorkerConnection, timeouts: Timeouts, call: Call, forget: Callable[[Call], None]
    ) -> None:
        self.status = 0
        self.sink: Sink | None = None
        self._connection: WorkerConnection | None = connection  # None: given back, or lost
        self._timeouts = timeouts
        self._call: Call | None = call  # None: it has reached the client
        self._worker_id = call.worker_id
        self._forget = forget
        self._loop = connection.loop
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] | None = None  # of the body, that wait to be taken
        self._held_bytes = 0
        self._is_paused = False
        self._is_whole = False
        self._read_any = False
        self._failure: Trouble | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # while it waits
        call.on_failure = self._fail

    # -- its head

    async def begun(self) -> None:
        """Returns once the head has come; LegError if it does not come in time."""
        while not self.status:
            await self.news(self._timeouts.first_s)

    @property
    def content_type(self) -> str:
        return self._headers.get(b"content-type", b"application/json").decode("latin-1")

    @property
    def content_encoding(self) -> str:
        """Empty unless the worker encoded its answer although the request asked for `identity`."""
        encoding = self._headers.get(b"content-encoding", b"").decode("latin-1")
        return "" if encoding == "identity" else encoding

    def header(self, name: bytes) -> str:
        """Empty where there is none; to be asked before `reached_the_client`. name: in lower case."""
        return self._headers.get(name, b"").decode("latin-1")

    def relayed(self, rules: RelayedHeaders | EndToEndHeaders) -> dict[str, str]:
        """What the client gets of the headers; to be asked before `reached_the_client`."""
        return rules.of(self._headers, self._worker_id)

    @property
    def retry_after_s(self) -> float:
        """At most a minute; 0 if the worker names no time, or a date."""
        text = self._headers.get(b"retry-after", b"")
        return min(RETRY_AFTER_LIMIT_S, float(text)) if text.isdigit() else 0.0

    @property
    def is_event_stream(self) -> bool:
        return self._headers.get(b"content-type", b"").startswith(b"text/event-stream")

    # -- its body

    @property
    def first_s(self) -> float:
        """Its time limit for the first bytes of the body."""
        return self._timeouts.first_s

    @property
    def whole_by_s(self) -> float:
        """When an answer that is no stream must be here, by the loop's clock."""
        assert self._call is not None, "no byte of it has gone to the client"
        return self._call.sent_s + self._timeouts.first_s

    def reached_the_client(self) -> None:
        """From here on a failure is one in mid-stream. What only the beginning needs is freed."""
        if self._call is not None:
            self._call.phase = STREAM
        self._end_call()
        self._call = None
        self._headers = _READ

    async def chunk(self, *, is_over: bool = False, by_s: float = math.inf) -> bytes:
        """The next bytes of the body, b"" at its end.

        is_over: only the end is missing, for which it waits `END_S` at most. by_s: deadline by the loop's clock.
        """
        if not self._parts and not self._is_whole:
            limit_s = self._timeouts.idle_s if self._read_any else self._timeouts.first_s
            await self.news(max(0.0, min(limit_s, END_S if is_over else math.inf, by_s - self._loop.time())))
        self._read_any = True
        return self._taken()

    def at_once(self, limit_bytes: int = SHORT_LIMIT_BYTES) -> bytes | None:
        """All of it, where it has come already, as most do with their heads; None: `parts` awaits it."""
        return self._taken() if self._is_whole and self._held_bytes <= limit_bytes else None

    async def body(self, limit_bytes: int = SHORT_LIMIT_BYTES) -> bytes:
        """All of it; a worker that sends it in drops has no longer than one that is silent."""
        if (whole := self.at_once(limit_bytes)) is not None:
            return whole
        parts = [part async for part in self.parts(limit_bytes)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def parts(self, limit_bytes: int = ANSWER_LIMIT_BYTES) -> AsyncGenerator[bytes, None]:
        """The body as it comes; LegError for one that is longer, or takes too long."""
        size, by_s = int(self._headers.get(b"content-length", b"0")[-20:]), self.whole_by_s  # size: at least
        got = 0
        while max(size, got) <= limit_bytes:
            data = await self.chunk(by_s=by_s)
            if not data:
                return
            got += len(data)
            if self._loop.time() - by_s > STOOD_STILL_S:  # else it would have ended at its deadline
                by_s = self._loop.time() + self._timeouts.first_s
            yield data
        raise self.failure("the worker's answer is too long", Cause.MALFORMED)

    def hand_on(self, sink: Sink) -> None:
        """Passes the body to `sink`: first what is buffered here, then each piece as it comes."""
        self.sink = sink
        if self._parts or self._is_whole:
            sink.take(self._taken(), is_last=self._is_whole)
        if self._failure is not None and not self._is_whole:
            sink.fail(self.failure(*self._failure))

    def text_lane(self, client: asyncio.Transport) -> plane.TextLane | None:
        return None if self._connection is None else self._connection.text_lane(client)

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def pause(self) -> None:
        if not self._is_paused and self._connection is not None:
            self._is_paused = True
            self._connection.pause()

    def resume(self) -> None:
        if self._is_paused and self._connection is not None:
            self._connection.resume()
        self._is_paused = False

    def give_up_waiting(self) -> None:
        self._fail(LATE)

    def failure(self, message: str, cause: Cause) -> LegError:
        phase = STREAM if self._call is None else self._call.phase
        if phase is STREAM and cause is Cause.WORKER_GONE:  # found out just before the client had its first bytes
            cause = Cause.RESET
        return LegError(message, worker=self._worker_id, phase=phase, cause=cause)

    def close(self) -> None:
        """Drops the connection unless the body was read to its end."""
        self._end_call()
        self.sink = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def _end_call(self) -> None:
        if self._call is not None:
            self._call.on_failure = None
            self._forget(self._call)

    # -- called by the connection

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status, self._headers = status, headers
        if self._call is not None:
            self._call.phase = HEADERS
        self._wake()

    def body_came(self, data: bytes, *, is_last: bool) -> None:
        if is_last:
            self._is_whole, self._connection = True, None
        if self.sink is not None:
            self.sink.take(data, is_last=is_last)
            return
        if data:
            if self._parts is None:
                self._parts = []
            self._parts.append(data)
            self._held_bytes += len(data)
            if self._held_bytes > HELD_BYTES:
                self.pause()
        if self._waiter is not None:
            self._wake()

    def broken(self, *, is_malformed: bool) -> None:
        self._connection = None
        # In mid-stream, bytes that are not HTTP count as a broken connection.
        self._fail(NOT_HTTP if is_malformed and self._call is not None else BROKEN)

    def _fail(self, trouble: Trouble) -> None:
        if self._failure is not None:
            return
        self._failure = trouble
        if self.sink is not None:
            self.sink.fail(self.failure(*trouble))
        self._wake()

    # -- waiting

    def _taken(self) -> bytes:
        parts, self._parts, self._held_bytes = self._parts, None, 0
        if self._is_paused:
            self.resume()
        if not parts:
            return b""
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def news(self, limit_s: float) -> None:
        """Waits for more of the head or the body; LegError for a failure, or if nothing comes in time."""
        if self._failure is None:
            self._waiter = waiter = self._loop.create_future()
            self._timer = self._loop.call_later(limit_s, self._late, limit_s)
            try:
                await waiter
            finally:
                self._timer.cancel()
                self._timer = self._waiter = None
        if self._failure is not None and not self._parts:
            raise self.failure(*self._failure)

    def _late(self, limit_s: float) -> None:
        """As a `TimeLimit`, which would be one object more for each wait."""
        if self._timer is not None and stood_still(self._timer, self._loop):
            self._timer = self._loop.call_later(limit_s, self._late, limit_s)
        else:
            self.give_up_waiting()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
