"""`ppd table import`, and what it shares with the proxy's own commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ppd.offline.cli.table import command
from ppd.proxy.cli.table import command as of_proxy
from ppd.proxy.decision_table.table import DecisionTable, bundled

SOURCE = Path(__file__).parents[3] / "tables" / "source" / "ppd-h100-grid.csv.gz"
NAME = "h100-llama-3.1-8b-1P_3D"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.output.splitlines()]


def test_the_import_is_one_more_command_beside_those_of_the_proxy() -> None:
    assert set(command.commands) == {*of_proxy.commands, "import"}
    assert "import" not in of_proxy.commands


def test_the_import_needs_nothing_of_the_extra() -> None:
    check = "import sys, ppd.offline.cli.table; print({'numpy', 'pandas', 'scipy', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_import_makes_the_shipped_table_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = lines(run("import", str(SOURCE), "--config", "1P_3D"))
    assert said == [f"{NAME}.json: LOCAL 148 (98.7% of 150), SPLIT 2, no evidence 30"]
    assert (tmp_path / f"{NAME}.json").read_bytes() == bundled()[NAME].read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [f"{NAME}.json"]


def test_import_takes_a_pair_a_description_and_an_output(tmp_path: Path) -> None:
    rows, description, output = tmp_path / "rows.csv.gz", tmp_path / "about.toml", tmp_path / "made.json"
    rows.write_bytes(SOURCE.read_bytes())
    about = SOURCE.with_name("ppd-h100-grid.toml").read_text()
    description.write_text(about.replace('name = "h100-llama-3.1-8b"', 'name = "mine"'))
    options = ("--pair", "2P_2pD", "--description", str(description), "--output", str(output))
    lines(run("import", str(rows), "--config", "1P_3D", *options))
    made = DecisionTable.load(output)
    assert made.name == "mine-1P_3D"
    two_two = DecisionTable.load(bundled()["h100-llama-3.1-8b-2P_2D"])
    assert [cell.local for cell in made.cells] == [cell.local for cell in two_two.cells]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("import", str(SOURCE), "--config", "9P_9D"), "config: no rows of '9P_9D'; there are 1P_3D, "),
        (
            ("import", str(bundled()[NAME]), "--config", "1P_3D"),
            f"{bundled()[NAME]}.toml: no such file, which would say what the rows mean",
        ),
        (("import", str(SOURCE), "--config", "1P_3D", "--output", f"{SOURCE}/x"), f"{SOURCE}/x: cannot be written: "),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {message}")
    assert result.stderr.count("\n") == 1
