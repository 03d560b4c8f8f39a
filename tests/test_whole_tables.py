from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.whole_tables import Table, Tables, read

NUMBERS = Table("number", [1, 2, 3])
PAIRS = Table(("letter", "upper"), [("a", "A"), pytest.param("b", "?", id="the wrong one")])


def mark(names: str, rows: Iterable[Any], **others: Any) -> pytest.Mark:
    return pytest.mark.parametrize(names, rows, **others).mark


def test_each_row_of_a_table_is_tried_with_each_of_the_others() -> None:
    tried: list[tuple[int, str, str]] = []
    Tables([NUMBERS, PAIRS]).run(lambda number, letter, upper: tried.append((number, letter, upper)))
    assert sorted(tried) == [(number, *pair) for number in (1, 2, 3) for pair in (("a", "A"), ("b", "?"))]


def test_all_rows_that_fail_are_named_and_say_why() -> None:
    def check(number: int, letter: str, upper: str) -> None:
        if number > 1:
            assert letter.upper() == upper

    with pytest.raises(BaseExceptionGroup, match="2 of 6 rows: 2 the wrong one, 3 the wrong one") as caught:
        Tables([NUMBERS, PAIRS]).run(check)
    assert [exc.__notes__ for exc in caught.value.exceptions] == [
        [f"in the row {number} the wrong one"] for number in (2, 3)
    ]


def test_an_error_that_does_not_come_is_a_failure_too() -> None:
    def check(number: int) -> None:
        with pytest.raises(ZeroDivisionError):
            _ = 1 / (number - 1)

    with pytest.raises(BaseExceptionGroup, match="2 of 3 rows: 2, 3"):
        Tables([NUMBERS]).run(check)


def test_rows_may_be_skipped_and_a_test_is_if_all_are() -> None:
    def skip(number: int, least: int) -> None:
        if number < least:
            pytest.skip("too small")
        assert number == 3

    Tables([NUMBERS]).run(skip, least=3)
    with pytest.raises(BaseExceptionGroup, match="1 of 2 rows: 2"):
        Tables([NUMBERS]).run(skip, least=2)
    with pytest.raises(pytest.skip.Exception):
        Tables([NUMBERS]).run(skip, least=4)


@pytest.mark.parametrize("kept", [True, False])
def test_a_table_that_cannot_be_read_twice_or_has_slow_rows_is_left_as_it_is(kept: bool) -> None:
    rows = iter("ab") if kept else [pytest.param("a", marks=pytest.mark.slow), "b"]
    assert read(mark("letter", rows)) is None
    assert read(mark("letter", "ab", indirect=True)) is None


def test_rows_have_the_names_that_they_are_given() -> None:
    for ids, names in ((None, ["1", "2"]), (["one", "two"], ["one", "two"]), (lambda n: f"n={n}", ["n=1", "n=2"])):
        table = read(mark("number", [1, 2], ids=ids))
        assert table is not None
        assert [name for name, _ in table.rows] == names
