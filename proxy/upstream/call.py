"""One request to a worker: what it waits for now, until when, and what its failure is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import LegError
from ..failures import Cause, Phase
from ..fleet.worker import Worker

CONNECT, SENT, HEADERS, STREAM = Phase.CONNECT, Phase.SENT, Phase.HEADERS, Phase.STREAM
"""Here, as an enum's members are slow to look up by their names."""


class Trouble(NamedTuple):
    """Why an answer failed, before it is known at which phase that is noticed."""

    message: str
    cause: Cause


GONE = Trouble("the worker is gone", Cause.WORKER_GONE)
LATE = Trouble("the worker did not answer in time", Cause.TIMEOUT)
BROKEN = Trouble("the worker broke off", Cause.RESET)
NOT_HTTP = Trouble("the worker's answer is not HTTP", Cause.MALFORMED)
UNREACHABLE = Trouble("the worker could not be reached", Cause.REFUSED)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: to connect, until the first byte of the answer's body, and between two reads after it."""

    connect_s: float
    first_s: float
    idle_s: float


class Call:
    """once: it must never reach its worker twice, nor late, as one that brings a handoff."""

    __slots__ = ("has_arrived", "is_gone", "on_failure", "once", "phase", "sent_s", "worker", "worker_id")

    def __init__(self, worker: Worker, *, once: bool = False) -> None:
        self.worker = worker
        self.worker_id = worker.id
        self.once = once
        self.phase = CONNECT
        self.is_gone = False
        self.has_arrived = False  # the worker has been heard of since it was sent
        self.sent_s = 0.0  # by the loop's clock
        self.on_failure: Callable[[Trouble], None] | None = None  # whoever waits for something

    def sent(self, now_s: float) -> None:
        """now_s: by the loop's clock."""
        self.phase, self.sent_s = SENT, now_s

    def give_up(self) -> None:
        """The worker is gone: whoever waits for it stops now."""
        self.is_gone = True
        if self.on_failure is not None:
            self.on_failure(GONE)

    def error(self, message: str, cause: Cause) -> LegError:
        """A failure at the phase that the call is in now."""
        return LegError(message, worker=self.worker_id, phase=self.phase, cause=cause)
