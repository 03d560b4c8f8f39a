"""One SUB socket: reads batches in slices, has gaps closed, and says when a stream is not up to date."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from ..errors import FormatError
from ..fleet.worker import Role
from ..runtime.message_parts import MessageParts
from ..runtime.tasks import Throttle
from ..telemetry.metrics import Metrics
from .event_stream import EventStream, Order
from .replay import SEQUENCE_BYTES

log = logging.getLogger(__name__)

FRAMES = 3  # topic, sequence number, batch
AGAIN_MS = 1000
"""After this long without a batch a new subscription looks again: the publisher may have learnt of it after it had
answered the replay, and have published in between."""
CLOSED_AT_ONCE = 32  # gaps, on a port to which many engines connect
PLACE_S = 10.0  # of these a replay that takes longer gives its place to others, and goes on when it has one again
PLACES = 100  # then the gap stays open
WAITING_BYTES = 4 * 1024 * 1024  # of a stream's batches, while a gap before them is being closed
UNHEARD_MS = 10_000  # without a connection: then the log says so, as ZeroMQ itself is silent about it


@dataclass(frozen=True, slots=True)
class Publisher:
    """Where a stream comes from."""

    stream: EventStream
    role: Role
    replay_endpoint: str  # empty: it replays nothing


Frames = Sequence[zmq.Frame]
Sender = Callable[[Frames], Publisher | str]
"""The publisher of a message, or why it is dropped."""
Replayer = Callable[[str, EventStream, Callable[[str], None]], Awaitable[bool]]
"""Of an endpoint, to a stream: whether nothing is missing then. See `replay`."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A batch before which others are missing."""

    publisher: Publisher
    sequence: int
    payload: memoryview


@dataclass(slots=True)
class _Waiting:
    """The batches that come while a gap before them is being closed."""

    batches: deque[_Held] = field(default_factory=deque)
    size: int = 0
    is_full: bool = False  # some were dropped, which is a gap once more

    def add(self, held: _Held) -> None:
        if self.size + len(held.payload) > WAITING_BYTES:
            self.is_full = True
        else:
            self.size += len(held.payload)
            self.batches.append(held)

    def next(self) -> _Held:
        held = self.batches.popleft()
        self.size -= len(held.payload)
        return held


