"""Carries a stream from its worker to its client, piece by piece as they come, without a task of its own.

While the client does not take what it was sent, the worker is not read. A worker that falls silent is given up.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Protocol

from .. import plane
from ..errors import LegError
from ..routing.stream import Streaming
from ..runtime.loop_watch import stood_still
from ..upstream.call import END_S

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """The client's side."""

    @property
    def chunked(self) -> asyncio.Transport | None: ...  # takes chunks of the body as they are; None: it must not

    def send(self, data: bytes, *, is_last: bool = False) -> None: ...

    def finish(self) -> None: ...  # the last was sent

    def fail(self) -> None: ...  # the stream can't be completed


class SilenceWatch:
    """Gives up workers of open streams that have been silent for `idle_s`, or up to a second longer.

    When this process has stood still, that time begins anew for all of them. One timer looks at all streams: one for
    each would take half a KiB.
    """

    def __init__(self, idle_s: float) -> None:
        self.idle_s = idle_s
        self._pause_s = min(1.0, idle_s / 4)
        self._streams: dict[Splice, None] = {}  # not a set, which may be five times as large as what is in it
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = -math.inf  # when this process stood still last

    def add(self, stream: Splice) -> None:
        self._streams[stream] = None
        if self._timer is None:
            self._wait()

    def discard(self, stream: Splice) -> None:
        self._streams.pop(stream, None)

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._look)

    def _look(self) -> None:
        loop, timer = asyncio.get_running_loop(), self._timer
        self._timer = None
        if timer is not None and stood_still(timer, loop):
            self._since_s = loop.time()
        heard_by_s = loop.time() - self.idle_s
        for stream in tuple(self._streams) if self._since_s <= heard_by_s else ():
            if stream.is_silent_since(heard_by_s):
                stream.give_up()
        if self._streams:
            self._wait()


class Splice:
    """One stream: `start` once, then `pause`, `resume` and `abandon`. silence: limits that of the worker."""

    __slots__ = ("_heard_s", "_is_paused", "_lane", "_last_wait", "_loop", "_receiver", "_silence", "_stream")

    def __init__(
        self, stream: Streaming, receiver: Receiver, loop: asyncio.AbstractEventLoop, silence: SilenceWatch
    ) -> None:
        self._stream = stream
        self._receiver = receiver
        self._silence = silence
        self._loop = loop
        self._heard_s = self._loop.time()
        self._last_wait: asyncio.TimerHandle | None = None  # for the end, once the answer is whole
        self._is_paused = False
        self._lane: plane.TextLane | None = None  # passes plain events on, past this object

    def start(self) -> None:
        self._receiver.send(self._stream.begin())
        self._written()
        if self._stream.is_over:
            self._expect_end()
        else:
            self._silence.add(self)
        self._stream.answer.hand_on(self)
        if self._is_paused:  # the first piece filled the client's buffer, but `hand_on` may have resumed the worker
            self._stream.answer.pause()
        client = self._receiver.chunked
        if client is not None and not self._stream.is_over:
            self._lane = self._stream.answer.text_lane(client)
            self._arm()

    def take(self, data: bytes, *, is_last: bool) -> None:
        self._heard_s = self._loop.time()
        try:
            self._learn()
            was_over = self._stream.is_over
            out = self._stream.feed(data) if data else b""
            if is_last:
                out += self._stream.end()
        except Exception:
            log.exception("a stream failed")
            self._receiver.fail()
            return
        if is_last:
            self._stop()
        elif self._stream.is_over and not was_over:
            self._expect_end()
        else:
            self._arm()
        if is_last:
            self._send_last(out)
        else:
            if out:
                self._receiver.send(out)
            self._written()

    def fail(self, error: LegError) -> None:
        try:
            self._learn()
            self._stop()
            out = self._stream.fail(error)
        except Exception:
            log.exception("a stream failed")
            self._receiver.fail()
            return
        self._send_last(out)

    def pause(self) -> None:
        self._is_paused = True
        self._stream.answer.pause()

    def resume(self) -> None:
        self._is_paused = False
        self._heard_s = self._loop.time()  # the worker's time begins anew
        self._stream.answer.resume()

    def abandon(self) -> None:
        self._learn()
        self._stop()
        self._stream.abandon()

    def is_silent_since(self, heard_by_s: float) -> bool:
        """While paused the worker cannot send: that is no silence."""
        heard_s = self._heard_s if self._lane is None else max(self._heard_s, self._lane.heard_s)
        return heard_s <= heard_by_s and not self._stream.answer.is_paused

    def give_up(self) -> None:
        self._stream.answer.give_up_waiting()

    def _send_last(self, data: bytes) -> None:
        self._receiver.send(data, is_last=True)
        self._written()  # before the client's next request on this connection is begun
        self._receiver.finish()

    def _written(self) -> None:
        try:
            self._stream.written()
        except Exception:  # its client is to have the answer all the same
            log.exception("what a stream taught could not be noted")

    def _expect_end(self) -> None:
        """The client has everything; waits a moment for the worker's end of message, to reuse its connection."""
        self._stop()
        self._last_wait = self._loop.call_later(min(END_S, self._silence.idle_s), self.give_up)

    def _arm(self) -> None:
        if self._lane is not None:
            plain = self._stream.plain
            if plain is None:
                self._lane.disarm()
            else:
                self._lane.arm(*plain)

    def _learn(self) -> None:
        """Tells the stream of events that the lane has passed on."""
        if self._lane is not None:
            text, events = self._lane.taken()
            if events:
                self._stream.passed(text, events)

    def _stop(self) -> None:
        if self._lane is not None:
            self._lane.close()
            self._lane = None
        self._silence.discard(self)
        if self._last_wait is not None:
            self._last_wait.cancel()
            self._last_wait = None
