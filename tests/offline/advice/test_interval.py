"""How rates are written."""

from __future__ import annotations

import pytest

from ppd.offline.advice.interval import Interval, rounded


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.5432, 3, "0.543"),
        (72.94, 3, "72.9"),
        (1567.9, 3, "1,568"),
        (1.26, 2, "1.3"),
        (99.6, 2, "100"),
        (1567, 2, "1,567"),
    ],
)
def test_numbers_have_few_digits_and_no_powers_of_ten(value: float, digits: int, text: str) -> None:
    assert rounded(value, digits) == text


def test_an_interval_is_its_middle_and_its_bounds() -> None:
    assert Interval(2000.0, 1000.4, 4000.0).text() == "2,000 (1,000 to 4,000)"
    assert Interval(0.688).text() == "0.688"
