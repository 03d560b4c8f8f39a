"""`ppd picker`: `ppd serve`, with the port on which Envoy asks for endpoints."""

from __future__ import annotations

from pathlib import Path

import click

from . import host_and_port
from .config_check import checked
from .serve import run


@click.command("picker")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="TOML file, as of `ppd serve`.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    callback=host_and_port,
    help="Where Envoy asks; else picker_host and picker_port of the config.",
)
@click.option(
    "--health",
    metavar="HOST:PORT",
    callback=host_and_port,
    help="Where gRPC health checks alone are answered, on the same host.",
)
@click.option(
    "--processes", type=click.IntRange(1), help="So many processes share the port; else that of the config, or 1."
)
@click.option("--shadow", is_flag=True, help="Only watch what another picker decides, and note what this one would.")
def command(
    config_path: Path | None,
    listen: tuple[str, int] | None,
    health: tuple[str, int] | None,
    processes: int | None,
    shadow: bool,
) -> None:
    """Run the proxy as Envoy's endpoint picker.

    It decides turns that Envoy relays, and serves what is no turn, /metrics and the admin API on its own port.
    `ppd envoy-config` writes Envoy's side.
    """
    flags: dict[str, object] = {}
    if shadow:
        flags["picker_shadow"] = "true"
    if processes is not None:
        flags["processes"] = str(processes)
    if listen is not None:
        flags |= {"picker_host": listen[0], "picker_port": str(listen[1])}
    if health is not None:
        if listen is not None and health[0] != listen[0]:
            raise click.BadParameter(
                f"must be on the host of --listen, {listen[0]}, not on {health[0]}", param_hint="--health"
            )
        flags["picker_health_port"] = str(health[1])
    if listen is None and not checked(config_path).picker_port:
        raise click.UsageError("a picker needs --listen HOST:PORT, or a --config with picker_port")
    run(config_path, False, **flags)
