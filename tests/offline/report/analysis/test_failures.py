from __future__ import annotations

from collections.abc import Callable

import pytest

from ppd.offline.experiment.cells import MeasuredCell
from ppd.offline.report.analysis.failures import failure_rates


def test_requests_runs_and_workloads_are_counted_by_arm_and_load(cell: Callable[..., MeasuredCell]) -> None:
    cells = [
        cell("2P_2D", 0.0, later="mid_bal", requests=100, failures=10),
        cell("2P_2D", 0.0, later="long_gen", requests=100, failures=1),
        cell("2P_2D", 0.0, later="huge_paste", requests=0, ttft=None, failed=("dead", "dead")),
        cell("2P_2D", 0.0, later="mid_bal", qps=8.0),
        cell("4R"),
    ]
    found = failure_rates(cells)
    assert [(r.arm.label, r.qps, r.requests, r.failures, r.workloads, r.lost, r.failed_runs) for r in found] == [
        ("2P_2D x=0", 1.0, 200, 11, 3, 2, 2),
        ("2P_2D x=0", 8.0, 200, 0, 1, 0, 0),
        ("4R", 1.0, 200, 0, 1, 0, 0),
    ]


def test_a_share_of_none_has_an_interval_too(cell: Callable[..., MeasuredCell]) -> None:
    (rate,) = failure_rates([cell("4R", requests=100, failures=0)])
    assert rate.interval is not None
    assert list(rate.interval) == pytest.approx([0.0, 3.8415 / 103.8415], rel=1e-3, abs=1e-9)
    (rate,) = failure_rates([cell("4R", requests=0, ttft=None)])
    assert rate.interval is None
