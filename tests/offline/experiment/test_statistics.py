"""Statistics against cases worked out by hand."""

from __future__ import annotations

import math

import pytest

from ppd.offline.experiment.statistics import estimate, half_width, percentile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0], 0.99, 3.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.5),
        ([4.0, 1.0, 3.0, 2.0], 0.0, 1.0),
        ([1.0, 2.0], 0.99, 1.99),
        (list(map(float, range(101))), 0.99, 99.0),
    ],
)
def test_percentiles_are_linear_between_neighbours(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_the_interval_is_students() -> None:
    """Mean 3, deviation sqrt(2.5), t(0.975; 4) = 2.776445: half of the interval is 1.963."""
    assert half_width([1, 2, 3, 4, 5]) == pytest.approx(1.9633, abs=1e-4)
    assert half_width([7.0]) is None


def test_one_run_gives_the_interval_of_its_values() -> None:
    found = estimate([[1, 2, 3, 4, 5]])
    assert found is not None
    assert (found.n, found.mean, found.p50) == (5, 3.0, 3.0)
    assert (found.p99, found.std, found.half_width) == pytest.approx((4.96, math.sqrt(2.5), 1.9633), abs=1e-4)


def test_several_runs_give_the_interval_of_their_means() -> None:
    """Means 2 and 6: deviation sqrt(8), t(0.975; 1) = 12.706, half of the interval 25.41; the mean is 4, of all."""
    found = estimate([[1.0, 3.0], [], [5.0, 7.0]])
    assert found is not None
    assert (found.n, found.mean, found.p50) == (4, 4.0, 4.0)
    assert found.half_width == pytest.approx(25.412, abs=1e-3)
    assert found.relative_width == pytest.approx(6.353, abs=1e-3)


def test_no_values_are_no_estimate_and_one_has_no_spread() -> None:
    assert estimate([[], []]) is None
    alone = estimate([[2.0]])
    assert alone is not None
    assert (alone.std, alone.half_width, alone.relative_width) == (None, None, math.inf)
