"""What a sweep shows while it runs: how much is done, what is measured now, how long the rest takes.

On a terminal one line is updated in place. Elsewhere lines are printed, at most one in ten seconds beside those about
failures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from ..experiment.records import Outcome, RunResult
from ..experiment.run import Run
from .schedule import Schedule

PLAIN_EVERY_S = 10.0
SHOWN_RUNS = 4  # current runs shown at most


class RunDurations:
    """Estimates how long runs take, from finished runs: of the same load, else of all, scaled.

    A simulated run is scaled by its tokens, a live one by how long conversations arrive. Failed runs do not count.
    """

    def __init__(self) -> None:
        self._alike: dict[tuple[str, float], list[float]] = defaultdict(list)
        self._wall_s = 0.0
        self._size = 0.0
        self._size_of = size

    def add(self, result: RunResult) -> None:
        if result.outcome is Outcome.FINISHED:
            self._alike[_load(result.run)].append(result.wall_s)
            self._wall_s += result.wall_s
            self._size_of = size if result.origin.backend == "simulate" else arrivals_s
            self._size += self._size_of(result.run)

    def of(self, run: Run) -> float | None:
        """Seconds; None before the first result."""
        alike = self._alike.get(_load(run))
        if alike:
            return sum(alike) / len(alike)
        return self._wall_s * self._size_of(run) / self._size if self._size else None

    def left_s(self, waiting: Iterable[Run], executors: int) -> float | None:
        each = [self.of(run) for run in waiting]
        known = [seconds for seconds in each if seconds is not None]
        return sum(known) / max(executors, 1) if len(known) == len(each) else None


def _load(run: Run) -> tuple[str, float]:
    return run.workload.name, run.qps


def size(run: Run) -> float:
    """The run's tokens, which the time of a simulated run grows with."""
    conversations = max(run.qps * run.seconds, run.conversations) + run.qps * run.warm_up_s
    return conversations * run.workload.longest_context


def arrivals_s(run: Run) -> float:
    """How long conversations keep arriving: the shortest time that a run takes on a fleet."""
    return run.warm_up_s + max(run.seconds, run.conversations / run.qps)


def spoken(seconds: float) -> str:
    """`2 h 5 min`, `3 min 20 s`, `40 s`, `0.3 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes >= 10 else f"{minutes} min {rest} s" if minutes else f"{rest} s"


class Display:
    """A context manager for as long as the sweep runs."""

    def __init__(
        self, console: Console, schedule: Schedule, pace: RunDurations, executors: int, now: Callable[[], float]
    ) -> None:
        self._console = console
        self._schedule = schedule
        self._executors = executors
        self._now = now
        self._said_s = -PLAIN_EVERY_S
        self._pace = pace
        self._current: dict[Run, str] = {}  # where each is measured
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._task = self._bar.add_task("runs", total=None)
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, run: Run, place: str) -> None:
        self._current[run] = place
        self.refresh()

    def put_back(self, run: Run) -> None:
        self._current.pop(run, None)

    def finished(self, result: RunResult) -> None:
        self._current.pop(result.run, None)
        self._pace.add(result)
        if result.outcome is Outcome.FAILED:
            self.note(f"failed: {result.run.id}: {result.reason}")
        elif self._live is None and self._now() - self._said_s >= PLAIN_EVERY_S:
            self._said_s = self._now()
            self.note(f"{result.run.id} took {spoken(result.wall_s)}; {self.line()}")

    def note(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def refresh(self) -> None:
        if self._live is None:
            return
        done, left = self._counts()
        self._bar.update(self._task, completed=done, total=done + left)
        current = list(self._current.items())
        lines = [Text(f"  {run.id}  {place}", "dim") for run, place in current[:SHOWN_RUNS]]
        if len(current) > SHOWN_RUNS:
            lines.append(Text(f"  and {len(current) - SHOWN_RUNS} more", "dim"))
        self._live.update(Group(self._bar, Text(self.line()), *lines), refresh=True)

    def line(self) -> str:
        done, left = self._counts()
        failed = f", {self._schedule.failed} of them failed" if self._schedule.failed else ""
        left_s = self.left_s()
        time = "" if left_s is None else f"; {spoken(left_s)} left"
        return f"{done} of {done + left} runs done{failed}{time}"

    def left_s(self) -> float | None:
        return self._pace.left_s([*self._schedule.waiting, *self._current], self._executors)

    def _counts(self) -> tuple[int, int]:
        done = self._schedule.finished + self._schedule.failed
        return done, len(self._schedule.waiting) + len(self._current)
