"""The command line as far as nothing is measured; sweeps by it are in tests/e2e."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ppd.offline.cli.build_table import main
from ppd.offline.cli.main import build_table
from ppd.offline.sweep.folder import SweepFolder
from tests.support.sweep import ORIGIN, finished, grid, run

GRID = """
qps = [1, 4]
[topologies]
1P_1D = [0, 1]
[first]
small = { new_tokens = 128, output_tokens = 128 }
[later]
tiny = { new_tokens = 16, output_tokens = 32 }
"""


def said(*argv: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(main, argv, env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "one way of measuring must be given: --simulate, --launch or --target URL"),
        (("--simulate", "--launch"), "one way of measuring"),
        (("--simulate", "--target", "http://a"), "one way of measuring"),
        (("--simulate",), "--out DIR is missing"),
        (("--launch", "--jobs", "2", "--out", "x"), "--jobs goes with --simulate only"),
        (("--launch", "--hardware", "h", "--out", "x"), "--hardware goes with --simulate only"),
        (("--simulate", "--gpu", "H100", "--out", "x"), "--gpu goes with --target only"),
        (("--simulate", "--engine-arg", "-v", "--out", "x"), "--engine-arg goes with --launch only"),
        (("--simulate", "--grid", "nosuch", "--out", "x"), "grid = 'nosuch': must be long, paper, quick, turns"),
        (("--simulate", "--only", "9P", "--out", "x"), "only = '9P': must match a cell"),
        (("--simulate", "--seeds", "0", "--out", "x"), "--seeds"),
        (("--simulate", "--hardware", "abacus", "--out", "x"), "hardware = 'abacus': must be"),
        (
            ("--simulate", "--ray", "nowhere", "--out", "x"),
            "ray = 'nowhere': must be a cluster's address, auto or local",
        ),
        (("--target", "http://a", "--out", "x"), "set PPD_ADMIN_KEY, or give --admin-key-file"),
        (("--target", "ftp://a", "--out", "x", "--admin-key-file", "key"), "url: must start with http://"),
        (("--target", "http://a", "--out", "x", "--admin-key-file", "nokey"), "admin_key_file = 'nokey': must be"),
        (("--target", "http://a:99999", "--out", "x", "--admin-key-file", "key"), "a port from 1 to 65535"),
        (("--simulate", "--seeds", "3", "--max-seeds", "2", "--out", "x"), "--max-seeds 2 is below --seeds 3"),
        (("--simulate", "--model", "m", "--out", "x"), "--model goes with --launch and --target only"),
        (("--target", "http://a", "--engine", "sim", "--out", "x"), "--engine goes with --launch only"),
        (("--simulate", "--topology", "auto", "--out", "x"), "--topology auto goes with --target only"),
        (("--simulate", "--grid", "quick", "--topology", "3P", "--out", "x"), "topology = '3P': must be"),
        (("--simulate", "--keep-failed", "--out", "x"), "--keep-failed goes with --resume only"),
        (("--list", "report", "nowhere"), "--list goes with a sweep, not with report"),
        (("--engine-arg", "-v", "tables", "nowhere"), "--engine-arg goes with a sweep, not with tables"),
        (("report",), "a sweep's DIR must be given, or --published ROWS and --out DIR"),
        (("report", "nowhere", "--published", "rows.csv"), "a sweep's DIR must be given, or"),
        (("report", "--published", "rows.csv", "--out", "x"), "rows.csv"),
        (("--simulate", "--resume", "--out", "x"), "x: must be a sweep's folder to go on with: it has no sweep.json"),
        (("--launch", "--transfers", "whole", "--out", "x"), "--transfers goes with --simulate only"),
        (("report", "nowhere"), "nowhere: must be a sweep's folder: it has no sweep.json"),
        (("tables", "nowhere"), "nowhere: must be a sweep's folder: it has no sweep.json"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("k\n")
    code, output = said(*argv, env={"PPD_ADMIN_KEY": ""})
    assert code != 0
    assert words in output
    assert "Traceback" not in output
    assert not (tmp_path / "x").exists(), "nothing is begun"


def held(path: Path) -> str:
    folder = SweepFolder.create(path / "sweep", grid(), ORIGIN, "2026-01-01T00:00:00+00:00")
    folder.save(finished(run(0), wall_s=3.0))
    return str(folder.path)


def test_a_folder_that_holds_a_sweep_is_not_begun_again(tmp_path: Path) -> None:
    path = held(tmp_path)
    code, output = said("--simulate", "--out", path)
    assert (code, "holds a sweep already; --resume goes on with it" in output) == (1, True)


def test_listing_shows_the_runs_and_the_time_and_begins_nothing(tmp_path: Path) -> None:
    file = tmp_path / "g.toml"
    file.write_text(GRID)
    code, output = said("--target", "http://a", "--grid", str(file), "--list")
    assert code == 0
    assert output.splitlines() == [
        "1P_1D-x0/small_tiny/q1-s0",
        "1P_1D-x1/small_tiny/q1-s0",
        "1P_1D-x0/small_tiny/q4-s0",
        "1P_1D-x1/small_tiny/q4-s0",
        "4 runs, one after the other about 40 s; 0 are there",
    ]
    assert sorted(tmp_path.iterdir()) == [file]


def test_listing_a_folder_leaves_out_what_is_there(tmp_path: Path) -> None:
    path = held(tmp_path)
    code, output = said("--simulate", "--out", path, "--list", "--only", "1P_1D-x0/*")
    assert code == 0
    assert output.splitlines() == [
        "1P_1D-x0/small_tiny/q4-s0",
        "1 runs, one after the other about 12 s; 1 are there",
    ]


def test_more_seeds_than_the_grid_says_can_be_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "g.toml"
    file.write_text(GRID)
    _, output = said("--simulate", "--grid", str(file), "--list", "--seeds", "3", "--only", "*-x0/small_tiny/q1")
    assert [line for line in output.splitlines() if "/" in line] == [f"1P_1D-x0/small_tiny/q1-s{n}" for n in range(3)]


def test_every_option_is_explained() -> None:
    shown = [parameter for parameter in main.params if not getattr(parameter, "hidden", False)]
    unexplained = [p.name for p in shown if not getattr(p, "help", None)]
    assert unexplained == []


def test_the_workloads_of_a_grid_are_measured_on_topologies_that_are_named() -> None:
    code, text = said("--simulate", "--grid", "quick", "--topology", "1P_3D,3R", "--only", "*/small_tiny/q1", "--list")
    assert code == 0
    runs = [line for line in text.splitlines() if "small_tiny" in line]
    assert {line.split("/")[0] for line in runs} == {"1P_3D-x0", "1P_3D-x1", "3R"}


def test_ctrl_c_while_modules_are_imported_is_one_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    with pytest.raises(SystemExit, match="1"):
        build_table()
    assert capsys.readouterr().err == "Aborted!\n"
