"""Runs gathered into cells: what one combination of the sweep's axes measured, over all its seeds.

Tables, reports and the early stop all read these. Failed requests are counted and enter no other figure; the warm-up
enters none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .records import Outcome, Record, RunResult
from .runs import Workload
from .statistics import Estimate, estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Times in s; None where no request tells. Later turns are those after a conversation's first."""

    topology: str
    x: float | None
    workload: Workload
    qps: float  # conversations a second
    seeds: tuple[int, ...]  # of the runs that finished
    requests: int  # measured, of all turns
    failures: int  # of them
    later_requests: int
    later_failures: int
    ttft_s: Estimate | None  # of all turns
    tpot_s: Estimate | None
    first_ttft_s: Estimate | None
    later_ttft_s: Estimate | None
    later_tpot_s: Estimate | None
    tokens_per_s: float | None  # generated, from the first scheduled request to the last token; mean of the runs
    failed: tuple[str, ...] = ()  # why runs failed

    @property
    def mode(self) -> str:
        """The paper's categories: `replica`, `hybrid`, `x=0`, `0<x<1`, `x=1`."""
        if "R" in self.topology:
            return "hybrid" if self.x is not None else "replica"
        return {0.0: "x=0", 1.0: "x=1"}.get(self.x or 0.0, "0<x<1")


def gather(results: Iterable[RunResult]) -> list[Cell]:
    """The cells of these runs, in the order in which they first come."""
    by_cell: dict[str, list[RunResult]] = {}
    for result in results:
        by_cell.setdefault(result.run.cell, []).append(result)
    return [_cell(group) for group in by_cell.values()]


def _cell(results: Sequence[RunResult]) -> Cell:
    run = results[0].run
    finished = [result for result in results if result.outcome is Outcome.FINISHED]
    measured = [[record for record in result.records if record.measured] for result in finished]
    later = [[record for record in records if record.turn > 1] for records in measured]
    first = [[record for record in records if record.turn == 1] for records in measured]
    rates = [rate for records in measured if (rate := _tokens_per_s(records)) is not None]
    return Cell(
        topology=run.topology,
        x=run.x,
        workload=run.workload,
        qps=run.qps,
        seeds=tuple(result.run.seed for result in finished),
        requests=sum(map(len, measured)),
        failures=_failures(measured),
        later_requests=sum(map(len, later)),
        later_failures=_failures(later),
        ttft_s=_of(measured, lambda record: record.ttft_s),
        tpot_s=_of(measured, lambda record: record.tpot_s),
        first_ttft_s=_of(first, lambda record: record.ttft_s),
        later_ttft_s=_of(later, lambda record: record.ttft_s),
        later_tpot_s=_of(later, lambda record: record.tpot_s),
        tokens_per_s=sum(rates) / len(rates) if rates else None,
        failed=tuple(result.reason for result in results if result.outcome is Outcome.FAILED),
    )


def _of(groups: Sequence[Sequence[Record]], figure: Callable[[Record], float | None]) -> Estimate | None:
    return estimate([[value for record in group if (value := figure(record)) is not None] for group in groups])


def _failures(groups: Sequence[Sequence[Record]]) -> int:
    return sum(bool(record.error) for group in groups for record in group)


def _tokens_per_s(records: Sequence[Record]) -> float | None:
    ends = [record.last_token_s for record in records if record.last_token_s is not None and not record.error]
    if not ends:
        return None
    tokens = sum(record.output_tokens for record in records if not record.error)
    return tokens / (max(ends) - min(record.scheduled_s for record in records))
