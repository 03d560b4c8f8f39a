"""`ppd table`: draw decision tables, look a turn up, see what weights change, and import published measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from ..config import Lookup
from ..decision_table.score import Weights
from ..decision_table.table import DecisionTable, TableQuery, bundled, find
from ..decision_table.table_import import GridDescription, build_table, read_rows
from ..errors import FormatError
from . import CommandGroup
from .table_view import (
    LEGEND,
    MUTED,
    CellCounts,
    columns,
    decision_grids,
    flip_list,
    flips,
    provenance,
    summary,
    verdict_list,
)

INDENT = 2
F = TypeVar("F", bound=Callable[..., Any])


@click.group("table", cls=CommandGroup)
def command() -> None:
    """Decision tables: follow-up turns through P against on D, as measured."""


def _weight(name: str) -> Callable[[F], F]:
    return click.option(f"--w-{name}", type=float, default=1.0, show_default=True, help=f"Weight of {name.upper()}.")


@command.command("list")
def list_tables() -> None:
    """List the tables that ship with the project."""
    rows = [("table", "topology", "model", "GPUs", "evidence")]
    for name, path in bundled().items():
        table = DecisionTable.load(path)
        origin, counts = table.provenance, CellCounts.of(table.scored(Weights()))
        evidence = f"{counts.evidence}/{counts.cells} cells"
        rows.append((name, table.topology, origin.model, f"{origin.gpu_count} x {origin.gpu}", evidence))
    Console().print(columns(rows), soft_wrap=True)


@command.command("show")
@click.argument("names", nargs=-1, metavar="[NAME|PATH]...")
@_weight("ttft")
@_weight("tpot")
@click.option("--scores", is_flag=True, help="Print each cell's score beside its decision.")
def show(names: tuple[str, ...], w_ttft: float, w_tpot: float, scores: bool) -> None:
    """Draw decisions as grids.

    Without a name: those of every table that ships.
    """
    weights, console = Weights(w_ttft, w_tpot), Console()
    for table in _load(names):
        scored = table.scored(weights)
        console.print(Text(table.name, "bold"))
        console.print(_indented(provenance(table)))
        for grid in decision_grids(scored, with_scores=scores, width=console.width):
            console.print()
            console.print(grid, soft_wrap=True)
        console.print()
        console.print(_indented(Text(LEGEND, MUTED)))
        console.print(_indented(summary(scored)))
        console.print()


@command.command("lookup")
@click.argument("names", nargs=-1, metavar="[NAME|PATH]...")
@click.option("--new", "new_tokens", type=click.IntRange(1), required=True, help="Tokens that the turn adds.")
@click.option("--cached", "cached_tokens", type=click.IntRange(1), required=True, help="Tokens that D holds.")
@click.option("--output", "output_tokens", type=click.IntRange(1), required=True, help="Tokens of the answer.")
@click.option("--qps", type=click.FloatRange(0, min_open=True), required=True, help="Of what the table counts.")
@_weight("ttft")
@_weight("tpot")
def look_up(names: tuple[str, ...], w_ttft: float, w_tpot: float, **turn: Any) -> None:
    """Show what tables say about one turn, by each lookup."""
    weights, workload, console = Weights(w_ttft, w_tpot), TableQuery(**turn), Console()
    for table in _load(names):
        found = {rule: table.lookup(workload, weights, rule) for rule in Lookup}
        console.print(Text(table.name, "bold"))
        console.print(verdict_list(found), soft_wrap=True)
        console.print()


@command.command("score")
@click.argument("names", nargs=-1, metavar="[NAME|PATH]...")
@_weight("ttft")
@_weight("tpot")
def score(names: tuple[str, ...], w_ttft: float, w_tpot: float) -> None:
    """Show what weights change against 1, 1.

    Prints the share of LOCAL cells under both, and every cell that flips with its scores.
    """
    usual, weights, console = Weights(), Weights(w_ttft, w_tpot), Console()
    for table in _load(names):
        before, after = table.scored(usual), table.scored(weights)
        flipped = flips(before, after)
        console.print(Text(table.name, "bold"))
        for line in (summary(before), summary(after)):
            console.print(_indented(line))
        if flipped:
            console.print()
            console.print(flip_list(flipped, usual, weights), soft_wrap=True)
        else:
            console.print(_indented(Text("no cell flips", MUTED)))
        console.print()


@command.command("import")
@click.argument("rows", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--config", required=True, help="Configuration of the split arm, such as 2P_2D.")
@click.option("--pair", help="Configuration of the local arm; 2P_2pD for 2P_2D if not given.")
@click.option(
    "--description",
    type=click.Path(dir_okay=False, path_type=Path),
    help="What the rows mean; the .toml file beside them if not given.",
)
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="The table; <name>-<config>.json if not given."
)
def import_rows(rows: Path, config: str, pair: str | None, description: Path | None, output: Path | None) -> None:
    """Make a table of ROWS, published measurements as CSV or CSV.GZ."""
    beside = rows.with_name(rows.name.removesuffix(".gz").removesuffix(".csv") + ".toml")
    grid = GridDescription.decode(_read(description or beside))
    table = build_table(read_rows(_read(rows)), grid, config, pair)
    target = output or Path(f"{table.name}.json")
    _write(target, table.encode())
    click.echo(f"{target}: {CellCounts.of(table.scored(Weights()))}")


def _load(names: tuple[str, ...]) -> list[DecisionTable]:
    paths = [find(name) for name in names] if names else list(bundled().values())
    return [DecisionTable.load(path) for path in paths]


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, INDENT), expand=False)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise FormatError(f"{path}: {exc.strerror}") from exc


def _write(path: Path, data: bytes) -> None:
    """Writes a `.part` file and renames it, so that a reader never sees half a table."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as exc:
        part.unlink(missing_ok=True)
        raise click.ClickException(f"{path}: {exc.strerror}") from exc
