"""How much failed, by arm and load: the paper's table 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from ...experiment.cells import MeasuredCell, is_evidence
from ...experiment.statistics import CONFIDENCE
from .arms import Arm, arms


@dataclass(frozen=True, slots=True)
class FailureRate:
    arm: Arm
    qps: float
    requests: int  # of runs that finished
    failures: int
    workloads: int
    lost: int  # workloads whose cell is no evidence
    failed_runs: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's 95 % interval of the share of failed requests, as if requests failed independently."""
        if not self.requests:
            return None
        found = stats.binomtest(self.failures, self.requests).proportion_ci(CONFIDENCE, method="wilson")
        return float(found.low), float(found.high)


def failure_rates(cells: Sequence[MeasuredCell]) -> list[FailureRate]:
    loads = sorted({cell.qps for cell in cells})
    rates = []
    for arm in arms(cells):
        for qps in loads:
            group = [cell for cell in cells if Arm.of(cell) == arm and cell.qps == qps]
            if group:
                rates.append(_rate(arm, qps, group))
    return rates


def _rate(arm: Arm, qps: float, group: Sequence[MeasuredCell]) -> FailureRate:
    return FailureRate(
        arm=arm,
        qps=qps,
        requests=sum(cell.requests for cell in group),
        failures=sum(cell.failures for cell in group),
        workloads=len(group),
        lost=sum(not is_evidence(cell) for cell in group),
        failed_runs=sum(len(cell.failed) for cell in group),
    )
