"""The flags of `ppd sidecar`."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from ppd.proxy.cli.config_flags import KeyFlag
from ppd.proxy.config import KEYS, Draft
from ppd.proxy.connectors import CONNECTORS, is_of_sidecars, missing_coordinates, usual_engine
from ppd.proxy.discovery.heartbeat import check_address
from ppd.proxy.downstream.serve import listen
from ppd.proxy.errors import ConfigError, ConfigErrors, FormatError, PPDError
from ppd.proxy.fleet.worker import ANSWERING, Role, Worker
from ppd.proxy.gateway.headers import ENCODERS
from ppd.proxy.runtime.log_output import fill_standard_streams
from ppd.proxy.runtime.process import ignore_hangups, log_to_stderr, new_loop, stop_on_signals
from ppd.proxy.runtime.process_limits import (
    check_threads,
    collect_garbage_less,
    limit_heap,
    raise_open_files_limit,
)
from ppd.proxy.runtime.tls import client_tls, worker_tls

from ..sidecar.allow_list import AllowList
from ..sidecar.failed_legs import FailurePolicy, OnFailure
from ..sidecar.prefills import HEADER
from ..sidecar.sidecar import FIXED, SidecarOptions, assemble, serve
from .agent import coordinates_of, curve_keys

log = logging.getLogger(__name__)

# The keys of the proxy's config that a sidecar has too, by the same names.
KEYS_HERE = (
    *("tls_cert_file", "tls_key_file", "tls_client_ca_file", "data_plane", "shutdown_timeout_s", "drain_delay_s"),
    *("body_limit_bytes", "head_limit_bytes", "body_memory_bytes", "connections_per_address"),
    *("worker_api_key", "worker_ca_file", "worker_cert_file", "worker_key_file"),
    *("connect_timeout_s", "prefill_timeout_s", "handoff_max_age_s", "first_event_timeout_s", "answer_timeout_s"),
    *("idle_timeout_s", "keepalive_s", "relay_headers"),
    *("encoder_batch", "encoder_strip", "encoder_timeout_s", "media_limit"),
    *("receipt_log", "access_log", "log_level", "log_format", "log_lines_per_minute"),
)
TEXTS_HERE = {
    "worker_api_key": "sent to the engine, and to each P and E; if empty, the client's own Authorization is",
    "worker_ca_file": "authority for an engine, P and E that use TLS; empty: the system's",
    "worker_cert_file": "the certificate that is shown to them",
}
_NONE = "no list, so none is allowed"
CHOSEN = [name for name in CONNECTORS if is_of_sidecars(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flags:
    """Those of its own; the others are keys of the config. All as click gives them."""

    engine: str
    listen: str
    role: str
    connector: str
    coordinate: tuple[str, ...]
    prefill: tuple[str, ...]
    allow_prefill: tuple[str, ...]
    prefill_tls: bool
    sample_prefill: bool
    allow_encoder: tuple[str, ...]
    encoder_tls: bool
    on_prefill_failure: str
    prefill_retries: int
    report: str
    curve_key: Path | None
    curve_server_key: Path | None


def options_of(given: Mapping[str, Any]) -> SidecarOptions:
    """given: each flag's value by its name. ConfigError names each that cannot be used."""
    flags = _Flags(**{one.name: given[one.name] for one in fields(_Flags)})
    check_connector(flags.connector)
    role = Role(flags.role)
    host, port = _address("listen", flags.listen)
    engine = flags.engine
    scheme, _, address = engine.rpartition("://")
    if scheme not in ("", "http", "https"):
        raise ConfigError(f"engine = {engine!r}: must be http://host:port or https://host:port", param="engine")
    _address("engine", address := address.removesuffix("/"))
    if flags.report:
        _address("report", flags.report)
    keys = {name: given[name] for name in KEYS_HERE if given[name] not in (None, ())}
    config = Draft.read(None, {**keys, **FIXED, "host": host, "port": port}).checked()
    for files in (client_tls, worker_tls):
        files(config)
    return SidecarOptions(
        config=config,
        engine=address,
        engine_tls=scheme == "https",
        connector=flags.connector,
        role=role,
        coordinates=_coordinates("coordinate", role, address, flags.coordinate, flags.connector),
        prefills=dict(_prefill(text, flags.connector) for text in flags.prefill),
        allow_list=AllowList(",".join(flags.allow_prefill)),
        prefill_tls=flags.prefill_tls,
        sample_prefill=flags.sample_prefill,
        encoder_list=AllowList(",".join(flags.allow_encoder), "encoder"),
        encoder_tls=flags.encoder_tls,
        policy=FailurePolicy(OnFailure(flags.on_prefill_failure), flags.prefill_retries),
        report=flags.report,
        curve=curve_keys(flags.curve_key, flags.curve_server_key),
    )