class Subscription:
    """Reads one socket; whoever opens it closes it."""

    def __init__(
        self,
        replay: Replayer,
        throttle: Throttle,
        metrics: Metrics,
        sender: Sender,
        unheard_ms: int | None = UNHEARD_MS,
        place_s: float = PLACE_S,
    ) -> None:
        """unheard_ms: after how long without a first connection the log says so; None: never."""
        self._unheard_ms = unheard_ms
        self._place_s = place_s
        self._replay = replay
        self._throttle = throttle
        self._metrics = metrics
        self._sender = sender
        self._messages: MessageParts | None = None  # of the socket, once it is read
        self._monitor: zmq.asyncio.Socket | None = None  # of a socket that connects
        self._waiting: dict[EventStream, _Waiting] = {}  # streams whose gaps are closed apart
        self._closing: set[asyncio.Task[None]] = set()
        self._at_once = asyncio.Semaphore(CLOSED_AT_ONCE)

    async def run_connected(self, socket: zmq.asyncio.Socket, endpoint: str, publisher: Publisher) -> None:
        """A socket that connects to one publisher, until that has gone. Says once if there is none.

        A connection is one process. What still waits in the socket after it may be older than what the next one
        replays, so that gets another socket.
        """
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._monitor = monitor
        poller, stream = zmq.asyncio.Poller(), publisher.stream
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        socket.connect(endpoint)  # now that its events are seen
        try:
            await self._connected(monitor, endpoint)
            await self.catch_up(publisher)
            wait_ms = AGAIN_MS if publisher.replay_endpoint else None
            while True:
                stream.is_behind = has_more(socket) or has_more(monitor)
                ready = dict(await poller.poll(wait_ms))
                wait_ms = None
                if monitor in ready:
                    return
                if socket in ready:
                    await self.read(socket)
                else:
                    await self.catch_up(publisher)
        finally:
            stream.is_behind = True
            socket.disable_monitor()
            monitor.close()

    async def _connected(self, monitor: zmq.asyncio.Socket, endpoint: str) -> None:
        """Waits for it. What closes each connection at once, as a server of another kind, is no publisher either."""
        now = asyncio.get_running_loop().time
        until_s = None if self._unheard_ms is None else now() + self._unheard_ms / 1000
        event = None
        while event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if await monitor.poll(None if until_s is None else max(0, int(1000 * (until_s - now())))):
                event = parse_monitor_message(await monitor.recv_multipart())["event"]
            else:
                log.warning("no KV events come from %s: nobody answers there", endpoint)
                until_s = None

    async def read(self, socket: zmq.asyncio.Socket) -> None:
        """One slice of what waits, and the gap that it may have met."""
        if (held := await self._read(socket)) is not None:
            await self._close_gap(held)

    async def read_of_many(self, socket: zmq.asyncio.Socket) -> None:
        """As `read`, of publishers that do not wait for each other's gaps: a replay may take long, or not come."""
        held = await self._read(socket)
        if held is None:
            return
        if not held.publisher.replay_endpoint:
            await self._close_gap(held)  # there is nothing to wait for
            return
        held.publisher.stream.is_behind = True
        self._waiting[held.publisher.stream] = _Waiting()
        task = asyncio.create_task(self._close_apart(held, socket))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def is_catching_up(self, stream: EventStream) -> bool:
        return stream in self._waiting

    async def close(self) -> None:
        """Ends what `read_of_many` has begun."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _close_apart(self, held: _Held, socket: zmq.asyncio.Socket) -> None:
        publisher, stream = held.publisher, held.publisher.stream
        waiting = self._waiting[stream]
        gap: _Held | None = held
        try:
            while gap is not None or waiting.batches or waiting.is_full:
                if gap is not None:
                    await self._close_gap(gap)
                elif not waiting.batches:
                    waiting.is_full = False
                    await self.catch_up(publisher)
                async with self._throttle.slice() as until_s:
                    gap = self._taken(waiting, until_s)
            stream.is_behind = has_more(socket)
        except Exception as exc:
            log.error("a gap in KV events could not be closed", exc_info=exc)
            stream.lost()
        finally:
            del self._waiting[stream]

    def _taken(self, waiting: _Waiting, until_s: float) -> _Held | None:
        """Takes what has waited. A batch before which others are missing, or that can't be read, is returned."""
        while waiting.batches and time.perf_counter() < until_s:
            held = waiting.next()
            if not self._takes(held):
                return held
        return None

    async def _read(self, socket: zmq.asyncio.Socket) -> _Held | None:
        if self._messages is None:
            self._messages = MessageParts(zmq.Socket.shadow(socket), FRAMES)
        async with self._throttle.slice() as until_s:
            return self._slice(self._messages, until_s)

    def _slice(self, messages: MessageParts, until_s: float) -> _Held | None:
        while time.perf_counter() < until_s:
            frames = messages.next(until_s)
            # ZeroMQ connects again by itself, and tells of a connection's end before it hands out what the next brings.
            if frames is None or (self._monitor is not None and has_more(self._monitor)):
                break
            publisher = self._sender(frames) if _is_event(frames) else "foreign"
            if isinstance(publisher, str):
                self._dropped(publisher)
                continue
            held = _Held(publisher, int.from_bytes(frames[1].bytes), frames[2].buffer)
            if (waiting := self._waiting.get(publisher.stream)) is not None:
                waiting.add(held)
            elif not self._takes(held):
                return held
        return None

    def _takes(self, held: _Held) -> bool:
        """False for a batch before which others are missing, and for one that can't be read."""
        stream = held.publisher.stream
        if stream.order(held.sequence) is Order.RESTART:
            self._metrics.kv_event_gaps.labels("restart").inc()
            stream.restarted()
        match stream.order(held.sequence):
            case Order.AGAIN:
                return stream.pass_over(held.sequence, held.payload)
            case Order.NEXT:
                try:
                    stream.take(held.sequence, held.payload)
                except FormatError:
                    self._dropped("unreadable")
                    return False
                self._count(held.publisher)
                return True
            case _:
                return False

    async def _close_gap(self, held: _Held) -> None:
        publisher, stream = held.publisher, held.publisher.stream
        stream.is_behind = True
        is_closed = await self.catch_up(publisher)
        order = stream.order(held.sequence)
        if order is Order.AGAIN and stream.pass_over(held.sequence, held.payload):
            return
        if order is not Order.NEXT:
            if is_closed:  # the publisher that replays has not published this: one of the two counts no more
                stream.lost()
                return
            stream.resume(held.sequence)
        try:
            stream.take(held.sequence, held.payload)
        except FormatError:
            self._dropped("unreadable")
            stream.skip(held.sequence)
        self._count(publisher)

    async def catch_up(self, publisher: Publisher) -> bool:
        """Has the publisher replay what is missing, and says whether it has; without that nothing is known."""
        is_first = publisher.stream.is_new
        closed = await self._replayed(publisher)
        if not closed:
            publisher.stream.lost()
        if not is_first:
            self._metrics.kv_event_gaps.labels("closed" if closed else "open").inc()
        self._count(publisher)
        return closed

    async def _replayed(self, publisher: Publisher) -> bool:
        """Whether nothing is missing any more. What a replay has brought counts, though it may not have ended."""
        endpoint, stream = publisher.replay_endpoint, publisher.stream
        for _ in range(PLACES if endpoint else 0):
            async with self._at_once:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._place_s):
                        return await self._replay(endpoint, stream, self._dropped)
        return False

    def _count(self, publisher: Publisher) -> None:
        counts = publisher.stream.counts
        for kind, count in counts.items():
            self._metrics.kv_events.labels(kind, publisher.role).inc(count)
        counts.clear()

    def _dropped(self, why: str) -> None:
        self._metrics.kv_event_batches_dropped.labels(why).inc()


def has_more(socket: zmq.asyncio.Socket) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _is_event(frames: Frames) -> bool:
    return len(frames) == FRAMES and len(frames[1].buffer) == SEQUENCE_BYTES
