"""The command line, `ppd`: each command's module is imported when it is asked for, so that help stays quick."""

from __future__ import annotations

import importlib

import click

COMMANDS = {
    "serve": ("ppd.proxy.serve_command", "Run the proxy."),
    "up": ("ppd.servers.up_command", "Run a fleet on this machine: workers by role, and the proxy."),
    "agent": ("ppd.servers.agent_command", "Announce one engine to the proxy; launch it, or attach to a running one."),
    "sim": ("ppd.servers.sim.command", "Run one simulated engine."),
    "demo": ("ppd.servers.demo", "Run a fleet and play a real conversation through it."),
    "table": ("ppd.proxy.table_command", "Show, import and score decision tables."),
    "doctor": ("ppd.proxy.doctor.command", "Check a config or a running proxy, down to a real handoff."),
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command), "each module names its command so"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=_Lazy)
@click.version_option(package_name="ppd-router")
def main() -> None:
    """PPD: a session-aware proxy for prefill/decode-disaggregated LLM serving."""
