"""What can measure a run: a *station*, one fleet or one simulator, that takes a run at a time.

A sweep's shell knows stations only by this. A `StationPlan` travels to the process, perhaps on another machine, where
the station is opened and stays until the sweep ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ppd.proxy.errors import PPDError

from ..experiment.records import Origin, RunResult
from ..experiment.run import Run


@dataclass(frozen=True, slots=True)
class Survey:
    """What a station found where it is."""

    place: str  # for the lines that users read
    origin: Origin
    unfit: tuple[tuple[str, str], ...] = ()  # topologies that it can't measure, each with the reason


class FleetLost(PPDError):
    """A station cannot measure a run's topology any more; the run is not done, and another station may do it."""


class Station(Protocol):
    def survey(self, samples: tuple[Run, ...]) -> Survey:
        """Whether it works, and which topologies it can measure; `samples`: a run of each. PPDError if it does not."""

    def measure(self, run: Run) -> RunResult:
        """Finished, or failed with a reason. FleetLost where it could not even be tried."""

    def close(self) -> None: ...


class StationPlan(Protocol):
    """Picklable. Opening is quick and does not fail; a survey finds out whether the station can work."""

    def open(self) -> Station: ...
