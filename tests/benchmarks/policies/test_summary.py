"""Ratios to the best other mode of each cell, and the page that shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.policies.campaign import Campaign
from benchmarks.policies.cells import PARTS, Cell
from benchmarks.policies.figures import goodput_figure, looks
from benchmarks.policies.measuring import Method, Question
from benchmarks.policies.records import CellRecord
from benchmarks.policies.report import page
from benchmarks.policies.summary import compared, ratios
from ppd.offline.goodput.modes import NAMES, OF_PAIRS, OF_REPLICAS

ONE, TWO, NONE = Cell("chats", "1P_3D"), Cell("chats", "2P_2D"), Cell("chats", "4R")
QUESTION = "25ms@0.9"


def of(cell: Cell, **rates: tuple[float, ...]) -> dict[str, dict[str, CellRecord]]:
    return {
        cell.name: {
            mode: CellRecord(cell=cell.name, mode=mode, goodput={QUESTION: found}) for mode, found in rates.items()
        }
    }


FOUND = {
    **of(ONE, slo=(2.0, 4.0), table=(1.0, 2.0), always_local=(1.0, 1.0), oracle=(9.0, 9.0)),
    **of(TWO, slo=(1.0,), table=(0.5,), always_local=(2.0,)),
    **of(NONE, slo=(1.0,), replica=(0.0,)),
}


def test_the_best_other_mode_is_taken_in_each_cell_and_the_oracle_is_not_one() -> None:
    found = compared((ONE, TWO, NONE), FOUND, QUESTION, "slo")
    assert [one.other.mode for one in found if one.other] == ["table", "always_local", "replica"]
    assert [one.ratio for one in found] == [pytest.approx(2.0), pytest.approx(0.5), None]
    over = ratios(found)
    assert over is not None
    assert over.geometric_mean == pytest.approx(1.0)
    assert (over.cells, over.least, over.worst) == (2, 0.5, TWO)
    assert over.without == 1


def test_a_subject_can_be_compared_with_one_mode_alone_and_any_mode_can_be_the_subject() -> None:
    beside = compared((ONE, TWO), FOUND, QUESTION, "slo", "always_local")
    assert [one.ratio for one in beside] == [pytest.approx(3.0), pytest.approx(0.5)]
    assert [one.ratio for one in compared((TWO,), FOUND, QUESTION, "table")] == [pytest.approx(0.25)]
    assert ratios(compared((NONE,), FOUND, QUESTION, "table")) is None


@pytest.mark.parametrize("mode", NAMES)
def test_replica_stands_for_a_rule_for_pairs_on_replicas_and_for_no_other(mode: str) -> None:
    found = {**of(NONE, slo=(3.0,), replica=(2.0,)), **of(ONE, slo=(3.0,), replica=(2.0,))}
    stands = mode in OF_PAIRS | OF_REPLICAS
    measured = mode == "slo"
    expected = [pytest.approx(1.5)] if stands else [pytest.approx(1.0)] if measured else []
    assert [one.ratio for one in compared((NONE,), found, QUESTION, "slo", mode)] == expected
    assert bool(compared((ONE,), found, QUESTION, "slo", mode)) is (mode in ("slo", "replica"))


def test_a_mode_that_meets_the_slo_nowhere_has_the_ratio_0() -> None:
    found = of(ONE, slo=(0.0,), table=(1.0,))
    over = ratios(compared((ONE,), found, QUESTION, "slo"))
    assert over is not None
    assert (over.geometric_mean, over.least) == (0.0, 0.0)


def test_the_page_names_the_best_and_the_ratio(tmp_path: Path) -> None:
    campaign = Campaign(
        cells=PARTS["traces"], modes=NAMES, subject="slo", method=Method(data=tmp_path), folder=tmp_path
    )
    text = page(campaign, ("traces",), FOUND)
    assert "| traces: the best other of each cell | 2 | 25ms@0.9 | 1.00 | 0.50 | chats.2P_2D.usual | 1 |" in text
    assert "| traces: oracle | 1 | 25ms@0.9 | 0.33 | 0.33 | chats.1P_3D.usual | 0 |" in text
    assert "| traces: session_hash | not measured | | | | | |" in text
    assert "| traces: always_local | not measured" not in text
    assert "**2 (0%)**" in next(line for line in text.splitlines() if line.startswith("| chats.2P_2D.usual |"))


def test_a_question_that_nothing_answers_has_no_table(tmp_path: Path) -> None:
    questions = (Question(0.025, 0.9, 2), Question(0.015, 0.9, 2))
    method = Method(data=tmp_path, questions=questions)
    campaign = Campaign(cells=PARTS["traces"], modes=NAMES, subject="slo", method=method, folder=tmp_path)
    text = page(campaign, ("traces",), FOUND)
    assert "Not measured: 15ms@0.9." in text
    assert text.count("Sessions a second") == 1


def test_no_two_modes_look_alike() -> None:
    assert len(set(looks(NAMES).values())) == len(NAMES)


def test_a_figure_shows_cells_without_any_goodput() -> None:
    # Equal rates: their mean may differ from them in the last digit.
    found = {**of(ONE, table=(0.1, 0.1, 0.1)), **of(NONE, replica=(0.0,))}
    assert goodput_figure((ONE, NONE), ("table", "replica"), found, QUESTION).startswith(b"\x89PNG")
