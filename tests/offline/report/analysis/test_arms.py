from __future__ import annotations

from collections.abc import Callable

import pytest

from ppd.offline.experiment.cells import MeasuredCell
from ppd.offline.report.analysis.arms import Arm, arms, workload_class


@pytest.mark.parametrize(
    ("new", "output", "name"),
    [
        (16, 32, "decode-heavy"),
        (64, 1024, "decode-heavy"),
        (64, 64, "balanced"),
        (128, 128, "balanced"),
        (256, 64, "prefill-heavy"),
        (1024, 32, "prefill-heavy"),
    ],
)
def test_classes_are_the_papers(new: int, output: int, name: str) -> None:
    assert workload_class(new, output) == name


@pytest.mark.parametrize(
    ("x", "label"), [(None, "4R"), (0.0, "4R x=0"), (1 / 3, "4R x=1/3"), (2 / 3, "4R x=2/3"), (0.25, "4R x=0.25")]
)
def test_thirds_are_written_as_the_paper_writes_them(x: float | None, label: str) -> None:
    assert Arm("4R", x, "replica").label == label


def test_arms_come_by_topology_then_x(cell: Callable[..., MeasuredCell]) -> None:
    cells = [cell("4R"), cell("2P_2D", 1.0), cell("1P_3D", 1.0), cell("2P_2D", 0.0), cell("2P_2D", 1.0, qps=2.0)]
    assert [arm.label for arm in arms(cells)] == ["1P_3D x=1", "2P_2D x=0", "2P_2D x=1", "4R"]
