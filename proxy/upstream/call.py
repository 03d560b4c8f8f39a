"""One request to a worker: its phase, its time limits, and the errors it can end with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import LegError
from ..failures import Cause, Phase
from ..fleet.worker import Worker

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


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: to connect, to the first byte of the answer's body, and between two reads after that."""

    connect_s: float
    first_s: float
    idle_s: float


class Call:
    """once: it must not reach its worker twice, or late, because it carries a handoff."""

    __slots__ = ("has_arrived", "is_gone", "on_failure", "once", "phase", "sent_s", "worker", "worker_id")

    def __init__(self, worker: Worker, *, once: bool = False) -> None:
        self.worker = worker
        self.worker_id = worker.id
        self.once = once
        self.phase = CONNECT
        self.is_gone = False
        self.has_arrived = False  # the worker has answered something since this was sent
        self.sent_s = 0.0  # by the loop's clock
        self.on_failure: Callable[[Trouble], None] | None = None  # set by the code that waits for this call

    def sent(self, now_s: float) -> None:
        self.phase, self.sent_s = SENT, now_s

    def give_up(self) -> None:
        self.is_gone = True
        if self.on_failure is not None:
            self.on_failure(GONE)

    def error(self, message: str, cause: Cause) -> LegError:
        return LegError(message, worker=self.worker_id, phase=self.phase, cause=cause)
