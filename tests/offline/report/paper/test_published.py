"""The published rows against the figures that their own description states, and against the paper's printed tables."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ppd.offline.experiment.cells import MeasuredCell
from ppd.offline.report.analysis.arms import modes
from ppd.offline.report.analysis.gains import PAPER_QPS, bands, gains, mean_ttft_s
from ppd.offline.report.analysis.study import Study
from ppd.offline.report.analysis.tradeoff import trade_off
from ppd.offline.report.analysis.winners import OBJECTIVES, TPOT, TTFT, disagreement, wins
from ppd.offline.report.page.document import Table, Text
from ppd.offline.report.paper import comparison, readings
from ppd.offline.report.paper.published import of_rows
from ppd.offline.report.write import write_published_report
from ppd.proxy.errors import FormatError

SOURCE = Path(__file__).parents[4] / "tables" / "source"
ROWS, DESCRIPTION = SOURCE / "ppd-h100-grid.csv.gz", SOURCE / "ppd-h100-grid.toml"
LOW, MEDIUM, HIGH = bands(PAPER_QPS)


@pytest.fixture(scope="module")
def study() -> Study:
    return of_rows(ROWS, DESCRIPTION)


def rounded(found: dict[str, float]) -> dict[str, float]:
    return {mode: round(100 * share, 1) for mode, share in found.items()}


@pytest.mark.parametrize(
    ("topology", "qps", "split_ms", "local_ms"),
    [
        ("1P_3D", LOW.qps, 162, 68),
        ("2P_2D", LOW.qps, 128, 67),
        ("3P_1D", LOW.qps, 124, 70),
        ("1P_3D", HIGH.qps, 955, 255),
        ("2P_2D", HIGH.qps, 259, 113),
        ("3P_1D", HIGH.qps, 220, 164),
    ],
)
def test_means_are_those_that_the_data_states(
    study: Study, topology: str, qps: Sequence[float], split_ms: int, local_ms: int
) -> None:
    for x, expected in ((0.0, split_ms), (1.0, local_ms)):
        found = [
            mean_ttft_s(cell)
            for cell in study.cells
            if (cell.topology, cell.x) == (topology, x) and cell.qps in qps and readings.is_anything(cell)
        ]
        assert round(1e3 * sum(found) / len(found)) == expected


@pytest.mark.parametrize("topology", ["1P_3D", "2P_2D", "3P_1D"])
def test_table_1_is_own_means_of_whole_runs_but_for_its_middle_column(study: Study, topology: str) -> None:
    found = [readings.OWN_WHOLE.of(study.cells, topology, band.qps) for band in (LOW, MEDIUM, HIGH)]
    low, medium, high = readings.PRINTED_GAINS[topology]
    assert readings.matches(found[0], low)
    assert not readings.matches(found[1], medium)
    assert readings.matches(found[2], high)


def test_no_other_reading_gives_as_many_of_table_1(study: Study) -> None:
    loads = (LOW, MEDIUM, HIGH)
    assert {each.name: readings.gain_matches(study.cells, each, loads) for each in readings.GAIN_READINGS} == {
        "own means, runs without a failed request": 6,
        "own means, any run with a figure": 3,
        "pairs, ratio of means": 1,
        "pairs, mean of changes": 0,
        "pairs, geometric mean of ratios": 0,
    }


def test_no_set_of_loads_gives_the_middle_column(study: Study) -> None:
    (low, low_off), (medium, medium_off) = (readings.closest_loads(study.cells, column) for column in (0, 1))
    assert (low, medium) == ((0.5, 1.0, 2.0), (1.0, 2.0, 4.0, 10.0))
    assert [low_off, medium_off] == pytest.approx([0.0, 2.8], abs=0.05)


def test_over_pairs_the_gain_of_3p_1d_does_not_shrink_with_load(study: Study) -> None:
    found = {(gain.topology, gain.band.name): gain for gain in gains(study.cells)}
    assert [round(100 * found["3P_1D", band].ttft.typical, 1) for band in ("low", "medium", "high")] == [
        -50.3,
        -48.7,
        -53.0,
    ]
    assert [found["3P_1D", band].ttft.pairs for band in ("low", "medium", "high")] == [37, 36, 31]


def test_winners_of_the_published_part(study: Study) -> None:
    found = {each.objective: each for objective in OBJECTIVES if (each := wins(study.cells, objective))}
    assert {each.points for each in found.values()} == {180}
    shares = {
        name: rounded({mode: each.share(mode) for mode in ("replica", "x=0", "x=1")}) for name, each in found.items()
    }
    assert shares == {
        "TTFT": {"replica": 70.6, "x=0": 0.0, "x=1": 29.4},
        "TPOT": {"replica": 9.2, "x=0": 53.6, "x=1": 37.2},
        "tokens/s": {"replica": 5.6, "x=0": 35.6, "x=1": 58.9},
    }
    assert disagreement(study.cells, TTFT, TPOT) == (159, 180)


def test_the_published_part_can_be_what_table_2_was_made_of(study: Study) -> None:
    for column, objective in enumerate(OBJECTIVES):
        found = wins(study.cells, objective)
        assert found is not None
        assert readings.can_be_printed(found, column, modes(study.cells))


@pytest.mark.parametrize(
    ("name", "possible"),
    [
        ("mean TTFT", True),
        ("mean TTFT, runs without a failed request", True),
        ("median TTFT", False),
        ("p99 TTFT", False),
    ],
)
def test_the_papers_ttft_winners_are_by_the_mean(study: Study, name: str, possible: bool) -> None:
    (reading,) = [reading for reading in readings.WIN_READINGS if reading.name == name]
    found = readings.wins_of(study.cells, reading)
    assert found is not None
    assert readings.can_be_printed(found, 0, modes(study.cells)) is possible


def test_the_trade_off_is_that_of_the_shipped_tables(study: Study) -> None:
    local = {table.topology: [trade_off([table], weight) for weight in (1.0, 6.0)] for table in study.tables}
    assert {name: [(each.local, each.cells) for each in found if each] for name, found in local.items()} == {
        "1P_3D": [(148, 150), (144, 150)],
        "2P_2D": [(178, 180), (162, 180)],
        "3P_1D": [(114, 115), (98, 115)],
    }


def test_a_failed_run_counts_no_requests(study: Study) -> None:
    failed = [cell for cell in study.cells if cell.failed]
    assert len(failed) == 91
    assert {(cell.requests, cell.failures, cell.seeds) for cell in failed} == {(0, 0, ())}


def test_printed_and_own_figures_stand_side_by_side(study: Study) -> None:
    found = {section.anchor: section for section in comparison.sections(study.cells)}
    assert list(found) == ["paper-table-1", "paper-table-2", "paper-table-4"]
    table_1, table_2, table_4 = (next(b for b in s.blocks if isinstance(b, Table)) for s in found.values())
    assert table_1.rows[0][:4] == ("1P_3D", "low (0.5–2)", "−57.8 %", "−57.8 %")
    assert table_2.rows[0] == ("replica", "63.3 %", "70.6 %", "0.6 %", "9.2 %", "0.0 %", "5.6 %")
    assert table_2.rows[2] == ("0<x<1", "3.3 %", "–", "33.3 %", "–", "27.8 %", "–")
    assert table_4.rows[0] == ("3P_1D x=0", "11 %", "39 %", "44 %", "39 %", "61 %", "44 %", "89 %", "44 %")
    words = " ".join(block.words for section in found.values() for block in section.blocks if isinstance(block, Text))
    assert "gives 6 of the 9 printed figures to the digit" in words
    assert "7 of the paper's 17 configurations; none of the modes 0<x<1, hybrid" in words
    assert "sums to 86.6 %" in words


def test_cells_that_the_paper_does_not_print_have_nothing_beside_them() -> None:
    assert comparison.sections([]) == []


def part(out: Path, keep: Callable[[str, str], bool]) -> Path:
    """The rows whose configuration and workload are kept."""
    head, *lines = gzip.decompress(ROWS.read_bytes()).decode().splitlines()
    out.write_text("\n".join([head, *(line for line in lines if keep(*line.split(",")[:2])), ""]))
    return out


@pytest.mark.slow
def test_a_part_without_replicas_says_what_it_lacks(tmp_path: Path) -> None:
    cells: Sequence[MeasuredCell] = of_rows(
        part(tmp_path / "rows.csv", lambda config, _: config != "4R"), DESCRIPTION
    ).cells
    _, table_2, _ = comparison.sections(cells)
    words = " ".join(block.words for block in table_2.blocks if isinstance(block, Text))
    assert "6 of the paper's 17 configurations; none of the modes replica, 0<x<1, hybrid" in words


@pytest.mark.e2e  # draws for seconds
def test_the_published_report_is_written(tmp_path: Path) -> None:
    rows = part(tmp_path / "rows.csv", lambda config, workload: config == "4R" and workload == "small_tiny")
    path = write_published_report(rows, tmp_path / "out", DESCRIPTION)
    text = path.read_text()
    assert path == tmp_path / "out" / "index.html"
    assert "The paper&#x27;s table 4, side by side" in text
    with (path.parent / "cells.csv").open() as file:
        assert sum(1 for _ in csv.reader(file)) == 11


def test_rows_without_their_description_are_one_line(tmp_path: Path) -> None:
    rows = part(tmp_path / "rows.csv", lambda config, _: config == "4R")
    with pytest.raises(FormatError, match=r"rows\.toml: No such file"):
        write_published_report(rows, tmp_path / "out")
    assert not (tmp_path / "out").exists()
