"""A small grid, results without a fleet, and executors that measure at once: what tests of a sweep are made of."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ppd.offline.experiment.records import Origin, Outcome, Record, RunResult
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.sweep.backend import FleetLost, Survey
from ppd.offline.sweep.grid import Arms, Grid

FIRST = Profile(name="small", new_tokens=128, output_tokens=128)
LATER = Profile(name="tiny", new_tokens=16, output_tokens=32)
WORKLOAD = Workload(first=FIRST, later=LATER)
ORIGIN = Origin(backend="simulate", engine="fake", model="m", gpu="H100", gpu_count=4)


def grid(**changes: object) -> Grid:
    """Two arms of 1P_1D and one of 2R, at two rates: six cells."""
    axes = Grid(
        arms=(Arms(topology="1P_1D", x=(0.0, 1.0)), Arms(topology="2R", x=())),
        first=(FIRST,),
        later=(LATER,),
        qps=(1.0, 4.0),
    )
    return msgspec.structs.replace(axes, **changes)


def run(seed: int = 0, **changes: object) -> Run:
    made = Run(topology="1P_1D", workload=WORKLOAD, qps=1.0, x=0.0, seed=seed)
    return msgspec.structs.replace(made, **changes)


def record(ttft_s: float = 0.1, *, conversation: int = 0, turn: int = 2, error: str = "") -> Record:
    return Record(
        conversation=conversation,
        turn=turn,
        measured=True,
        scheduled_s=1.0,
        sent_s=1.0,
        first_token_s=None if error else 1.0 + ttft_s,
        last_token_s=None if error else 2.0 + ttft_s,
        prompt_tokens=100,
        cached_tokens=50,
        output_tokens=11,
        route="LOCAL",
        prefill="",
        decode="D1",
        status=502 if error else 200,
        error=error,
    )


def finished(measured: Run, ttfts_s: tuple[float, ...] = (0.1, 0.1), *, wall_s: float = 1.0) -> RunResult:
    return RunResult(
        run=measured,
        outcome=Outcome.FINISHED,
        origin=ORIGIN,
        started="2026-01-01T00:00:00+00:00",
        wall_s=wall_s,
        records=tuple(record(ttft_s, conversation=number) for number, ttft_s in enumerate(ttfts_s)),
    )


def failed(measured: Run, reason: str = "D1 is gone") -> RunResult:
    return msgspec.structs.replace(finished(measured), outcome=Outcome.FAILED, reason=reason)


class Died(Exception):
    """An executor's process is gone."""


class FakeExecutor:
    """Does each run as it is submitted, by `answer`; what that raises is in the future."""

    def __init__(self, answer: Callable[[Run], RunResult] = finished, *, unfit: dict[str, str] | None = None) -> None:
        self.measured: list[Run] = []
        self.reopened = 0
        self.abandoned = 0
        self._answer = answer
        self._unfit = tuple((unfit or {}).items())

    def survey(self, samples: tuple[Run, ...]) -> Future[Survey]:
        told: Future[Survey] = Future()
        told.set_result(Survey("here", ORIGIN, self._unfit))
        return told

    def measure(self, asked: Run) -> Future[RunResult]:
        self.measured.append(asked)
        answered: Future[RunResult] = Future()
        try:
            answered.set_result(self._answer(asked))
        except Exception as exc:
            answered.set_exception(exc)
        return answered

    def is_death(self, exc: BaseException) -> bool:
        return isinstance(exc, Died)

    def reopen(self) -> None:
        self.reopened += 1

    def abandon(self) -> None:
        self.abandoned += 1

    def close(self) -> None: ...


class HangingExecutor(FakeExecutor):
    """Never finishes a run."""

    def measure(self, asked: Run) -> Future[RunResult]:
        self.measured.append(asked)
        return Future()


class Notes:
    """A watcher that remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.current: set[Run] = set()

    def started(self, begun: Run, place: str) -> None:
        self.current.add(begun)

    def put_back(self, begun: Run) -> None:
        self.current.remove(begun)

    def finished(self, result: RunResult) -> None:
        self.current.remove(result.run)

    def note(self, line: str) -> None:
        self.lines.append(line)

    def refresh(self) -> None: ...


DIES, LOST, HANGS = 1, 2, 3
"""Seeds of runs at which the backend's process dies, the fleet is lost, the run never ends."""


@dataclass(frozen=True, slots=True)
class FakePlan:
    folder: Path  # where the backend says what it lived through

    def open(self) -> FakeBackend:
        return FakeBackend(self.folder)


class FakeBackend:
    """Does what its runs' seeds say, in whatever process it was opened."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._say("opened")

    def survey(self, samples: tuple[Run, ...]) -> Survey:
        return Survey("fake", ORIGIN, tuple((run.topology, "too large") for run in samples[1:]))

    def measure(self, run: Run) -> RunResult:
        self._say(f"measuring {run.seed}")
        if run.seed == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.seed == LOST:
            raise FleetLost("it is gone")
        while run.seed == HANGS:
            time.sleep(0.01)
        return finished(run)

    def close(self) -> None:
        self._say("closed")

    def _say(self, what: str) -> None:
        with (self._folder / "said").open("a") as file:
            file.write(f"{what} by {os.getpid()}\n")


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """Writing more than this into a file fails, as on a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
