"""`ppd serve`: reads the config, opens the port, and runs the proxy until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import click
from hypercorn.asyncio import serve
from hypercorn.config import Config

from .app import assemble, create_app
from .config import SECRET, ProxyConfig, build
from .errors import ConfigError, PPDError
from .settings import ConfigSource, Settings

BACKLOG = 4096  # a burst of clients must not be refused by the kernel


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
        asyncio.run(run_proxy(settings))
    except PPDError as exc:
        raise click.ClickException(str(exc)) from exc


async def run_proxy(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT; open streams get `shutdown_timeout_s` to end."""
    config = settings.config
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with _listen(config) as listening:
        server = Config()
        server.bind = [f"fd://{listening.fileno()}"]
        server.backlog = BACKLOG
        server.keep_alive_timeout = 75.0
        server.graceful_timeout = config.shutdown_timeout_s
        server.shutdown_timeout = config.shutdown_timeout_s
        server.include_server_header = False
        app = create_app(assemble(settings))
        await serve(app, server, shutdown_trigger=stop.wait)


def _listen(config: ProxyConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((config.host, config.port))
        listening.listen(BACKLOG)
    except OSError as exc:
        listening.close()
        raise ConfigError(
            f"port = {config.port}: must be a free port on {config.host} ({exc.strerror})", param="port"
        ) from exc
    return listening


command = click.Command(
    "serve",
    callback=_run,
    help="Run the proxy. Every key of the config file is also a flag, and flags win.",
    params=[
        click.Option(["--config", "config_path"], type=click.Path(path_type=Path), help="TOML file"),
        *(_option(field.name, field.default) for field in fields(ProxyConfig)),
    ],
)
