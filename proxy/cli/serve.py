"""`ppd serve`: reads the config, opens the port, and runs the proxy until a signal ends it."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from functools import partial
from importlib.metadata import version
from pathlib import Path

import click

from ..assembly import assemble
from ..config import Draft
from ..config.reference import json_schema
from ..downstream.serve import listen, serve
from ..errors import PPDError
from ..peers.channels import Member
from ..peers.supervisor import UNUSABLE, Supervisor
from ..runtime.process_limits import collect_garbage_less, limit_heap, raise_open_files_limit
from ..settings import ConfigSource, Settings
from .config_check import check
from .config_flags import ConfigCommand

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _run(config_path: Path | None, check_only: bool, **flags: object) -> None:
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    source = ConfigSource(config_path, given) if config_path else None
    try:
        draft = source.read() if source else Draft.read(None, given)
        settings = Settings(check(draft), source)
    except PPDError as exc:
        raise click.ClickException(str(exc)) from exc
    if check_only:
        click.echo(describe(settings))
        return
    _start(settings)


def _start(settings: Settings) -> None:
    config = settings.config
    limit_heap()
    raise_open_files_limit()
    _log_from(logging.getLevelNamesMapping()[config.log_level.upper()])
    log.info("%s", describe(settings))
    try:
        with listen(config) as listening:
            if config.processes > 1:
                work = partial(_run_one, settings, listening)
                raise SystemExit(Supervisor(config.processes, work, listening.close).run())
            with asyncio.Runner(loop_factory=_new_loop) as runner:
                runner.run(_serve(settings, listening))
    except PPDError as exc:
        raise click.ClickException(str(exc)) from exc


def _run_one(settings: Settings, listening: socket.socket, member: Member, alive: int) -> int:
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(_serve(settings, listening, member, alive))
    except PPDError as exc:
        log.error("%s", exc)
        return UNUSABLE
    return 0


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it is installed, which is not on Windows: it saves a third of a request's time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _log_from(level: int) -> None:
    """DEBUG is for our own loggers only: libraries would log their data, such as hpack every header, keys included."""
    logging.basicConfig(level=max(level, logging.INFO), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("ppd").setLevel(level)


def describe(settings: Settings) -> str:
    config = settings.config
    table = ""
    if settings.rules().scored is not None:
        table = f", table {config.table} ({config.lookup}), w_ttft {config.w_ttft:g}, w_tpot {config.w_tpot:g}"
    beats = f"{config.heartbeat_host}:{config.heartbeat_port}" if config.heartbeat_port else "off"
    admin = "on" if config.admin_key else "off"
    scheme = "https" if config.tls_cert_file else "http"
    processes = f"{config.processes} processes; " if config.processes > 1 else ""
    keys = f"by {config.keys_file}" if config.keys_file else "not asked for"
    return (
        f"ppd {version('ppd-router')}: {scheme}://{config.host}:{config.port}; {processes}mode {config.mode}{table}; "
        f"heartbeats {beats}; clients' keys {keys}; admin API {admin}"
    )


async def _serve(
    settings: Settings, listening: socket.socket, member: Member | None = None, alive: int | None = None
) -> None:
    """Serves until SIGTERM or SIGINT, which drains; a second one ends the process at once, by the default handler.

    alive: a file descriptor whose other end closes when the supervisor is gone, which drains too.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        stop.set()
        if member is not None:  # the supervisor decides when it ends at once
            return
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        log.info("draining; a second signal ends the process at once")

    def supervisor_gone() -> None:
        assert alive is not None
        loop.remove_reader(alive)
        stop.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, signalled)
    if alive is not None:
        loop.add_reader(alive, supervisor_gone)
    proxy = assemble(settings, member=member)
    collect_garbage_less()
    await serve(proxy, listening, stop)


def _show_schema(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(json.dumps(json_schema(), indent=2))
        ctx.exit()


command = ConfigCommand(
    "serve",
    callback=_run,
    help="Run the proxy. Every key of the config file is also a flag, and flags win.",
    params=[
        click.Option(["--config", "config_path"], type=click.Path(path_type=Path), help="TOML file"),
        click.Option(
            ["--check", "check_only"],
            is_flag=True,
            help="Look for all that is wrong in the config and the files that it names, and exit: 0 if nothing is.",
        ),
        click.Option(
            ["--schema"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_schema,
            help="Print a JSON Schema of the config file, for editors, and exit.",
        ),
    ],
)
