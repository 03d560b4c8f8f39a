"""What one client's connection is doing, and until when it may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ..errors import RequestError
from . import response

CLOSE_S = 5.0  # for a client to take what is left when its connection is closed
LEFT_LIMIT = 500  # requests that a connection's client may leave, ...
LEFT_SHARE = 0.5  # ... if they are more than this share: "rapid reset" makes work and cancels it


class ConnectionPhase(Enum):
    WAITING = "waiting"  # for a request's first byte
    HEAD = "head"  # some of a request's head is here
    BUSY = "busy"  # a request is at work: it has time-outs of its own


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: for a connection's first byte and for each head; between two requests."""

    head_s: float
    idle_s: float


class AtWork(Protocol):
    """A request under way."""

    is_multiplexed: bool

    def leave(self) -> None:
        """Its client is gone."""


class ConnectionLimits:
    """What one client's connection is doing, and until when it may. `now` is a monotonic clock in seconds."""

    def __init__(self, transport: asyncio.Transport, patience: Patience, now: Callable[[], float]) -> None:
        self.transport = transport
        self.phase = ConnectionPhase.WAITING
        self.is_stalled = False  # it does not take what it was sent: that has a time-out of its own
        self._patience = patience
        self._now = now
        self._deadline_s = now() + patience.head_s
        self._at_work: set[AtWork] = set()
        self._requests = 0
        self._left = 0
        self._is_multiplexed = False
        self._is_ending = False

    def heard(self) -> None:
        """Bytes came. HTTP/2 has other frames than requests: there only the idle time counts."""
        if self.phase is ConnectionPhase.WAITING and not self._is_multiplexed:
            self.phase = ConnectionPhase.HEAD
            self._deadline_s = self._now() + self._patience.head_s

    def began(self, request: AtWork) -> None:
        """A request's head is whole."""
        self.phase = ConnectionPhase.BUSY
        self._is_multiplexed = request.is_multiplexed
        self._at_work.add(request)
        self._requests += 1

    def ended(self, request: AtWork, *, left: bool) -> None:
        """Its answer is over; `left`: before it was whole."""
        self._at_work.discard(request)
        self._left += left
        if self._left > LEFT_LIMIT and self._left > LEFT_SHARE * self._requests:
            self.abort()
        elif not self._at_work:
            self.phase = ConnectionPhase.WAITING
            self._deadline_s = self._now() + self._patience.idle_s

    def lost(self) -> None:
        """The client has left. Hypercorn tells too, but not while it holds a pipelined request back."""
        for request in tuple(self._at_work):
            request.leave()

    def look(self) -> None:
        """Ends a connection that is overdue, and drops one that was closed and whose client does not take the rest."""
        if self.transport.is_closing():
            if self.phase is not ConnectionPhase.BUSY and self._now() >= self._deadline_s:
                self.transport.abort()
            return
        if self.is_stalled or self.phase is ConnectionPhase.BUSY or self._now() < self._deadline_s:
            return
        if self.phase is ConnectionPhase.HEAD:
            self.transport.write(response.refusal(_late()))
        self.close(CLOSE_S)

    def close(self, limit_s: float) -> None:
        self.phase = ConnectionPhase.WAITING
        self._deadline_s = self._now() + limit_s
        self.transport.close()

    def close_gently(self) -> None:
        """The same where more is to be expected from the client: what it sends unread would be answered by a reset,
        which can overtake the last answer."""
        self._is_ending = True
        self.phase = ConnectionPhase.WAITING
        self._deadline_s = self._now() + CLOSE_S
        self.transport.write_eof()

    def break_off(self) -> None:
        """The client sees by the connection's end that its answer is not whole, unless the end is under way."""
        if not self._is_ending:
            self.abort()

    def abort(self) -> None:
        self.transport.abort()


def _late() -> RequestError:
    error = RequestError("the request's head did not come in time")
    error.status = 408
    return error
