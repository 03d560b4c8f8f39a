"""Which run comes next: pure bookkeeping over a grid and what has been measured of it.

A cell gets the grid's least number of seeds. Then the arms of a decision (every x of one topology, workload and QPS)
get one more seed at a time, up to the largest number, as long as the mean TTFT of later turns is not known to the
grid's precision in one of them. So arms are compared on the same seeds, which means on the same arrivals and pauses.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import msgspec
import numpy as np

from ppd.proxy.errors import ConfigError

from ..experiment.records import Outcome, Record, RunResult
from ..experiment.run import Run
from ..experiment.statistics import Samples, estimate
from .grid import Grid

Order = tuple[int, int, int]

LEAST_RUNS = 2  # with samples, for an interval to be trusted


@dataclass(slots=True)
class _Cell:
    order: tuple[int, int]  # position of its topology and its own in the grid
    seed_zero: Run
    open: set[int] = field(default_factory=set)  # seeds that wait or are being measured
    done: dict[int, Samples | None] = field(default_factory=dict)  # by seed; None: failed

    @property
    def has_finished(self) -> bool:
        # A cell whose runs all failed would fail again.
        return any(samples is not None for samples in self.done.values())


class Schedule:
    """Hands out each run once, and takes the results."""

    def __init__(
        self,
        grid: Grid,
        done: Iterable[RunResult] = (),
        *,
        only: Sequence[str] = (),
        topology_first: bool = False,
    ) -> None:
        """`done`: existing results. `only`: patterns of run ids or cells. ConfigError if nothing matches.

        All cells get their first seed before any gets its second, so that a sweep can be ended at any time. With
        `topology_first` a topology is finished before the next one begins, because starting one takes long.
        """
        self._grid = grid
        self._topology_first = topology_first
        self._cells = _cells(grid, only)
        self._arms: dict[tuple[str, str, float], list[_Cell]] = defaultdict(list)
        self._waiting: list[tuple[Order, Run]] = []
        self.finished = 0
        self.failed = 0
        for result in done:
            cell = self._cells.get(result.run.cell)
            if cell is not None and result.run == _with_seed(cell, result.run.seed):
                self._count(cell, result)
        for cell in self._cells.values():
            self._arms[_decision(cell.seed_zero)].append(cell)
            for seed in range(grid.seeds):
                if seed not in cell.done:
                    self._add(cell, seed)
        for arms in self._arms.values():
            self._extend(arms)

    @property
    def waiting(self) -> list[Run]:
        """Runs not handed out yet, in order. Results may add more."""
        return [run for _, run in self._waiting]

    @property
    def topologies(self) -> list[str]:
        return list(dict.fromkeys(run.topology for run in self.waiting))

    def take(self, topologies: Container[str] | None = None) -> Run | None:
        """The next run, of these topologies if given; None where none waits."""
        for index, (_, run) in enumerate(self._waiting):
            if topologies is None or run.topology in topologies:
                return self._waiting.pop(index)[1]
        return None

    def put_back(self, run: Run) -> None:
        self._add(self._cells[run.cell], run.seed)

    def done(self, result: RunResult) -> None:
        cell = self._cells[result.run.cell]
        cell.open.discard(result.run.seed)
        self._count(cell, result)
        self._extend(self._arms[_decision(result.run)])

    def _count(self, cell: _Cell, result: RunResult) -> None:
        is_failed = result.outcome is Outcome.FAILED
        self.failed += is_failed
        self.finished += not is_failed
        cell.done[result.run.seed] = None if is_failed else judged(result.records)

    def _extend(self, arms: Sequence[_Cell]) -> None:
        """Once the arms have no open runs: adds a seed that only some have, or the next one if more precision is
        needed.
        """
        going_on = [cell for cell in arms if cell.has_finished]
        if not going_on or any(cell.open for cell in arms):
            return
        there = set.union(*(set(cell.done) for cell in going_on))
        for seed in range(self._grid.max_seeds):
            lacking = [cell for cell in going_on if seed not in cell.done]
            if lacking and (seed in there or self._is_open_question(going_on)):
                for cell in lacking:
                    self._add(cell, seed)
                return

    def _is_open_question(self, arms: Sequence[_Cell]) -> bool:
        return any(wants_more(cell.done.values(), self._grid.precision) for cell in arms)

    def _add(self, cell: _Cell, seed: int) -> None:
        topology, place = cell.order
        order = (topology, seed, place) if self._topology_first else (seed, topology, place)
        cell.open.add(seed)
        insort(self._waiting, (order, _with_seed(cell, seed)), key=lambda entry: entry[0])


def judged(records: Iterable[Record]) -> Samples:
    """The TTFTs that decide whether a cell's precision is reached, in s: of later turns, or of first turns where there
    are no others.
    """
    measured = [record for record in records if record.measured]
    later = [record for record in measured if record.turn > 1] or measured
    return np.array([record.ttft_s for record in later if record.ttft_s is not None], dtype=float)


def wants_more(runs: Iterable[Samples | None], precision: float) -> bool:
    """Whether another seed is worth its time: not if the interval is narrow enough, nor if every run failed.

    One run is not enough to tell: its requests wait for each other, so the interval over them is too narrow.
    """
    finished = [samples for samples in runs if samples is not None]
    if not finished:
        return False
    told = [samples for samples in finished if len(samples)]
    if len(told) < LEAST_RUNS:
        return True
    known = estimate(told)
    return known is None or known.relative_width >= precision


def _cells(grid: Grid, only: Sequence[str]) -> dict[str, _Cell]:
    numbers: dict[str, int] = defaultdict(lambda: len(numbers))
    cells = {
        run.cell: _Cell((numbers[run.topology], place), run)
        for place, run in enumerate(grid.runs(0))
        if not only or any(fnmatchcase(name, pattern) for name in (run.cell, run.topology) for pattern in only)
    }
    if not cells:
        example = next(grid.runs(0)).cell
        raise ConfigError(f"only = {', '.join(map(repr, only))}: must match a cell of the grid, such as {example}")
    return cells


def _decision(run: Run) -> tuple[str, str, float]:
    return run.topology, run.workload.name, run.qps


def _with_seed(cell: _Cell, seed: int) -> Run:
    return msgspec.structs.replace(cell.seed_zero, seed=seed)
