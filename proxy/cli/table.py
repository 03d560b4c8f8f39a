"""`ppd table`: draw decision tables, look a turn up, and see what weights change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from ..config import Lookup
from ..decision_table.score import Weights
from ..decision_table.table import DecisionTable, TableQuery, bundled, find
from . import CommandGroup, NumberRange
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
    """Decision tables: follow-up turns through P against those on D, as measured."""


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
@click.option(
    "--qps", type=NumberRange(0, min_open=True), required=True, help="Rate, in the unit that the table counts."
)
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
    """Show which decisions change from weights 1, 1.

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


def _load(names: tuple[str, ...]) -> list[DecisionTable]:
    paths = [find(name) for name in names] if names else list(bundled().values())
    return [DecisionTable.load(path) for path in paths]


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, INDENT), expand=False)
