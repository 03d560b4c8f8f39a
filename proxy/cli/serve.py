"""`ppd serve`: reads the config, opens the port, and runs the proxy until a signal ends it."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import click

from ..assembly import OwnFiles, Proxy, assemble
from ..config import Draft, Mode, host_and_port, notices
from ..config.reference import json_schema
from ..downstream.serve import check_others_free, listen, serve
from ..errors import ConfigErrors, PPDError
from ..peers.channels import Member
from ..peers.supervisor import UNUSABLE, Supervisor
from ..policy.modes import PREDICTING
from ..runtime.log_output import LogOutput, fill_standard_streams
from ..runtime.process import ignore_hangups, log_to_stderr, new_loop, stop_on_signals
from ..runtime.process_limits import check_threads, collect_garbage_less, limit_heap, raise_open_files_limit
from ..settings import ConfigSource, Settings
from ..telemetry.metrics import log_counters
from .config_check import check
from .config_flags import ConfigCommand

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Given:
    """By the supervisor to one of several processes."""

    member: Member
    files: OwnFiles
    alive: int  # a file descriptor whose other end closes when the supervisor is gone


def run(config_path: Path | None, check_only: bool, **flags: object) -> None:
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    source = ConfigSource(config_path, given) if config_path else None
    try:
        draft = source.read() if source else Draft.read(None, given)
        settings = Settings(check(draft), source)
    except PPDError as exc:
        raise click.ClickException(exc.in_lines() if isinstance(exc, ConfigErrors) else exc.message) from exc
    if check_only:
        click.echo(describe(settings))
        for told in notices(settings.config):
            click.echo(f"warning: {told}", err=True)
        return
    _start(settings)


def _start(settings: Settings) -> None:
    config = settings.config
    limit_heap()
    ignore_hangups()
    fill_standard_streams()
    is_alone = config.processes == 1
    try:
        raise_open_files_limit()
        check_threads()
        output = log_to_stderr(config, has_threads=is_alone)
        with listen(config) as listening:
            if not is_alone:
                check_others_free(config)
                files = OwnFiles.read(config)
                work = partial(_run_one, settings, files, listening)

                def reread() -> None:
                    files.look()
                    settings.look_at_endpoints()

                raise SystemExit(Supervisor(config.processes, work, listening.close, reread).run())
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(_serve(settings, listening, output))
    except PPDError as exc:
        raise click.ClickException(str(exc)) from exc


def _run_one(settings: Settings, files: OwnFiles, listening: socket.socket, member: Member, alive: int) -> int:
    try:
        check_threads()
        output = log_to_stderr(settings.config)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_serve(settings, listening, output, _Given(member, files, alive)))
    except PPDError as exc:
        log.error("%s", exc)
        return UNUSABLE
    return 0


def describe(settings: Settings, port: int = 0) -> str:
    """port: on which clients are taken, where that is known already; 0: as the config says."""
    config = settings.config
    beats = host_and_port(config.heartbeat_host, config.heartbeat_port) if config.heartbeat_port else "off"
    admin = "on" if config.admin_key else "off"
    scheme = "https" if config.tls_cert_file else "http"
    processes = f"{config.processes} processes; " if config.processes > 1 else ""
    keys = f"by {config.keys_file}" if config.keys_file else "not asked for"
    mode = ", ".join((config.mode, *_decides_by(settings)))
    return (
        f"ppd {version('ppd-router')}: {scheme}://{host_and_port(config.host, port or config.port)}; {processes}"
        f"mode {mode}; heartbeats {beats}; clients' keys {keys}; admin API {admin}"
    )


def _decides_by(settings: Settings) -> Iterator[str]:
    config = settings.config
    weights = f"w_ttft {config.w_ttft:g}, w_tpot {config.w_tpot:g}"
    if settings.rules().scored is not None:
        yield f"table {config.table} ({config.lookup}), {weights}"
    if settings.schedule is not None:
        yield f"epp_config {config.epp_config} ({settings.schedule.describe()})"
    if config.mode in PREDICTING:
        yield f"profile {config.profile or 'of each worker'}"
    if config.mode is Mode.WEIGHTS:
        yield weights
    if config.mode in (Mode.SLO, Mode.SLACK):
        yield f"TTFT {config.slo_ttft_s:g} s or {config.slo_ttft_factor:g} x idle, TPOT {config.slo_tpot_s:g} s"


def _tell(settings: Settings, port: int) -> None:
    log.info("%s", describe(settings, port))
    for told in notices(settings.config):
        log.warning("%s", told)


def _lost_lines(proxy: Proxy, output: LogOutput) -> dict[str, int]:
    return {"log": output.lines.lost, "access": 0 if proxy.access_log is None else proxy.access_log.lost}


def _stop_without_supervisor(alive: int, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def gone() -> None:
        loop.remove_reader(alive)
        stop.set()

    loop.add_reader(alive, gone)


async def _serve(
    settings: Settings,
    listening: socket.socket,
    output: LogOutput,
    given: _Given | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, which drains; a second one ends the process at once, by the default handler.

    given: None: it is the only process.
    """
    stop = stop_on_signals(twice_ends=given is None)  # of several processes the supervisor decides
    if given is None:
        proxy = assemble(settings)
    else:
        _stop_without_supervisor(given.alive, stop)
        proxy = assemble(settings, member=given.member, files=given.files)
    proxy.state.metrics.watch(lambda: log_counters(_lost_lines(proxy, output), output.limit.held_back))
    collect_garbage_less()

    def tell() -> None:
        if proxy.membership.leads:  # of several processes one does
            _tell(settings, listening.getsockname()[1])

    await serve(proxy, listening, stop, tell)


def _show_schema(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(json.dumps(json_schema(), indent=2))
        ctx.exit()


command = ConfigCommand(
    "serve",
    callback=run,
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
