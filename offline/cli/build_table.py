"""`ppd-build-table`: sweeps a grid in one of three ways, and makes tables and a report of the results."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from ppd.proxy.cli import CommandGroup
from ppd.proxy.errors import ConfigError, FormatError

from ..sweep.folder import SweepFolder
from .build_table_flags import BuildTableFlags, flag, options
from .build_table_sweep import list_runs, measure, prepare


@click.group(cls=CommandGroup, invoke_without_command=True)
@options
@click.version_option(package_name="ppd-router")
@click.pass_context
def main(ctx: click.Context, /, **given: Any) -> None:
    """Measure when follow-up turns should stay on D, and make the tables that the proxy decides by.

    A sweep takes one of --simulate, --launch and --target, and --out DIR. Ctrl-C ends it, --resume goes on.
    """
    typed = [name for name in given if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if ctx.invoked_subcommand is not None:
        if typed:
            raise click.UsageError(f"{flag(typed[0])} goes with a sweep, not with {ctx.invoked_subcommand}")
    else:
        flags = BuildTableFlags(**given, admin_key=os.environ.get("PPD_ADMIN_KEY", ""))
        flags.check(typed)
        ctx.exit(_list(flags) if flags.listing else _sweep(flags))


@main.command("tables")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--name", default="", help="What the tables are called; default: as the folder.")
@click.option("--source", default="ppd-build-table", show_default=True, help="Who measured, for the provenance.")
@click.option("--licence", default="", help="Of the figures, if they are to be passed on.")
@click.option("--note", default="", help="What else a reader should know.")
def tables(folder: Path, name: str, source: str, licence: str, note: str) -> None:
    """Make the tables of a sweep's folder anew, from its runs."""
    write_tables(SweepFolder(folder), name, source, licence, note)


@main.command("report")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--published", type=click.Path(path_type=Path), metavar="ROWS", help="Published rows in place of a sweep."
)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="With --published: where the report goes.")
def report(folder: Path | None, published: Path | None, out: Path | None) -> None:
    """Write a sweep's report: one HTML page, and its figures."""
    from ..report.write import write_published_report, write_report

    if folder is not None and published is None and out is None:
        click.echo(write_report(folder))
    elif folder is None and published is not None and out is not None:
        click.echo(write_published_report(published, out))
    else:
        raise click.UsageError("a sweep's DIR must be given, or --published ROWS and --out DIR")


def _list(flags: BuildTableFlags) -> int:
    list_runs(flags)
    return 0


def _sweep(flags: BuildTableFlags) -> int:
    """The exit code: 0, or 128 plus the signal that ended it."""
    job = prepare(flags, click.echo)
    folder, number = job.folder, 0
    if job.schedule.waiting:
        folder, number = measure(job, Console())
    schedule = job.schedule
    click.echo(f"{flags.folder}: {schedule.finished} runs finished, {schedule.failed} failed")
    if number:
        onward = (
            "the same command with --resume goes on" if folder else "nothing has been written: the same command begins"
        )
        click.echo(f"stopped with {len(schedule.waiting)} runs left; {onward}")
        return 128 + number
    if not schedule.finished or folder is None:
        raise ConfigError("no run finished, so there is nothing to make tables of")
    try:
        write_tables(folder)
    except FormatError as exc:  # for example after a sweep of replicas only
        click.echo(f"no table: {exc.message}")
    return 0


def write_tables(
    folder: SweepFolder, name: str = "", source: str = "ppd-build-table", licence: str = "", note: str = ""
) -> None:
    """Writes the folder's `tables/` and prints each path. FormatError where no cell has both arms."""
    from ..tables import build

    name = name or re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.path.resolve().name)
    build.write_tables([], folder.tables)  # tables that the runs no longer support must not stay
    tables = build.build_tables(folder.results(), name=name, source=source, licence=licence, note=note)
    for path in build.write_tables(tables, folder.tables):
        click.echo(path)
