"""`ppd table`: the proxy's commands, and the import of published measurements.

Needs neither NumPy nor pandas, as the proxy's commands must start without the extra `offline`.
"""

from __future__ import annotations

from pathlib import Path

import click

from ppd.proxy.cli import CommandGroup
from ppd.proxy.cli.table import command as of_proxy
from ppd.proxy.cli.table_view import CellCounts
from ppd.proxy.decision_table.score import Weights
from ppd.proxy.errors import FormatError

from ..experiment.files import load, write_whole
from ..tables.published_rows import GridDescription, build_table, read_rows

command = CommandGroup("table", commands=dict(of_proxy.commands), help=of_proxy.help)


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
    if description is None and not beside.exists():
        raise FormatError(
            f"{beside}: no such file, which would say what the rows mean; --description names another one"
        )
    grid = load(description or beside, GridDescription.decode)
    table = build_table(load(rows, read_rows), grid, config, pair)
    target = output or Path(f"{table.name}.json")
    write_whole(target, table.encode())
    click.echo(f"{target}: {CellCounts.of(table.scored(Weights()))}")
