"""`ppd serve`: reads the config, opens the port, and runs the proxy until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import fields
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from .assembly import assemble
from .config import SECRET, ProxyConfig, build
from .errors import PPDError
from .serving import listen, serve
from .settings import ConfigSource, Settings

log = logging.getLogger(__name__)


def _option(name: str, default: Any) -> click.Option:
    """A flag for a key of the config; its text names the default, never a secret."""
    kind: Any = {bool: bool, int: int, float: float}.get(type(default), str)
    if isinstance(default, StrEnum):
        kind = click.Choice([str(value) for value in type(default)])
    shown = "" if name in SECRET or default in ("", ()) else f"default {default}"
    many = isinstance(default, tuple)
    envvar = f"PPD_{name.upper()}" if name in SECRET else None  # a key on a command line is seen by all
    return click.Option(
        [f"--{name.replace('_', '-')}", name], type=kind, multiple=many, default=None, help=shown, envvar=envvar
    )


def _run(config_path: Path | None, **flags: object) -> None:
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    try:
        config = build(config_path, given)
        settings = Settings(config, ConfigSource(config_path, given) if config_path else None)
    except PPDError as exc:
        raise click.ClickException(str(exc)) from exc
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_serve(settings))
    except PPDError as exc:
        raise click.ClickException(str(exc)) from exc


def describe(settings: Settings) -> str:
    """One line for the log that tells how this proxy runs."""
    config = settings.config
    table = ""
    if settings.rules().scored is not None:
        table = f", table {config.table} ({config.lookup}), w_ttft {config.w_ttft:g}, w_tpot {config.w_tpot:g}"
    beats = f"{config.heartbeat_host}:{config.heartbeat_port}" if config.heartbeat_port else "off"
    admin = "on" if config.admin_key else "off"
    return f"ppd {version('ppd-router')}: mode {config.mode}{table}; heartbeats {beats}; admin API {admin}"


async def _serve(settings: Settings) -> None:
    """Until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log.info("%s", describe(settings))
    with listen(settings.config) as listening:
        await serve(assemble(settings), listening, stop)


command = click.Command(
    "serve",
    callback=_run,
    help="Run the proxy. Every key of the config file is also a flag, and flags win.",
    params=[
        click.Option(["--config", "config_path"], type=click.Path(path_type=Path), help="TOML file"),
        *(_option(field.name, field.default) for field in fields(ProxyConfig)),
    ],
)
