from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ppd.proxy.cli.table import command
from ppd.proxy.decision_table.table import bundled

SOURCE = Path(__file__).parents[3] / "tables" / "source" / "ppd-h100-grid.csv.gz"
NAME = "h100-llama-3.1-8b-1P_3D"


def run(*arguments: str, width: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(width)}).invoke(command, list(arguments))


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.output.splitlines()]


def test_list_names_the_shipped_tables_and_their_evidence() -> None:
    listed = lines(run("list"))
    assert [line.split()[0] for line in listed[1:]] == list(bundled())
    assert [line.split()[-2] for line in listed[1:]] == ["150/180", "180/180", "115/180"]


def test_show_draws_one_table_in_eighty_columns() -> None:
    shown = lines(run("show", NAME))
    assert shown[0] == NAME
    assert shown[1] == "  1P_3D on 4 x NVIDIA H100 80GB HBM3, Llama-3.1-8B"
    assert "  conversations/s              0.5   1   2   4   6   8  10  12  16  20" in shown
    assert "    very_long_gen   64 -> 1024   L   L   L   L   L   L   L   L   L   S" in shown
    assert "    tiny            16 -> 32     x   x   x   L   L*  L   L   L*  x   x" in shown
    assert "  at w_ttft 1, w_tpot 1: LOCAL 148 (98.7% of 150), SPLIT 2, no evidence 30" in shown
    assert max(map(len, shown)) <= 80


def test_show_without_a_name_draws_every_shipped_table() -> None:
    shown = lines(run("show"))
    assert [line for line in shown if line.startswith("h100-")] == list(bundled())


def test_show_takes_weights_and_a_path() -> None:
    shown = lines(run("show", str(bundled()[NAME]), "--w-tpot", "6", "--scores"))
    assert "  at w_ttft 1, w_tpot 6: LOCAL 144 (96.0% of 150), SPLIT 6, no evidence 30" in shown
    assert any("S-1.48" in line for line in lines(run("show", NAME, "--scores")))


def test_lookup_shows_what_each_lookup_says_of_one_turn() -> None:
    turn = ("--new", "40", "--cached", "900", "--output", "300", "--qps", "5")
    shown = lines(run("lookup", NAME, *turn, "--w-tpot", "3"))
    assert shown[0] == NAME
    assert shown[1].split() == "lookup decision score TTFT saved TPOT added evidence cell".split()
    assert shown[2].split() == "nearest LOCAL +0.463 51.1% 1.6% inside large/short_gen/6".split()
    assert shown[3].split()[:2] == ["interpolated", "LOCAL"]
    assert shown[3].split()[-2:] == ["interpolated", "large/short_gen/6"]


def test_lookup_says_where_nothing_is_known() -> None:
    shown = lines(run("lookup", NAME, "--new", "16", "--cached", "2048", "--output", "32", "--qps", "1"))
    assert shown[2].split() == "nearest - - - - none large/tiny/1".split()
    assert shown[3].split() == "interpolated - - - - none large/tiny/1".split()


def test_show_takes_a_file_of_the_prototype(tmp_path: Path) -> None:
    entry = {"context_class": "small", "workload_type": "tiny", "qps": 1, "use_ppd": False, "score": -9}
    figures = {"pd_ttft_ms": 90, "ppd_ttft_ms": 45, "pd_tpot_ms": 8, "ppd_tpot_ms": 8}
    exported = {"base_config": "2P_2D", "ppd_config": "2P_2pD", "weights": {"w_ttft": 1, "w_tpot": 1}}
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps({**exported, "entries": [{**entry, **figures}]}))
    shown = lines(run("show", str(path), width=200))
    assert shown[:3] == ["prototype-2P_2D", "  2P_2D", "  a table exported by the PPD paper's prototype"]
    assert "are not used; 1 of 1 contradict its figures, small/tiny/1 the first." in shown[3]
    assert "    tiny            16 -> 32     L" in shown


def test_score_prints_the_shares_and_the_cells_that_flip() -> None:
    scored = lines(run("score", "h100-llama-3.1-8b-2P_2D", "--w-tpot", "3"))
    assert scored[:3] == [
        "h100-llama-3.1-8b-2P_2D",
        "  at w_ttft 1, w_tpot 1: LOCAL 178 (98.9% of 180), SPLIT 2, no evidence 0",
        "  at w_ttft 1, w_tpot 3: LOCAL 173 (96.1% of 180), SPLIT 7, no evidence 0",
    ]
    assert [line.split()[-1] for line in scored[5:-1]] == ["SPLIT"] * 5


def test_score_says_when_nothing_flips() -> None:
    assert "  no cell flips" in lines(run("score", NAME))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "h100"), f"table = 'h100': must be {NAME}, "),
        (("score", "--w-tpot=-1"), "w_tpot: must be a finite number of at least 0, got -1.0"),
        (("score", "--w-ttft=nan"), "w_ttft: must be a finite number of at least 0, got nan"),
        (("lookup", "h100", "--new=1", "--cached=1", "--output=1", "--qps=1"), f"table = 'h100': must be {NAME}, "),
        (("show", str(SOURCE)), f"{SOURCE}: decision table: "),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {message}")
    assert result.stderr.count("\n") == 1
