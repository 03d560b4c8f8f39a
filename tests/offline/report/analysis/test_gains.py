from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from ppd.offline.experiment.cells import MeasuredCell
from ppd.offline.report.analysis.gains import bands, change, gains, pairs


@pytest.mark.parametrize(
    ("qps", "expected"),
    [
        (
            (0.5, 1, 2, 4, 6, 8, 10, 12, 16, 20),
            [("low (0.5–2)", 3), ("medium (4–8)", 3), ("high (12–20)", 3)],
        ),
        ((1, 4, 8), [("low (1)", 1), ("medium (4–8)", 2)]),
        ((10,), []),
        ((3,), [("low (3)", 1)]),
        ((3, 5, 7, 9, 11, 40), [("low (3–5)", 2), ("medium (7–9)", 2), ("high (11–40)", 2)]),
    ],
)
def test_loads_are_the_papers_bands_or_thirds(qps: tuple[float, ...], expected: list[tuple[str, int]]) -> None:
    assert [(band.label, len(band.qps)) for band in bands(qps)] == expected


def test_a_half_and_a_double_cancel_out() -> None:
    found = change([1.0, 1.0], [0.5, 2.0])
    assert found.pairs == 2
    assert found.typical == pytest.approx(0.0)
    assert found.median == pytest.approx(0.25)
    assert found.low is not None
    assert found.high is not None
    half = 12.7062 * math.log(2)  # Student's t of one degree of freedom; the logarithms are -ln 2 and ln 2
    assert [math.log1p(found.low), math.log1p(found.high)] == pytest.approx([-half, half], rel=1e-5)


def test_one_pair_has_no_interval() -> None:
    found = change([0.2], [0.1])
    assert found.typical == pytest.approx(-0.5)
    assert (found.low, found.high) == (None, None)


def test_only_points_where_both_arms_are_evidence_make_a_pair(cell: Callable[..., MeasuredCell]) -> None:
    cells = [
        cell("2P_2D", 0.0, qps=1, ttft=0.2),
        cell("2P_2D", 1.0, qps=1, ttft=0.1),
        cell("2P_2D", 0.0, qps=2, ttft=9.0, failed=("dead",)),
        cell("2P_2D", 1.0, qps=2, ttft=0.3),
        cell("2P_2D", 0.5, qps=1, ttft=0.15),
        cell("1P_3D", 1.0, qps=1),
    ]
    assert pairs(cells, "2P_2D", (1, 2)) == [(cells[0], cells[1])]
    (gain,) = gains(cells)
    assert (gain.topology, gain.band.name, gain.split_ttft_s, gain.local_ttft_s) == ("2P_2D", "low", 0.2, 0.1)
    assert gain.ttft.typical == pytest.approx(-0.5)
    assert gain.tpot.typical == pytest.approx(0.0)
