from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ppd.offline.experiment.cells import MeasuredCell
from ppd.offline.experiment.records import Origin
from ppd.offline.experiment.run import Profile, Run
from ppd.offline.report.analysis.study import cell_cautions, of_sweep
from ppd.offline.report.figures import numbers
from ppd.offline.report.figures.result_tables import failures_table, gains_table, winners_table
from ppd.offline.report.page.document import Caution, Document, Table
from ppd.offline.report.sections import document, overview
from ppd.offline.report.write import write_report
from ppd.offline.sweep.folder import SweepFolder
from ppd.offline.sweep.grid import Arms, Grid
from ppd.proxy.errors import FormatError

MakeSweep = Callable[..., Path]


def made(folder: Path) -> Document:
    return document(of_sweep(folder))


def anchors(document: Document) -> list[str]:
    return [section.anchor for section in document.sections]


def cautions(folder: Path) -> str:
    (caution, *_) = overview(of_sweep(folder)).blocks
    assert isinstance(caution, Caution)
    return "\n".join(caution.points)


def rows(table: Table | None) -> list[list[str]]:
    assert table is not None
    return [list(row) for row in table.rows]


@pytest.fixture(scope="module")
def report(sweep_in: MakeSweep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about a sweep of both kinds of topology; figures of one kind of conversation are soon drawn."""
    return write_report(sweep_in(tmp_path_factory.mktemp("report"), "2P_2D", "4R", later=["mid_bal"]))


@pytest.mark.e2e  # draws for seconds
def test_a_report_is_a_page_its_figures_and_every_number(report: Path) -> None:
    path = report
    assert (path.parent.name, path.name) == ("report", "index.html")
    present = "overview frontier load gains winners decisions trade-off failures numbers"
    assert re.findall('<section id="([^"]*)"', path.read_text()) == present.split()
    pictures = sorted(path.parent.glob("*.png"))
    assert [picture.stem for picture in pictures] == [
        "decisions-2P_2D",
        "frontier-all-small",
        "frontier-small",
        "tpot-by-load-small",
        "trade-off",
        "ttft-by-load-small",
    ]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert path.read_text().count("data:image/png;base64,") == len(pictures)
    with (path.parent / "cells.csv").open() as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == 3 * 3
    one = next(row for row in cells if (row["topology"], row["x"], row["qps"]) == ("2P_2D", "1.0", "4.0"))
    assert float(one["later_tpot_s_mean"]) == pytest.approx(0.008 * 1.08 * 1.1)


@pytest.mark.e2e  # draws for seconds
def test_the_same_runs_make_the_same_bytes(report: Path) -> None:
    files = {path.name: path.read_bytes() for path in report.parent.iterdir()}
    write_report(report.parents[1])
    assert {path.name: path.read_bytes() for path in report.parent.iterdir()} == files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topologies", "changes", "present", "absent"),
    [
        (
            ("4R",),
            {"qps": (1, 4)},
            "overview load failures numbers",
            "gains winners decisions trade-off turns",
        ),
        (("2P_2D",), {"turns": (1,)}, "overview numbers", "load gains winners decisions trade-off turns"),
    ],
)
def test_a_section_is_there_only_with_its_data(
    sweep: MakeSweep, topologies: tuple[str, ...], changes: dict[str, object], present: str, absent: str
) -> None:
    found = anchors(made(sweep(*topologies, **changes)))
    assert set(present.split()) <= set(found)
    assert not set(absent.split()) & set(found)


def test_the_gains_are_those_of_the_law(sweep: MakeSweep) -> None:
    found = rows(gains_table(of_sweep(sweep("2P_2D")).cells))
    assert [[row[0], row[1], row[2], row[5], row[8]] for row in found] == [
        ["2P_2D", "low (1)", "3", "−50.0 %", "+10.0 %"],
        ["2P_2D", "medium (4–8)", "6", "−50.0 %", "+10.0 %"],
    ]


def test_winners_and_their_points_are_counted(sweep: MakeSweep) -> None:
    found = rows(winners_table(of_sweep(sweep("2P_2D")).cells))
    assert found[:3] == [
        ["x=0", "0.0 %", "100.0 %", "66.7 %", "55.6 %"],
        ["x=1", "100.0 %", "0.0 %", "33.3 %", "44.4 %"],
        ["points", "9", "9", "9", ""],
    ]
    assert winners_table(of_sweep(sweep("4R", name="one")).cells) is None


def test_a_simulation_is_called_one(sweep: MakeSweep) -> None:
    found = cautions(sweep("2P_2D", qps=(1,)))
    assert "Nothing here was measured on hardware" in found
    assert "modelled" in found
    engines = Origin(backend="target", engine="sim 0.33.0", note="")
    assert "the engines were simulated ones" in cautions(sweep("2P_2D", qps=(1,), origin=engines, name="engines"))
    measured = Origin(backend="target", engine="vllm 1", note="")
    assert "hardware" not in cautions(sweep("2P_2D", qps=(1,), origin=measured, name="other"))


def test_what_failed_is_said_with_its_reason_and_wins_nothing(sweep: MakeSweep) -> None:
    def fails(run: Run) -> str:
        return "D1 <died>" if run.x == 1 and run.qps == 4 else ""

    folder = sweep("2P_2D", qps=(1, 4), fails=fails)
    cells = of_sweep(folder).cells
    assert "6 runs failed, in 3 cells, which are no evidence: D1 <died>." in cautions(folder)
    assert [row[1:3] for row in rows(gains_table(cells))] == [["low (1)", "3"]]
    assert [row[:2] + row[6:] for row in rows(failures_table(cells))] == [["2P_2D x=1", "4", "6", "3 of 3"]]


def test_few_turns_and_single_runs_are_marked(sweep: MakeSweep) -> None:
    folder = sweep("2P_2D", qps=(1,), seeds=1)
    assert "6 cells of 6 rest on fewer than 30 follow-up turns" in cautions(folder)
    assert "6 cells of 6 were measured by one run" in cautions(folder)
    assert {row[-1] for row in numbers.table(of_sweep(folder).cells).rows} == {"n below 30, one run"}


@pytest.mark.parametrize(
    ("x", "went", "marked"),
    [
        (1.0, (100, 0), False),
        (1.0, (99, 1), False),
        (1.0, (97, 3), True),
        (0.0, (3, 97), True),
        (0.5, (50, 50), False),
        (0.5, (60, 40), False),  # as chance has it: the spread of 100 draws is 5 %
        (0.5, (30, 70), True),
        (0.0, (0, 0), False),
        (None, (0, 0), False),
    ],
)
def test_a_share_of_local_turns_that_is_not_x_is_marked(
    cell: Callable[..., MeasuredCell], x: float | None, went: tuple[int, int], marked: bool
) -> None:
    made = cell("4R" if x is None else "2P_2D", x, went=went)
    assert ("not what x says" in " ".join(cell_cautions([made]))) is marked
    assert ("LOCAL share is not x" in numbers.remarks(made)) is marked


@pytest.mark.slow
def test_the_share_of_local_turns_is_among_the_numbers(cell: Callable[..., MeasuredCell]) -> None:
    cells = [cell("2P_2D", 1.0, went=(97, 3), lateness=0.004)]
    found = numbers.table(cells)
    assert found.rows[0][list(found.head).index("LOCAL")] == "97.0 %"
    (row,) = csv.DictReader(numbers.csv(cells).decode().splitlines())
    assert (row["local_share"], row["lateness_p99_s"]) == ("0.97", "0.004")


@pytest.mark.parametrize(("lateness", "marked"), [(None, False), (0.005, False), (0.0051, True)])
def test_requests_that_were_sent_late_are_marked(
    cell: Callable[..., MeasuredCell], lateness: float | None, marked: bool
) -> None:
    """Beyond 5 % of the mean TTFT."""
    made = cell("2P_2D", 1.0, ttft=0.1, lateness=lateness)
    assert ("sent late" in " ".join(cell_cautions([made]))) is marked
    assert ("sent late" in numbers.remarks(made)) is marked


@pytest.mark.slow
def test_figures_of_an_earlier_report_are_not_left_beside_the_page(sweep: MakeSweep, report: Path) -> None:
    folder = sweep("4R", qps=(1, 4))
    out = folder / "report"
    out.mkdir()
    other = b"\x89PNG\r\n\x1a\n of another program"
    (out / "decisions-1P_3D.png").write_bytes(report.with_name("decisions-2P_2D.png").read_bytes())
    (out / "decisions-mine.png").write_bytes(other)
    write_report(folder)
    assert {path.name for path in out.glob("*.png")} == {
        "decisions-mine.png",
        "tpot-by-load-small.png",
        "ttft-by-load-small.png",
    }
    assert (out / "decisions-mine.png").read_bytes() == other


def test_a_sweep_that_is_not_finished_says_so(sweep: MakeSweep) -> None:
    folder = sweep("2P_2D", qps=(1, 4))
    for path in (folder / "runs").rglob("*q4-*"):
        path.unlink()
    assert "6 of the grid's 12 cells have no run" in cautions(folder)


def test_every_number_has_its_n_and_its_interval(sweep: MakeSweep) -> None:
    found = numbers.table(of_sweep(sweep("4R", qps=(1,))).cells)
    columns = {name: index for index, name in enumerate(found.head)}
    for row in found.rows:
        assert int(row[columns["n"]]) > 0
        assert "±" in row[columns["TTFT mean, ms"]]
        assert "±" in row[columns["TPOT mean, ms"]]


@pytest.mark.e2e  # draws for seconds
def test_tables_of_several_kinds_of_conversation_are_all_drawn(sweep: MakeSweep) -> None:
    found = made(sweep("2P_2D", qps=(1, 4), turns=(2, 4), later=["mid_bal", "huge_paste"]))
    assert set("overview load gains winners decisions trade-off turns numbers".split()) <= set(anchors(found))
    pictures = {picture.name for picture in found.pictures}
    assert {"decisions-2P_2D", "decisions-2P_2D-turns4", "ttft-by-turns"} <= pictures


def test_no_sweep_or_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"it has no sweep\.json"):
        write_report(tmp_path)
    one = Profile(name="a", new_tokens=1, output_tokens=1)
    grid = Grid(arms=(Arms(topology="4R", x=()),), first=(one,), later=(one,), qps=(1,))
    SweepFolder.create(tmp_path / "empty", grid, Origin(backend="target", engine="e"), "2026-01-01T00:00:00Z")
    with pytest.raises(FormatError, match="empty: no run is there yet"):
        write_report(tmp_path / "empty")
    assert not (tmp_path / "empty" / "report").exists()


def test_a_damaged_run_is_named(sweep: MakeSweep) -> None:
    folder = sweep("4R", qps=(1,))
    path = next((folder / "runs").rglob("*.jsonl.gz"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FormatError, match=path.name):
        write_report(folder)
