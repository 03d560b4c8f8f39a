from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
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


SAMPLE = """
import warnings, pytest

ROWS = pytest.mark.parametrize("number", [1, 2, 3])
seen = []

@pytest.fixture(autouse=AUTO)
def fresh():
    seen.clear()

@pytest.fixture
def run():
    yield
    assert not seen, "the end of a fixture that rows share"

@pytest.fixture
def order():
    raise OSError("its beginning")

@ROWS
def test_of_what_is_left_by_rows_before(number):
    seen.append(number)
    assert 1 in seen

@ROWS
@pytest.mark.usefixtures("fresh")
def test_of_the_same_with_a_fixture_that_is_not_named(number):
    seen.append(number)
    assert 1 in seen

@pytest.mark.parametrize("numbers", [[1], [2]])
@pytest.mark.parametrize("more", [1, 2])
def test_of_a_value_that_a_row_changes(numbers, more):
    numbers.append(more)
    assert len(numbers) < 3

class TestOfWhatAnObjectHolds:
    @ROWS
    def test(self, number):
        self.seen = [*getattr(self, "seen", []), number]
        assert 1 in self.seen

@ROWS
def test_of_an_answer_that_nobody_looks_at(number):
    return number == 2

@ROWS
@pytest.mark.xfail(strict=True)
def test_of_failures_that_are_expected(number):
    assert number == 2

@ROWS
def test_of_one_failure_that_is_known(number):
    if number == 2:
        pytest.xfail("known")

@ROWS
def test_of_a_failure_beside_one_that_is_known(number):
    if number == 2:
        pytest.xfail("known")
    assert number == 1

@ROWS
def test_of_a_failure_after_a_row_that_is_left_out(number):
    if number == 1:
        pytest.skip("too small")
    assert number == 2

@ROWS
def test_of_the_end_of_the_program(number):
    if number == 2:
        raise SystemExit(0)

@ROWS
def test_of_a_warning(number):
    if number == 2:
        warnings.warn("it is late")

@ROWS
def test_of_a_parameter_with_a_value(number, most=2):
    assert number <= most

def test_of_no_table_with_such_a_parameter(least=0):
    assert least == 0

@ROWS
def test_of_a_fixture_that_fails_at_its_end(number, run):
    seen.append(number)

@ROWS
def test_of_a_fixture_that_fails_at_its_beginning(number, order):
    pass

@pytest.mark.parametrize("number", [])
def test_of_no_rows(number):
    pass
"""


def outcomes(folder: Path, *flags: str) -> dict[str, str]:
    """The worst that became of the rows of each test. flags: of pytest's."""
    argv = (sys.executable, "-m", "pytest", "-q", "-rA", "--tb=no", "-W", "error", "-c", os.devnull, *flags)
    quiet = [part for name in ("asyncio", "schemathesis", "cacheprovider") for part in ("-p", f"no:{name}")]
    env = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[1]}:{folder}"}
    done = subprocess.run([*argv, *quiet, folder], cwd=folder, env=env, capture_output=True, text=True, check=False)
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        outcome, _, rest = line.partition(" ")
        if outcome in WORST and "::" in rest:
            name = rest.split("[")[0].split(" ")[0]
            found[name] = min(found.get(name, outcome), outcome, key=WORST.index)
    return found


WORST = ("ERROR", "FAILED", "PASSED", "XFAIL")


@pytest.mark.slow
@pytest.mark.parametrize("auto", [False, True])
def test_no_failure_of_a_row_is_hidden_by_the_others(tmp_path: Path, auto: bool) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE.replace("AUTO", str(auto)))
    (tmp_path / "plugin.py").write_text(
        "from tests.whole_tables import WholeTables\n"
        "def pytest_configure(config): config.pluginmanager.register(WholeTables())\n"
    )
    rows = outcomes(tmp_path)
    assert len(rows) == SAMPLE.count("def test") - 1, "of no rows nothing becomes"
    assert list(rows.values()).count("PASSED") == 2 + (not auto)
    assert outcomes(tmp_path, "-p", "plugin") == rows
