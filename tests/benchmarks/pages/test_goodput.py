"""A mode's part of the records."""

from __future__ import annotations

from benchmarks.pages.goodput import BEGIN, END, as_markdown, with_goodput
from benchmarks.policies.records import CellRecord


def record(cell: str, mode: str, *rates: float) -> CellRecord:
    return CellRecord(cell=cell, mode=mode, goodput={"25ms@0.9": rates})


CELL = "mix.2P_2D.usual"
FOUND = {
    CELL: {mode: record(CELL, mode, rate) for mode, rate in (("slo", 2.0), ("table", 1.0), ("oracle", 4.0))},
    "mix.4R.usual": {"replica": record("mix.4R.usual", "replica", 3.0)},
}


def row(name: str) -> str:
    return as_markdown(name, FOUND).splitlines()[-1]


def test_a_mode_stands_beside_the_best_other_one_and_never_the_oracle() -> None:
    assert row("slo") == "| mix | 2 (2.00) | – |"
    assert row("table") == "| mix | 1 (0.50) | – |"
    assert row("oracle") == "| mix | 4 (2.00) | – |"
    assert row("replica") == "| mix | 3 | – |", "alone there"


def test_what_p_that_answer_bring_stands_beside_all_others_without_them() -> None:
    answering = "mix.2P_2D.prefills-answer"
    found = {**FOUND, answering: {mode: record(answering, mode, rate) for mode, rate in (("slo", 6.0), ("slack", 0.5))}}
    first, second = as_markdown("slo", found).split("With [`prefills_answer`]")
    assert first.strip().splitlines()[-1] == "| mix | 2 (2.00) | – |"
    assert second.splitlines()[-1] == "| mix | 6 (6.00) | – |"
    assert as_markdown("slack", found).splitlines()[-1] == "| mix | 0.5 (0.08) | – |"


def test_only_fleets_with_records_have_columns() -> None:
    assert "| trace | 2P_2D, 90 % | 2P_2D, 98 % |" in as_markdown("slo", FOUND)


def test_a_mode_without_records_says_so() -> None:
    assert as_markdown("lmetric", FOUND).startswith("Its goodput is not recorded")


def test_only_what_is_between_the_markers_is_written() -> None:
    page = with_goodput(f"before\n{BEGIN}old\n{END}after\n", "slo")
    assert page.startswith(f"before\n{BEGIN}")
    assert page.endswith(f"{END}after\n")
    assert "old" not in page
