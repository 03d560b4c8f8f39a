"""A sweep as `ppd-build-table` runs it: begins or resumes a folder, measures what is left, stops on a signal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import click
import msgspec
from rich.console import Console
from rich.text import Text

from ppd.proxy.errors import ConfigError

from ..experiment.records import Outcome, RunResult
from ..experiment.run import POISSON
from ..sweep import grid_file
from ..sweep.folder import How, SweepFolder
from ..sweep.grid import Grid
from ..sweep.loop import Loop, SurveyedExecutor, survey, utc_now
from ..sweep.progress import Display, RunDurations, arrivals_s, spoken
from ..sweep.schedule import Schedule
from ..traces.formats import arrival_times
from .build_table_executors import how_of, open_executors, topologies_there
from .build_table_flags import AUTO, BuildTableFlags

USUAL_GRID = "paper"


@dataclass(frozen=True, slots=True)
class SweepJob:
    """What is to be done, by the flags and what the folder holds."""

    flags: BuildTableFlags
    grid: Grid
    folder: SweepFolder | None  # None: created once the executors are ready
    schedule: Schedule  # of what is still to be measured
    pace: RunDurations  # from the existing runs


def prepare(flags: BuildTableFlags, say: Callable[[str], None]) -> SweepJob:
    """ConfigError for a folder that holds a sweep, unless it is to be resumed.

    A file that can't be read is kept under another name, and its run is done again.
    """
    folder = _folder(flags)
    if folder is None and flags.resume:
        raise ConfigError(f"{flags.folder}: must be a sweep's folder to go on with: it has no sweep.json")
    if folder is not None:
        if not flags.resume:
            raise ConfigError(f"{flags.folder}: holds a sweep already; --resume goes on with it")
        grid = _grid(flags, folder)
        folder.check(grid, how_of(flags, _trace(grid)))

    def keep_aside(path: Path, reason: str) -> None:
        assert folder is not None, "only a folder has files"
        say(f"{reason}; kept as {folder.set_aside(path).name}, and its run is done again")

    return _job(flags, folder, keep_aside)


def look(flags: BuildTableFlags) -> SweepJob:
    """As `prepare`, but changes nothing."""
    return _job(flags, _folder(flags) if flags.out else None, lambda path, reason: None)


def _folder(flags: BuildTableFlags) -> SweepFolder | None:
    return SweepFolder(flags.folder) if (flags.folder / "sweep.json").exists() else None


def _job(flags: BuildTableFlags, folder: SweepFolder | None, unreadable: Callable[[Path, str], None]) -> SweepJob:
    grid, pace = _grid(flags, folder), RunDurations()

    def there() -> Iterator[RunResult]:
        for result in folder.readable(unreadable) if folder else ():
            pace.add(result)
            if flags.keep_failed or result.outcome is Outcome.FINISHED:
                yield result

    schedule = Schedule(grid, there(), only=flags.only, topology_first=flags.launch)
    return SweepJob(flags, grid, folder, schedule, pace)


def _grid(flags: BuildTableFlags, folder: SweepFolder | None) -> Grid:
    grid = folder.sweep.grid if folder and not flags.grid else grid_file.read(flags.grid or USUAL_GRID)
    if flags.topology:
        grid = grid.on(topologies_there(flags) if flags.topology == AUTO else flags.topology.split(","))
    seeds = flags.seeds or grid.seeds
    return msgspec.structs.replace(
        grid,
        seeds=seeds,
        max_seeds=max(seeds, flags.max_seeds or grid.max_seeds),
        precision=grid.precision if flags.precision is None else flags.precision,
    )


def list_runs(flags: BuildTableFlags) -> None:
    job = look(flags)
    waiting = job.schedule.waiting
    for run in waiting:
        click.echo(run.id)
    seconds = job.pace.left_s(waiting, 1)
    if seconds is None and not flags.simulate:
        seconds = sum(map(arrivals_s, waiting))
    more = f", {job.grid.max_seeds} seeds a cell at most" if job.grid.max_seeds > job.grid.seeds else ""
    lasting = "time known once some are done" if seconds is None else f"one after the other about {spoken(seconds)}"
    there = f"{job.schedule.finished + job.schedule.failed} are there"
    click.echo(f"{len(waiting)} runs{more}, {lasting}; {there}", err=True)


def measure(job: SweepJob, console: Console) -> tuple[SweepFolder | None, int]:
    """The folder, and 0 or the signal that ended the sweep. ConfigError where no fleet can measure what is left."""
    schedule = job.schedule
    with ExitStack() as stack:
        trace = _trace(job.grid)
        executors = open_executors(job.flags, trace, len(schedule.waiting), stack)
        came = stack.enter_context(_signals())

        def is_stopped() -> bool:
            return came() != 0

        def note(line: str) -> None:
            console.print(Text(line), soft_wrap=True)

        surveyed = survey(executors, schedule.waiting, is_stopped, note)
        if is_stopped():
            return job.folder, came()
        reachable = set().union(*(one.topologies for one in surveyed))
        folder = _taken_up(job, surveyed, how_of(job.flags, trace))
        display = stack.enter_context(Display(console, schedule, job.pace, len(executors), time.monotonic))
        Loop(schedule, folder, display, is_stopped).drive(surveyed)
    if not came() and (left := [run for run in schedule.waiting if run.topology in reachable]):
        raise ConfigError(f"{len(left)} runs are left that no fleet can measure now; --resume goes on with them")
    return folder, came()


def _trace(grid: Grid) -> Sequence[float] | None:
    # Read here, once: executors may be on machines that do not have the file.
    return None if grid.arrivals == POISSON else tuple(arrival_times(Path(grid.arrivals)))


def _taken_up(job: SweepJob, surveyed: Sequence[SurveyedExecutor], how: How) -> SweepFolder:
    folder = job.folder or SweepFolder.create(job.flags.folder, job.grid, surveyed[0].survey.origin, utc_now(), how)
    for one in surveyed:
        folder.take_up(job.grid, one.survey.origin, how)
    return folder


@contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Yields the first signal, or 0. SIGINT and SIGTERM end a sweep in order; a second signal exits at once."""
    came: list[int] = []

    def take(number: int, _: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            os._exit(128 + number)

    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: came[0] if came else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
