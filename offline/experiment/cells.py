"""Runs gathered into cells: what one combination of the sweep's axes measured, over all its seeds.

Tables, reports and calibration read cells. Failed requests are counted and are in no other figure; the warm-up is in
none. `is_evidence` says which cells may be compared, for tables and reports alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ppd.proxy.policy import Route
from ppd.servers.fleet.topology import Topology

from .records import Outcome, Record, RunResult
from .run import Workload
from .statistics import Estimate, estimate, percentile

ROUTES: Final = {0.0: Route.SPLIT, 1.0: Route.LOCAL}  # of an arm's later turns, by x
MAX_FAILED_SHARE: Final = 0.05  # of requests, and of later turns; the paper calls a service degraded beyond it
MIN_OWN_SHARE: Final = 0.9  # of an arm's later turns that must take its route


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCell:
    """Times in s; None where no request has the figure. Later turns are those after a conversation's first."""

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
    local_turns: int = 0  # finished later turns by route; those of replicas are in neither
    split_turns: int = 0
    lateness_p99_s: float | None = None  # from the time a request was due until it was sent

    @property
    def local_share(self) -> float | None:
        """The x that was reached; it is lower than asked where turns that were to be LOCAL had to be SPLIT."""
        chosen = self.local_turns + self.split_turns
        return self.local_turns / chosen if chosen else None

    @property
    def mode(self) -> str:
        if "R" in self.topology:
            return "hybrid" if "D" in self.topology else "replica"
        if "pD" in self.topology:
            return "0<x<1" if Topology.parse(self.topology).x_of_decodes[0] == 0.0 else "x=1"
        return {0.0: "x=0", 1.0: "x=1"}.get(self.x or 0.0, "0<x<1")


def is_evidence(cell: MeasuredCell) -> bool:
    return not why_no_evidence(cell)


def why_no_evidence(cell: MeasuredCell) -> str:
    """Empty where the cell is evidence.

    Requests that get through a failing fleet are another workload. Where few turns went the arm's way, whatever kept
    the others from it selected them.
    """
    if cell.failed:
        return "; ".join(filter(None, dict.fromkeys(cell.failed))) or "a run failed"
    if cell.failures > MAX_FAILED_SHARE * cell.requests:
        return f"{cell.failures} of {cell.requests} requests failed"
    if cell.later_failures > MAX_FAILED_SHARE * cell.later_requests:
        return f"{cell.later_failures} of {cell.later_requests} later turns failed"
    chosen = cell.local_turns + cell.split_turns
    for x, other, strays in ((0.0, Route.LOCAL, cell.local_turns), (1.0, Route.SPLIT, cell.split_turns)):
        if cell.x == x and chosen - strays < MIN_OWN_SHARE * chosen:
            return f"{strays} of {chosen} later turns went {other}"
    if cell.later_ttft_s is None:
        return "no later turn of this arm finished"
    return "" if cell.later_tpot_s is not None else "answers of one token have no TPOT"


def gather(results: Iterable[RunResult], *, own_way: bool = False) -> list[MeasuredCell]:
    """The cells of these runs, in order of first appearance.

    own_way: at x=0 and x=1, only later turns that went the arm's way enter the figures. The counts hold all turns.
    """
    by_cell: dict[str, list[RunResult]] = {}
    for result in results:
        by_cell.setdefault(result.run.cell, []).append(result)
    return [_cell(group, own_way) for group in by_cell.values()]


def _cell(results: Sequence[RunResult], own_way: bool) -> MeasuredCell:
    run = results[0].run
    finished = [result for result in results if result.outcome is Outcome.FINISHED]
    measured = [[record for record in result.records if record.measured] for result in finished]
    later = [[record for record in records if record.turn > 1] for records in measured]
    first = [[record for record in records if record.turn == 1] for records in measured]
    way = ROUTES.get(run.x) if own_way and run.x is not None else None
    compared = [[record for record in records if way in (None, record.route)] for records in later]
    rates = [rate for records in measured if (rate := _tokens_per_s(records)) is not None]
    late_s = [record.sent_s - record.scheduled_s for records in measured for record in records]
    return MeasuredCell(
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
        later_ttft_s=_of(compared, lambda record: record.ttft_s),
        later_tpot_s=_of(compared, lambda record: record.tpot_s),
        tokens_per_s=sum(rates) / len(rates) if rates else None,
        failed=tuple(result.reason for result in results if result.outcome is Outcome.FAILED),
        local_turns=_went(later, Route.LOCAL),
        split_turns=_went(later, Route.SPLIT),
        lateness_p99_s=percentile(late_s, 0.99) if late_s else None,
    )


def _of(groups: Sequence[Sequence[Record]], figure: Callable[[Record], float | None]) -> Estimate | None:
    return estimate([[value for record in group if (value := figure(record)) is not None] for group in groups])


def _failures(groups: Sequence[Sequence[Record]]) -> int:
    return sum(bool(record.error) for group in groups for record in group)


def _went(groups: Sequence[Sequence[Record]], route: Route) -> int:
    return sum(record.route == route and not record.error for group in groups for record in group)


def _tokens_per_s(records: Sequence[Record]) -> float | None:
    ends = [record.last_token_s for record in records if record.last_token_s is not None and not record.error]
    if not ends:
        return None
    tokens = sum(record.output_tokens for record in records if not record.error)
    return tokens / (max(ends) - min(record.scheduled_s for record in records))
