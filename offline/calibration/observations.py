"""What a profile is fitted to: measured cells, each with the runs to simulate for it.

The published grid has cells of one run each, whose arrivals are not known: they are simulated with several seeds and
the means are compared. An own sweep has the runs themselves, so the same arrivals are simulated.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..experiment.cells import MeasuredCell, gather
from ..experiment.records import Outcome, RunResult
from ..experiment.run import Run
from ..tables.published_cells import SECONDS, config_of, read_cells

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
    def runs(cell: MeasuredCell) -> tuple[Run, ...]:
        return tuple(
            Run(
                topology=cell.topology,
                workload=cell.workload,
                qps=cell.qps,
                x=cell.x,
                seed=seed,
                seconds=SECONDS,
            )
            for seed in range(seeds)
        )

    return _observations((cell, runs(cell)) for cell in read_cells(path))


def from_sweep(results: Iterable[RunResult]) -> list[Observation]:
    by_cell: dict[str, list[RunResult]] = {}
    for result in results:
        if result.outcome is Outcome.FINISHED:
            by_cell.setdefault(result.run.cell, []).append(result)
    return _observations((gather(group)[0], tuple(one.run for one in group)) for group in by_cell.values())


def unrecognised_share(path: Path, local: str, split: str) -> float:
    """The share of later turns of configuration `local` that went through P although they should have stayed on D.

    The prototype recognises a conversation by a piece of its text and sends what it does not recognise through P. Most
    local turns have the median TTFT. Turns with the TTFT of `split` lift the mean above it, so their share is
    (mean - median) / (mean of `split` - median); this returns its median over cells of small context and 2 to 8 QPS.
    """
    cells = {(config_of(cell), cell.workload.name, cell.qps): cell for cell in read_cells(path)}
    shares = []
    for (config, workload, qps), cell in cells.items():
        other = cells.get((split, workload, qps))
        if config != local or other is None or cell.workload.first.name != "small" or not 2 <= qps <= 8:
            continue
        here, there = cell.later_ttft_s, other.later_ttft_s
        if here is not None and here.p50 is not None and there is not None and there.mean > here.p50:
            shares.append((here.mean - here.p50) / (there.mean - here.p50))
    return max(0.0, statistics.median(shares)) if shares else 0.0


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
