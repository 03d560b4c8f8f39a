"""The command line, `ppd`: each command's module is imported when it is asked for.

So help is quick, and the proxy starts where the extra `offline` (NumPy and the like) is not installed. A command that
needs it says so.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import click

COMMANDS = {
    "serve": ("ppd.proxy.serve_command", "Run the proxy."),
    "up": ("ppd.servers.up_command", "Run a fleet on this machine: workers by role, and the proxy."),
    "agent": ("ppd.servers.agent_command", "Announce one engine to the proxy; launch it, or attach to a running one."),
    "sim": ("ppd.servers.sim.command", "Run one simulated engine."),
    "demo": ("ppd.servers.demo", "Run a fleet and play a real conversation through it."),
    "table": ("ppd.proxy.table_command", "Show, import and score decision tables."),
    "doctor": ("ppd.proxy.doctor.command", "Check a config or a running proxy, down to a real handoff."),
    "bench": ("ppd.offline.bench_command", "Play one workload against any OpenAI-compatible endpoint."),
    "calibrate": ("ppd.offline.calibration.command", "Fit an engine profile to measurements."),
}
OFFLINE = ("numpy", "pandas", "scipy", "matplotlib")  # what the extra `offline` installs


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = _module(COMMANDS[cmd_name][0], cmd_name).command
        assert isinstance(command, click.Command), "each module names its command so"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=_Lazy)
@click.version_option(package_name="ppd-router")
def main() -> None:
    """PPD: a session-aware proxy for prefill/decode-disaggregated LLM serving."""


def build_table() -> None:
    """The program `ppd-build-table`."""
    try:
        program = _module("ppd.offline.build_command", "ppd-build-table")
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    program.main()


def _module(name: str, command: str) -> ModuleType:
    """A command's module; ClickException, naming the extra, where what it needs is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in OFFLINE:
            raise
        raise click.ClickException(f'{command} needs {exc.name}: pip install "ppd-router[offline]"') from exc
