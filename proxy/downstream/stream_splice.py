"""Carries a stream from its worker to its client, piece by piece as they come, without a task of its own.

While the client does not take what it was sent, the worker is not read. A worker that falls silent is given up.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from .. import plane
from ..errors import LegError
from ..routing.stream import Streaming
from ..upstream.call import END_S

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """The client's side."""

    @property
    def chunked(self) -> asyncio.Transport | None: ...  # takes chunks of the body as they are; None: it must not

    def send(self, data: bytes, *, is_last: bool = False) -> None: ...

    def fail(self) -> None: ...  # the stream can't be completed


class Splice:
    """One stream: `start` once, then `pause`, `resume` and `abandon`. idle_s: how long the worker may be silent."""

    __slots__ = ("_heard_s", "_idle_s", "_is_paused", "_lane", "_loop", "_receiver", "_stream", "_watch")

    def __init__(self, stream: Streaming, receiver: Receiver, loop: asyncio.AbstractEventLoop, idle_s: float) -> None:
        self._stream = stream
        self._receiver = receiver
        self._idle_s = idle_s
        self._loop = loop
        self._heard_s = self._loop.time()
        self._watch: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._lane: plane.TextLane | None = None  # passes plain events on, past this object

    def start(self) -> None:
        self._receiver.send(self._stream.begin())
        self._stream.begun()
        if self._stream.is_over:
            self._expect_end()
        else:
            self._watch = self._loop.call_later(self._idle_s, self._check_idle)
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
        if out or is_last:
            self._receiver.send(out, is_last=is_last)

    def fail(self, error: LegError) -> None:
        try:
            self._learn()
            self._stop()
            out = self._stream.fail(error)
        except Exception:
            log.exception("a stream failed")
            self._receiver.fail()
            return
        self._receiver.send(out, is_last=True)

    def pause(self) -> None:
        self._is_paused = True
        self._stream.answer.pause()

    def resume(self) -> None:
        self._is_paused = False
        self._heard_s = self._loop.time()  # while paused the worker could not send: that is no silence
        self._stream.answer.resume()

    def abandon(self) -> None:
        self._learn()
        self._stop()
        self._stream.abandon()

    def _check_idle(self) -> None:
        """One timer for the whole stream: moving it with each piece would cost more than the piece."""
        heard_s = self._heard_s if self._lane is None else max(self._heard_s, self._lane.heard_s)
        due_s = heard_s + self._idle_s
        if self._stream.answer.is_paused:
            due_s = self._loop.time() + self._idle_s
        if due_s > self._loop.time():
            self._watch = self._loop.call_at(due_s, self._check_idle)
        else:
            self._stream.answer.give_up_waiting()

    def _expect_end(self) -> None:
        """The client has everything; waits a moment for the worker's end of message, to reuse its connection."""
        self._stop()
        self._watch = self._loop.call_later(min(END_S, self._idle_s), self._stream.answer.give_up_waiting)

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
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
