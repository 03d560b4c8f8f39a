from __future__ import annotations

from collections.abc import Callable

import pytest

from ppd.offline.experiment.cells import MeasuredCell
from ppd.offline.report.analysis.arms import arms
from ppd.offline.report.analysis.courses import Courses, by_load, by_turns


def means(found: Courses) -> dict[str, list[tuple[float, float, int]]]:
    return {c.arm.label: [(s.at, round(s.mean, 6), s.cells) for s in c.steps] for c in found.courses}


def test_workloads_that_one_arm_lacks_count_for_no_arm(cell: Callable[..., MeasuredCell]) -> None:
    cells = [
        cell("2P_2D", x, later=later, qps=qps, ttft=ttft * (1 - x / 2))
        for x in (0.0, 1.0)
        for qps in (1.0, 2.0)
        for later, ttft in (("mid_bal", 0.2), ("long_gen", 0.4), ("huge_paste", 0.9))
        if not (later == "huge_paste" and x == 0.0 and qps == 2.0)
    ]
    found = by_load(cells, arms(cells), lambda c: c.later_ttft_s)
    assert means(found) == {"2P_2D x=0": [(1.0, 0.3, 2), (2.0, 0.3, 2)], "2P_2D x=1": [(1.0, 0.15, 2), (2.0, 0.15, 2)]}
    assert (found.workloads, found.swept, found.varies) == (2, 3, False)


def test_without_a_workload_that_is_everywhere_each_point_takes_what_all_arms_have(
    cell: Callable[..., MeasuredCell],
) -> None:
    cells = [cell("4R", later="mid_bal", qps=1.0, ttft=0.2), cell("4R", later="long_gen", qps=2.0, ttft=0.4)]
    found = by_load(cells, arms(cells), lambda c: c.later_ttft_s)
    assert means(found) == {"4R": [(1.0, 0.2, 1), (2.0, 0.4, 1)]}
    assert found.varies


def test_a_load_that_no_arm_survived_ends_the_courses(cell: Callable[..., MeasuredCell]) -> None:
    cells = [cell("4R", qps=qps, failed=("dead",) if qps == 8.0 else ()) for qps in (1.0, 2.0, 8.0)]
    found = by_load(cells, arms(cells), lambda c: c.later_ttft_s)
    assert means(found) == {"4R": [(1.0, 0.1, 1), (2.0, 0.1, 1)]}
    assert not found.varies


def test_the_interval_of_a_mean_of_cells_comes_of_the_cells(cell: Callable[..., MeasuredCell]) -> None:
    cells = [cell("4R", later="mid_bal", half=0.03), cell("4R", later="long_gen", half=0.04)]
    (course,) = by_load(cells, arms(cells), lambda c: c.later_ttft_s).courses
    assert course.steps[0].half_width == pytest.approx(0.025)
    cells = [cell("4R", later="mid_bal", half=0.03), cell("4R", later="long_gen")]
    (course,) = by_load(cells, arms(cells), lambda c: c.later_ttft_s).courses
    assert course.steps[0].half_width is None


def test_turns_are_compared_at_equal_loads(cell: Callable[..., MeasuredCell]) -> None:
    cells = [cell("4R", turns=turns, qps=qps, ttft=0.1 * turns) for turns in (2, 4) for qps in (1.0, 2.0)]
    cells.append(cell("4R", turns=2, qps=8.0, ttft=7.0))
    found = by_turns(cells, arms(cells), lambda c: c.later_ttft_s)
    assert means(found) == {"4R": [(2, 0.2, 2), (4, 0.4, 2)]}
