"""The subject in a variant beside itself as usual: all that says what it is worth where no other mode was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.policies import records
from benchmarks.policies.__main__ import main
from benchmarks.policies.cells import Cell
from benchmarks.policies.measuring import Method
from benchmarks.policies.records import CellRecord
from benchmarks.policies.summary import changes, is_alone, ratios

QUESTION, STRICTER = "25ms@0.9", "25ms@0.98"
PAIRS, REPLICAS = Cell("mooncake", "1P_3D"), Cell("mooncake", "4R")
CHANGED = Cell("mooncake", "1P_3D", "no-ledger")
Rates = tuple[float, ...]


def one(cell: Cell, rates: Rates, stricter: Rates = (), mode: str = "slo") -> CellRecord:
    goodput = {QUESTION: rates} | ({STRICTER: stricter} if stricter else {})
    return CellRecord(cell=cell.name, mode=mode, goodput=goodput, method=Method(data=Path()).name)


USUAL = one(PAIRS, (2.0, 4.0, 6.0), (1.0,) * 6)
OTHER = one(PAIRS, (1.0, 1.0, 1.0), mode="slack")
WITHOUT = one(CHANGED, (1.0, 1.0, 4.0), (0.5,) * 6)


def found_of(*known: CellRecord) -> dict[str, dict[str, CellRecord]]:
    found: dict[str, dict[str, CellRecord]] = {}
    for outcome in known:
        found.setdefault(outcome.cell, {})[outcome.mode] = outcome
    return found


@pytest.mark.parametrize(
    ("known", "alone"),
    [
        ((WITHOUT,), True),
        ((WITHOUT, USUAL, OTHER), True),  # others were measured as usual only
        ((WITHOUT, msgspec.structs.replace(WITHOUT, mode="slack")), False),
        ((msgspec.structs.replace(WITHOUT, mode="slack"),), False),
        ((), False),
    ],
)
def test_a_part_of_which_only_the_subject_is_recorded_is_known_by_its_records(
    known: tuple[CellRecord, ...], alone: bool
) -> None:
    assert is_alone("slo", [CHANGED], found_of(*known)) is alone


@pytest.mark.parametrize(
    ("usual", "changed", "expected"),
    [
        ((2.0, 4.0, 6.0), (1.0, 1.0, 4.0), (0.5, (0.25, 2 / 3))),
        ((2.0, 4.0), (2.0, 4.0), (1.0, (1.0, 1.0))),
        ((0.0, 4.0), (1.0, 2.0), (0.75, (0.5, 0.5))),  # a seed without any goodput has no ratio of its own
        ((2.0, 4.0), (0.0, 0.0), (0.0, (0.0, 0.0))),
        ((0.0, 0.0), (1.0, 1.0), None),
        (None, (1.0, 1.0), None),
    ],
)
def test_a_variant_is_compared_with_the_usual_one_seed_by_seed(
    usual: Rates | None, changed: Rates, expected: tuple[float, Rates] | None
) -> None:
    found = found_of(one(CHANGED, changed), *([] if usual is None else [one(PAIRS, usual)]))
    made = changes([CHANGED], found, [QUESTION, STRICTER], "slo")
    if expected is None:
        assert made == {}
    else:
        (only,) = made[QUESTION]
        assert only.cell == CHANGED
        assert only.ratio == pytest.approx(expected[0])
        assert list(only.seed_range) == pytest.approx([*expected[1]])


def test_the_usual_variant_is_not_compared_with_itself() -> None:
    assert changes([PAIRS], found_of(USUAL), [QUESTION], "slo") == {}


def test_over_cells_the_least_and_the_most_are_told_with_where_they_are() -> None:
    other = Cell("mooncake", "4R", "no-ledger")
    found = found_of(USUAL, WITHOUT, one(REPLICAS, (1.0, 1.0)), one(other, (2.0, 2.0)))
    over = ratios(changes([CHANGED, other], found, [QUESTION], "slo")[QUESTION])
    assert over is not None
    assert over.geometric_mean == pytest.approx(1.0)
    assert (over.least, over.worst, over.most, over.best) == (0.5, CHANGED, 2.0, other)


def reported(folder: Path, part: str, *known: CellRecord) -> str:
    for outcome in known:
        records.append(folder, outcome)
    assert main(["--data", "nowhere", "--out", str(folder), "--parts", part, "--report"]) == 0
    return (folder / "policies.md").read_text()


def test_a_part_of_the_subject_alone_shows_it_beside_the_usual_variant(tmp_path: Path) -> None:
    text = reported(tmp_path, "ablations", USUAL, OTHER, WITHOUT)
    assert "| mooncake.1P_3D.usual | 4 (100%) |  | 1 (0%) |  |" in text
    assert "| mooncake.1P_3D.no-ledger | 2 (150%) | 0.50 (0.25 to 0.67) | 0.5 (0%) | 0.50 (0.50 to 0.50) |" in text
    assert text.index("mooncake.1P_3D.usual |") < text.index("mooncake.1P_3D.no-ledger | 2")
    where = "mooncake.1P_3D.no-ledger"
    assert f"| no-ledger | 1 | {QUESTION} | 0.50 | 0.50 | {where} | 0.50 | {where} |" in text
    assert "Not measured: no-elsewhere, no-returns, no-tpot, first-split.\n" in text
    assert "All modes at" not in text
    assert "![goodput](policies-ablations.png)" in text
    assert (tmp_path / "policies-ablations.png").read_bytes().startswith(b"\x89PNG")


def test_a_panel_is_left_out_where_a_question_was_not_answered(tmp_path: Path) -> None:
    usual, without = Cell("weka-32k", "4R"), Cell("weka-32k", "4R", "no-ledger")
    text = reported(tmp_path, "ablations", USUAL, WITHOUT, one(usual, (2.0,)), one(without, (1.0,)))
    assert "| weka-32k.4R.no-ledger | 1 (0%) | 0.50 (0.50 to 0.50) | not measured | – |" in text
    assert (tmp_path / "policies-ablations.png").exists()


def test_without_the_usual_variant_there_is_no_ratio_and_no_figure(tmp_path: Path) -> None:
    text = reported(tmp_path, "ablations", WITHOUT)
    assert "| mooncake.1P_3D.usual | not measured |  | not measured |  |" in text
    assert "| mooncake.1P_3D.no-ledger | 2 (150%) | – | 0.5 (0%) | – |" in text
    assert "policies-ablations.png" not in text
    assert not (tmp_path / "policies-ablations.png").exists()


def test_a_part_of_the_usual_variant_alone_has_no_figure_either(tmp_path: Path) -> None:
    text = reported(tmp_path, "traces", USUAL)
    assert "| mooncake.1P_3D.usual | 4 (100%) |  | 1 (0%) |  |" in text
    assert "policies-traces.png" not in text


def test_a_part_with_other_modes_compares_modes(tmp_path: Path) -> None:
    cell = Cell("mooncake", "1P_3D", "prefills-answer")
    text = reported(tmp_path, "answering", USUAL, one(cell, (8.0,) * 3), one(cell, (4.0,) * 3, mode="slack"))
    assert "| mooncake.1P_3D.prefills-answer | **8 (0%)** | 4 (0%) |" in text
    assert f"| prefills-answer | 1 | {QUESTION} | 2.00 | 2.00 | {cell.name} | 2.00 | {cell.name} |" in text
    assert (tmp_path / "policies-answering.png").exists()


@pytest.mark.parametrize("only", ["--estimate", "--report"])
def test_what_is_to_be_measured_again_is_kept_while_nothing_is_measured(only: str, tmp_path: Path) -> None:
    records.append(tmp_path, USUAL)
    before = records.load(tmp_path, PAIRS.name, USUAL.method)
    cell = ["--traces", "mooncake", "--fleets", "1P_3D", "--modes", "slo", "table"]
    assert main(["--data", "nowhere", "--out", str(tmp_path), *cell, "--again", "slo", only]) == 0
    assert records.load(tmp_path, PAIRS.name, USUAL.method) == before


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--modes", "slo", "table", "--again", "slo", "slack"], "again = 'slack': must be one of slo, table"),
        (["--traces", "weka"], "traces = 'weka': must be one of weka-32k, "),
        (["--fleets", "1P_3D", "8R"], "fleets = '8R': must be one of 1P_3D, 2P_2D, 4R"),
        (["--parts", "answering", "--fleets", "4R"], "fleets = '4R': must be one of 1P_3D, 2P_2D"),
    ],
)
def test_a_trace_or_fleet_of_none_of_the_parts_is_an_error(
    wrong: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--data", "data", "--out", str(tmp_path), "--estimate", *wrong]) == 1
    assert told in capsys.readouterr().err
