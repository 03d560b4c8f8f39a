"""What a profile is fitted to: measured cells, each with the runs to simulate for it.

The published grid has cells of one run each, whose arrivals are not known: they are simulated with several seeds and
the means are compared. An own sweep has the runs themselves, so the same arrivals are simulated.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..experiment.cells import MeasuredCell, gather
from ..experiment.records import Outcome, RunResult
from ..experiment.run import Run
from ..tables.published_cells import SECONDS, config_of, read_cells

UNTIL_COUNT_S = 1e-9  # a run of so long an arrival window ends with the last of its `conversations`
LEAST_SHARE = 0.99  # of requests that must have finished: a run that lost some measured only the survivors


@dataclass(frozen=True, slots=True)
class Observation:
    """One cell: three means in s over `n` later turns, and the runs to simulate for it."""

    config: str  # 2P_2D, or 2P_2pD for x = 1, as the published rows call it; 2P_2D-x0.5
    context: str
    qps: float
    n: int
    first_ttft_s: float
    later_ttft_s: float
    later_tpot_s: float
    runs: tuple[Run, ...]

    @property
    def means(self) -> tuple[float, float, float]:
        return self.first_ttft_s, self.later_ttft_s, self.later_tpot_s


def from_published(path: Path, seeds: int) -> list[Observation]:
    return _observations((cell, _runs(cell, seeds)) for cell in read_cells(path))


def _runs(cell: MeasuredCell, seeds: int) -> tuple[Run, ...]:
    # As many conversations as the cell had. Its arrivals were its own, so those of two configurations differ.
    count = cell.first_ttft_s.n if cell.first_ttft_s is not None else 1
    first_seed = zlib.crc32(config_of(cell).encode()) % 1_000_000
    return tuple(
        Run(
            topology=cell.topology,
            workload=cell.workload,
            qps=count / SECONDS,
            x=cell.x,
            seed=first_seed + seed,
            seconds=UNTIL_COUNT_S,
            conversations=count,
        )
        for seed in range(seeds)
    )


def from_sweep(results: Iterable[RunResult]) -> list[Observation]:
    by_cell: dict[str, list[RunResult]] = {}
    for result in results:
        if result.outcome is Outcome.FINISHED:
            by_cell.setdefault(result.run.cell, []).append(result)
    return _observations((gather(group)[0], tuple(one.run for one in group)) for group in by_cell.values())


def _observations(cells: Iterable[tuple[MeasuredCell, Sequence[Run]]]) -> list[Observation]:
    observations = []
    for cell, runs in cells:
        first, later, tpot = cell.first_ttft_s, cell.later_ttft_s, cell.later_tpot_s
        if first is None or later is None or tpot is None or cell.failures > (1 - LEAST_SHARE) * cell.requests:
            continue
        observations.append(
            Observation(
                config_of(cell),
                cell.workload.first.name,
                cell.qps,
                later.n,
                first.mean,
                later.mean,
                tpot.mean,
                tuple(runs),
            )
        )
    return observations
