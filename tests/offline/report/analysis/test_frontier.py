from __future__ import annotations

from collections.abc import Callable

import pytest

from ppd.offline.experiment.cells import MeasuredCell
from ppd.offline.report.analysis.arms import Arm
from ppd.offline.report.analysis.frontier import ArmPosition, frontier_panel, pareto
from ppd.offline.report.figures.frontier_figure import loads


def place(name: str, tokens: float, ttft: float) -> ArmPosition:
    return ArmPosition(Arm(name, None, "replica"), tokens, ttft)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([("a", 10, 1.0)], "a"),
        ([("a", 10, 1.0), ("b", 20, 2.0), ("c", 15, 3.0), ("d", 5, 0.9)], "abd"),
        ([("a", 10, 1.0), ("b", 10, 2.0)], "a"),
        ([("a", 10, 1.0), ("b", 20, 1.0)], "b"),
        ([("a", 10, 1.0), ("b", 10, 1.0)], "ab"),
    ],
)
def test_the_frontier_is_what_no_other_beats_in_both(places: list[tuple[str, float, float]], expected: str) -> None:
    found = pareto([place(*each) for each in places])
    assert "".join(each.arm.topology for each in found) == expected


def test_an_arm_stands_at_its_means_and_only_with_every_workload(cell: Callable[..., MeasuredCell]) -> None:
    cells = [
        cell("2P_2D", 0.0, later="long_gen", p99=0.3, tokens=1000.0),
        cell("2P_2D", 0.0, later="mid_bal", p99=0.1, tokens=3000.0),
        cell("2P_2D", 1.0, later="long_gen", p99=0.2, tokens=1000.0),
        cell("2P_2D", 1.0, later="mid_bal", p99=0.2, tokens=3000.0, failed=("dead",)),
        cell("4R", later="mid_bal"),
    ]
    found = frontier_panel(cells, lambda c: c.later_ttft_s)
    assert found.workloads == 2
    (only,) = found.places
    assert (only.arm.label, only.tokens_per_s) == ("2P_2D x=0", 2000.0)
    assert only.p99_ttft_s == pytest.approx(0.2)
    assert [arm.label for arm in found.absent] == ["2P_2D x=1", "4R"]
    assert found.frontier == found.places


@pytest.mark.parametrize(
    ("qps", "expected"),
    [([0.5, 2, 8, 12, 20], [2, 8, 20]), ([1, 4, 8], [1, 4, 8]), ([3, 1, 2, 9, 7], [1, 3, 9]), ([5], [5])],
)
def test_three_loads_are_drawn_the_papers_where_they_are_there(qps: list[float], expected: list[float]) -> None:
    assert loads(qps) == expected
