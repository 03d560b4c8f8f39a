"""Limits on one client's connection: on its time in each phase, and on requests that it abandons."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ..errors import RequestError
from . import response

CLOSE_S = 5.0  # for a client to take the last bytes when its connection is closed
LEFT_LIMIT = 500  # a connection is dropped after more abandoned requests than this, ...
LEFT_SHARE = 0.5  # ... if they are more than this share of its requests (HTTP/2 "rapid reset")


class ConnectionPhase(Enum):
    WAITING = "waiting"  # for a request's first byte
    HEAD = "head"  # part of a request's head has come
    BUSY = "busy"  # a request is served: it has time-outs of its own


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. head_s: for a connection's first byte, and for each head. idle_s: between two requests."""

    head_s: float
    idle_s: float


class AtWork(Protocol):
    """A request under way."""

    is_multiplexed: bool

    def leave(self) -> None: ...  # the client is gone


class ConnectionLimits:
    """The phase of one client's connection and its deadline. now: a monotonic clock in seconds."""

    def __init__(self, transport: asyncio.Transport, patience: Patience, now: Callable[[], float]) -> None:
        self.transport = transport
        self.phase = ConnectionPhase.WAITING
        self.is_stalled = False  # the client does not take its answer, which has a time-out of its own
        self._patience = patience
        self._now = now
        self._deadline_s = now() + patience.head_s
        self._at_work: set[AtWork] = set()
        self._requests = 0
        self._left = 0
        self._is_multiplexed = False
        self._is_ending = False

    def heard(self) -> None:
        """Bytes came. On HTTP/2 they need not belong to a request, so only the idle time counts there."""
        if self.phase is ConnectionPhase.WAITING and not self._is_multiplexed:
            self.phase = ConnectionPhase.HEAD
            self._deadline_s = self._now() + self._patience.head_s

    def began(self, request: AtWork) -> None:
        self.phase = ConnectionPhase.BUSY
        self._is_multiplexed = request.is_multiplexed
        self._at_work.add(request)
        self._requests += 1

    def ended(self, request: AtWork, *, left: bool) -> None:
        """left: the client went before the answer was complete."""
        self._at_work.discard(request)
        self._left += left
        if self._left > LEFT_LIMIT and self._left > LEFT_SHARE * self._requests:
            self.abort()
        elif not self._at_work:
            self.phase = ConnectionPhase.WAITING
            self._deadline_s = self._now() + self._patience.idle_s

    def lost(self) -> None:
        """The client has left. Hypercorn reports that too, but not while it holds back a pipelined request."""
        for request in tuple(self._at_work):
            request.leave()

    def close_if_overdue(self) -> None:
        """Aborts a connection that was closed already, if its client has not taken the last bytes in time."""
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
        """Half-closes, for a client that may still send: unread input causes a reset, which can overtake the answer."""
        self._is_ending = True
        self.phase = ConnectionPhase.WAITING
        self._deadline_s = self._now() + CLOSE_S
        self.transport.write_eof()

    def break_off(self) -> None:
        """Drops the connection, so that the client sees that its answer is incomplete, unless it is closing already."""
        if not self._is_ending:
            self.abort()

    def abort(self) -> None:
        self.transport.abort()


def _late() -> RequestError:
    error = RequestError("the request's head did not come in time")
    error.status = 408
    return error
