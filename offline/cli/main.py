"""The programs `ppd` and `ppd-build-table`.

The proxy and the engines start without the extra `offline` (NumPy and the like). A command that needs it says so.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import click

from ppd.servers.cli.main import COMMANDS as OF_FLEETS
from ppd.servers.cli.main import Commands as FleetCommands

COMMANDS = {
    **OF_FLEETS,
    "table": ("ppd.offline.cli.table", "Show, import and score decision tables."),
    "bench": ("ppd.offline.cli.bench", "Play one workload against any OpenAI-compatible endpoint."),
    "replay": ("ppd.offline.cli.replay", "Decide the turns of a receipt log again, by other rules."),
    "advise": ("ppd.offline.cli.advise", "Advise which fleet and mode serve the traffic of a receipt log best."),
    "goodput": ("ppd.offline.cli.goodput", "Find the highest rate of sessions that a simulated fleet serves in time."),
    "calibrate": ("ppd.offline.cli.calibrate", "Fit an engine profile to measurements."),
}
NEEDED = ("numpy", "pandas", "scipy", "matplotlib")  # what the extra `offline` installs


class MeasuringCommands(FleetCommands):
    modules = COMMANDS

    def load(self, module: str, cmd_name: str) -> ModuleType:
        return _module(module, cmd_name)


@click.command(cls=MeasuringCommands)
@click.version_option(package_name="ppd-router")
def main() -> None:
    """PPD: a session-aware proxy for prefill/decode-disaggregated LLM serving."""


def build_table() -> None:
    try:
        program = _module("ppd.offline.cli.build_table", "ppd-build-table")
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except KeyboardInterrupt:  # the import takes a second; later click says this
        click.echo("Aborted!", err=True)
        sys.exit(1)
    program.main()


def _module(name: str, command: str) -> ModuleType:
    """ClickException that names the extra, where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in NEEDED:
            raise
        raise click.ClickException(
            f"{command} needs {exc.name}, which the extra `offline` brings: pip install '.[offline]' in PPD's clone"
        ) from exc
