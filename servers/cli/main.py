"""The commands that run a fleet and its proxy. A command's module is imported only when it is used, so help is quick.

`python -m ppd.servers` has only these; the program `ppd` adds those that measure (`ppd.offline.cli.main`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType

import click

from ppd.proxy.cli import Program

COMMANDS = {
    "serve": ("ppd.proxy.cli.serve", "Run the proxy."),
    "picker": ("ppd.proxy.cli.picker", "Run the proxy as the endpoint picker of an Envoy."),
    "envoy-config": ("ppd.proxy.cli.envoy_config", "Write Envoy's configuration for a picker."),
    "up": ("ppd.servers.cli.up", "Run a fleet on this machine: workers by role, and the proxy."),
    "agent": ("ppd.servers.cli.agent", "Announce one engine to the proxy; launch it, or attach to a running one."),
    "sidecar": ("ppd.servers.cli.sidecar", "Stand before one engine behind a gateway: run the legs that headers name."),
    "sim": ("ppd.servers.sim.command", "Run one simulated engine."),
    "demo": ("ppd.servers.cli.demo", "Run a fleet and play a real conversation through it."),
    "table": ("ppd.proxy.cli.table", "Show and score decision tables."),
    "keys": ("ppd.proxy.cli.keys", "Make clients' API keys and heartbeats' certificates, and list a key file."),
    "doctor": ("ppd.proxy.cli.doctor.command", "Check a config or a running proxy, down to a real handoff."),
    "why": ("ppd.proxy.cli.why", "Tell why a turn was computed where it was."),
}


class Commands(Program):
    """`modules`: by command, the module that defines it as `command`, and a line of help."""

    modules: Mapping[str, tuple[str, str]] = COMMANDS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        command = self.load(self.modules[cmd_name][0], cmd_name).command
        assert isinstance(command, click.Command), "each module names its command `command`"
        return command

    def load(self, module: str, cmd_name: str) -> ModuleType:
        return importlib.import_module(module)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.modules.items()])


@click.command(cls=Commands)
@click.version_option(package_name="ppd-router")
def main() -> None:
    """PPD: a session-aware proxy for prefill/decode-disaggregated LLM serving."""
