"""What measures runs: a *backend* (one fleet or one simulator, a run at a time), and the *executor* that it lives in.

The sweep knows backends only by these protocols. A `BackendPlan` travels to the executor's process, perhaps on another
machine. The backend is opened there and stays open until the sweep ends.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from ppd.proxy.errors import PPDError

from ..experiment.records import Origin, RunResult
from ..experiment.run import Run


@dataclass(frozen=True, slots=True)
class Survey:
    """What a backend found where it was opened."""

    place: str  # shown to users
    origin: Origin
    unfit: tuple[tuple[str, str], ...] = ()  # topologies that it can't measure, each with the reason


class FleetLost(PPDError):
    """A backend cannot measure a run's topology any more; the run was not done, and another backend may do it."""


class Backend(Protocol):
    def survey(self, samples: tuple[Run, ...]) -> Survey:
        """Whether it works, and which topologies it can measure; `samples`: a run of each. PPDError if it does not."""

    def measure(self, run: Run) -> RunResult:
        """Finished, or failed with a reason. FleetLost where it could not even be tried."""

    def close(self) -> None: ...


class BackendPlan(Protocol):
    """Picklable. Opening is quick and does not fail; a survey finds out whether the backend works."""

    def open(self) -> Backend: ...


class Executor(Protocol):
    """Holds one backend in another process and measures one run at a time."""

    def survey(self, samples: tuple[Run, ...]) -> Future[Survey]: ...

    def measure(self, run: Run) -> Future[RunResult]: ...

    def is_death(self, exc: BaseException) -> bool:
        """Whether a call failed because its process died, and not by an error of its own."""

    def reopen(self) -> None: ...

    def abandon(self) -> None:
        """Ends the current run, unfinished. `close` still has to be called."""

    def close(self) -> None:
        """Waits until the backend, and a fleet that it started, are gone."""