def check_connector(connector: str) -> None:
    """ConfigError, which says why, for one whose legs a sidecar cannot run."""
    if connector not in CHOSEN:
        why = "its P tells D's leg only when it is asked, and a sidecar asks nobody"
        raise ConfigError(f"connector = {connector}: must be {', '.join(CHOSEN)}: {why}", param="connector")


def _prefill(text: str, connector: str) -> tuple[str, dict[str, str]]:
    """HOST:PORT,NAME=VALUE,..., as among a config's workers."""
    address, *told = text.split(",")
    _address("prefill", address := address.lower())
    return address, _coordinates("prefill", Role.PREFILL, address, told, connector)


def _coordinates(flag: str, role: Role, address: str, texts: Iterable[str], connector: str) -> dict[str, str]:
    """What the connector must know of this worker, all of it."""
    told = coordinates_of(flag, texts, connector)
    if missing := missing_coordinates(
        Worker(role=role, address=address, connector=connector, engine=usual_engine(connector), coordinates=told)
    ):
        raise ConfigError(f"{flag}: {connector} must know {', '.join(missing)}", param=flag)
    return told


def _address(flag: str, text: str) -> tuple[str, int]:
    try:
        host, _, port = check_address(text, flag).rpartition(":")
    except FormatError:
        raise ConfigError(f"{flag} = {text!r}: must be host:port, with a port from 1 to 65535", param=flag) from None
    return host.strip("[]"), int(port)


def _run(**given: Any) -> None:
    try:
        options = options_of(given)
        limit_heap()
        raise_open_files_limit()
        ignore_hangups()
        fill_standard_streams()
        check_threads()
        log_to_stderr(options.config)
        with listen(options.config) as listening, asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_serve(options, listening))
    except PPDError as exc:
        raise click.ClickException(exc.in_lines() if isinstance(exc, ConfigErrors) else exc.message) from exc


async def _serve(options: SidecarOptions, listening: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT, which drains; a second one ends the process at once."""
    stop = stop_on_signals(twice_ends=True)
    sidecar = assemble(options)
    collect_garbage_less()
    config = options.config
    log.info(
        "ppd sidecar: %s:%d before the engine %s; P that it may ask: %s; E: %s",
        *(config.host, config.port, options.engine),
        ",".join(filter(None, (options.allow_list.text, *options.prefills))) or _NONE,
        options.encoder_list.text or _NONE,
    )
    await serve(sidecar, listening, stop)


command = click.Command(
    "sidecar",
    callback=_run,
    help="Stand before one engine behind a gateway: run the legs that the endpoint picker's headers name.",
    params=[
        click.Option(["--engine"], required=True, help="base URL of the engine, such as http://127.0.0.1:8200"),
        click.Option(["--listen"], required=True, help="host:port where the gateway reaches this sidecar"),
        click.Option(
            ["--role"],
            type=click.Choice(sorted(map(str, ANSWERING))),
            default=str(Role.DECODE),
            show_default=True,
            help="of the engine: what it computes without a P is LOCAL on a D and REPLICA on an R",
        ),
        click.Option(["--connector"], type=click.Choice(list(CONNECTORS)), default="nixl", show_default=True),
        click.Option(
            ["--coordinate"], multiple=True, help="NAME=VALUE that the connector must know of the engine; repeatable"
        ),
        click.Option(
            ["--prefill"],
            multiple=True,
            help="HOST:PORT,NAME=VALUE,...: a P that may be named, with what the connector must know of it; repeatable",
        ),
        click.Option(
            ["--allow-prefill"],
            multiple=True,
            help=f"P that {HEADER} may name: address ranges or host:port, with commas between, or a file of these, one "
            "a line, which is watched; may be given several times; default: none",
        ),
        click.Option(["--prefill-tls"], is_flag=True, help="P are reached over TLS"),
        click.Option(["--sample-prefill"], is_flag=True, help="of several P in the header take any, not the first"),
        click.Option(
            ["--allow-encoder"],
            multiple=True,
            help=f"E that {ENCODERS} may name, as --allow-prefill; default: none",
        ),
        click.Option(["--encoder-tls"], is_flag=True, help="E are reached over TLS"),
        click.Option(
            ["--on-prefill-failure"],
            type=click.Choice([str(each) for each in OnFailure]),
            default=str(OnFailure.DECODE),
            show_default=True,
            help="the engine computes the prompt; or the client gets P's answer; or the same after --prefill-retries",
        ),
        click.Option(
            ["--prefill-retries"],
            type=click.IntRange(0, 100),
            default=0,
            show_default=True,
            help="with retry: how often a P that answered 502 to 504, or not at all, is asked again, after 200 ms",
        ),
        click.Option(["--report"], default="", help="heartbeat host:port of the picker, which is told how turns went"),
        click.Option(["--curve-key"], type=click.Path(path_type=Path), help="this sidecar's secret certificate"),
        click.Option(["--curve-server-key"], type=click.Path(path_type=Path), help="the picker's public certificate"),
        *(KeyFlag(KEYS[name], TEXTS_HERE.get(name, "")) for name in KEYS_HERE),
    ],
)
