"""The flags of `ppd agent`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import zmq.auth

from ppd.proxy.cli import NumberRange
from ppd.proxy.connectors import CONNECTORS, usual_connector
from ppd.proxy.connectors.nixl import KEPT_S, KEPT_USUALLY_S, READS_BACK
from ppd.proxy.discovery.heartbeat import check_address, check_coordinates, check_labels, check_sidecar, check_x
from ppd.proxy.errors import ConfigError, FormatError, PPDError
from ppd.proxy.fleet.worker import NO_EVENTS, TAKES_PLAIN, EventSource, Role

from ..agent.agent import Agent, Identity, run_until_signal
from ..agent.announcer import Announcer
from ..fleet.ports import check_free
from ..fleet.process import EngineProcess
from ..sim.protocols import PROTOCOLS
from ..sim.protocols.legs import Own
from ..vllm.launch import CONNECTORS as VLLM_CONNECTORS
from ..vllm.launch import WILDCARDS, Device, EngineSpec, Launch
from ..vllm.launch import command as vllm_command

_SIZES = {
    "--tensor-parallel-size": "tp_size",
    "-tp": "tp_size",
    "--pipeline-parallel-size": "pp_size",
    "-pp": "pp_size",
}
_CONNECTORS = list(dict.fromkeys((*CONNECTORS, *PROTOCOLS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """The flags, named as on the command line."""

    role: Role
    proxies: tuple[str, ...]
    attach: str
    engine: str
    model: str
    host: str
    port: int
    side_channel_host: str
    side_channel_port: int
    kv_events_port: int
    kv_replay_port: int
    device: Device
    gpus: str
    tensor_parallel: int
    python: str
    advertise: str
    connector: str
    coordinates: tuple[str, ...]
    x: float | None
    profile: str
    labels: tuple[str, ...]
    sidecar: bool
    interval: float
    drain_timeout: float
    api_key: str
    curve_key: Path | None
    curve_server_key: Path | None
    log_path: Path
    encoder_cache: str
    engine_args: tuple[str, ...]
    launch_id: str = field(default_factory=lambda: uuid.uuid4().hex)


def launch_of(options: AgentOptions) -> Launch:
    coordinates = coordinates_of("coordinate", options.coordinates, options.connector)
    keeps_s = int(coordinates.get(KEPT_S, KEPT_USUALLY_S)) if READS_BACK in coordinates else 0
    if options.engine == "sim":
        argv = [sys.executable, "-m", "ppd.servers.sim", "--role", options.role, "--host", options.host]
        argv += ["--port", str(options.port), "--side-channel-port", str(options.side_channel_port)]
        argv += ["--connector", options.connector] if options.connector != "nixl" else []
        argv += ["--engine-id", own_end(options).engine_id] if options.connector == "nixl_push" else []
        argv += ["--takes-plain"] if coordinates.get(TAKES_PLAIN) == "true" else []
        argv += ["--bidirectional-kv-xfer", "--decoder-kv-blocks-ttl", str(keeps_s)] if keeps_s else []
        if options.kv_events_port:
            argv += ["--kv-events-endpoint", f"tcp://*:{options.kv_events_port}"]
            argv += (
                ["--kv-events-replay-endpoint", f"tcp://*:{options.kv_replay_port}"] if options.kv_replay_port else []
            )
        return Launch((*argv, *(("--model", options.model) if options.model else ()), *options.engine_args))
    if options.engine in ("sglang", "trtllm"):
        raise ConfigError(f"engine = {options.engine!r}: must be attached to, with --attach", param="engine")
    if not options.model:
        raise ConfigError("model = '': must name the model that the engine serves", param="model")
    spec = EngineSpec(
        role=options.role,
        model=options.model,
        host=options.host,
        port=options.port,
        side_channel_host=options.side_channel_host or options.advertise.rpartition(":")[0],
        kv_events_port=options.kv_events_port or None,
        kv_replay_port=options.kv_replay_port or None,
        side_channel_port=options.side_channel_port,
        connector=options.connector,
        engine_id=own_end(options).engine_id,
        encoder_cache=options.encoder_cache,
        reads_back=READS_BACK in coordinates,
        keeps_s=keeps_s or KEPT_USUALLY_S,
        device=options.device,
        gpus=_indices(options.gpus),
        tensor_parallel=options.tensor_parallel,
        python=options.python,
        extra_args=options.engine_args,
    )
    return vllm_command(spec)


def own_end(options: AgentOptions) -> Own:
    """The engine's end of KV transfers. A launched engine is told it, or makes the same of its own address."""
    host = options.side_channel_host or options.advertise.rpartition(":")[0] or options.host
    # With the id of the one before, a D that knows that one would wait for it; see `ppd.proxy.health.strangers`.
    engine_id = f"{options.host}:{options.port}-{options.launch_id[:8]}"
    pinned = coordinates_of("coordinate", options.coordinates, options.connector).get("engine_id", engine_id)
    return Own(options.role, pinned, host, options.side_channel_port)


def identity_of(options: AgentOptions, address: str) -> Identity:
    if not options.advertise and not options.attach and options.host in WILDCARDS:
        raise ConfigError(f"advertise: must be given when host is {options.host!r}: proxies connect to it")
    if options.sidecar and not options.advertise:
        raise ConfigError("sidecar: must be given with --advertise, which names the sidecar's address", param="sidecar")
    coordinates = coordinates_of("coordinate", options.coordinates, options.connector)
    protocol = PROTOCOLS.get(options.connector)
    return Identity(
        role=options.role,
        address=check_address(options.advertise or address, "advertise"),
        engine=options.engine if protocol is None or protocol.engine == "vllm" else protocol.engine,
        connector=options.connector,
        coordinates=check_coordinates(_known_coordinates(options) | coordinates, options.connector),
        kv_events=_event_source(options, options.advertise or address),
        x=check_x(options.x, options.role),
        profile=options.profile,
        labels=check_labels(_named(options.labels, "label")),
        has_sidecar=check_sidecar(options.role, options.connector, has_one=options.sidecar),
        launch_id=options.launch_id,
    )


def _known_coordinates(options: AgentOptions) -> dict[str, str]:
    """Those of an engine that is launched here, as its flags and its environment say."""
    protocol = PROTOCOLS.get(options.connector)
    if protocol is None or options.attach or (options.engine == "vllm" and options.connector not in VLLM_CONNECTORS):
        return {}
    known = protocol.coordinates(own_end(options))
    if options.connector == "nixl_push" and options.engine == "vllm":
        sizes = {"tp_size": str(options.tensor_parallel)} | _sizes(options.engine_args)
        known |= {name: size for name, size in sizes.items() if size != "1"}
    return known


def _sizes(engine_args: Iterable[str]) -> dict[str, str]:
    """What vLLM's own flags say of its ranks; the last one counts, as with vLLM."""
    words = [part for arg in engine_args for part in (arg.split("=", 1) if arg.startswith("-") else (arg,))]
    named = ((_SIZES.get(flag.replace("_", "-")), size) for flag, size in pairwise(words))
    return {name: size for name, size in named if name is not None and size.isdecimal()}


def coordinates_of(flag: str, texts: Iterable[str], connector: str) -> dict[str, str]:
    """NAME=VALUE each; ConfigError for what the connector does not know, or could not use."""
    told = _named(tuple(texts), flag)
    known = CONNECTORS[connector].coordinates if connector in CONNECTORS else told
    for name in told.keys() - known.keys():
        allowed = f"be of {', '.join(known)}" if known else "not be given"
        raise ConfigError(f"{flag} = {name}={told[name]}: must {allowed} with connector {connector}", param=flag)
    try:
        return check_coordinates(told, connector)
    except FormatError as exc:
        raise ConfigError(f"{flag}: {exc}", param=flag) from None


def _named(texts: tuple[str, ...], flag: str) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    if not all(name and value for name, _, value in pairs):
        raise ConfigError(f"{flag} = {', '.join(texts)}: must be NAME=VALUE", param=flag)
    return {name: value for name, _, value in pairs}


def _event_source(options: AgentOptions, address: str) -> EventSource:
    """As proxies reach it: on the engine's own host."""
    host = address.rpartition(":")[0]
    if not options.kv_events_port:
        return NO_EVENTS
    replay = f"tcp://{host}:{options.kv_replay_port}" if options.kv_replay_port else ""
    return EventSource(f"tcp://{host}:{options.kv_events_port}", replay)


def _indices(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise ConfigError(f"gpus = {text!r}: must be indices such as 0,1", param="gpus") from None


def curve_keys(key_file: Path | None, server_key_file: Path | None) -> tuple[bytes, bytes, bytes] | None:
    """The agent's public and secret key and the proxy's public key, from ZeroMQ certificates; None without files."""
    if key_file is None and server_key_file is None:
        return None
    if key_file is None or server_key_file is None:
        raise ConfigError("curve_key and curve_server_key: must be given together", param="curve_key")
    try:
        public, secret = zmq.auth.load_certificate(key_file)
        server, _ = zmq.auth.load_certificate(server_key_file)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"curve_key, curve_server_key: must be ZeroMQ certificates ({exc})") from exc
    if secret is None:
        raise ConfigError(f"curve_key = {str(key_file)!r}: must be the secret certificate", param="curve_key")
    return public, secret, server


def address_of(url: str) -> str:
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        is_whole = parts.scheme in ("", "http") and parts.hostname and parts.port
    except ValueError:
        is_whole = False
    if not is_whole:
        raise ConfigError(f"attach = {url!r}: must be http://host:port, with a port from 1 to 65535", param="attach")
    return parts.netloc


@click.command("agent")
@click.option("--role", type=click.Choice([role.value for role in Role]), required=True)
@click.option("--proxy", "proxies", multiple=True, default=("127.0.0.1:30001",), show_default=True, help="repeatable")
@click.option("--attach", default="", help="base URL of a running engine; default: launch one")
@click.option(
    "--engine",
    type=click.Choice(["sim", "vllm", "sglang", "trtllm"]),
    default="vllm",
    show_default=True,
    help="sglang, trtllm: attached",
)
@click.option("--model", default="", help="folder or name of the model to launch with")
@click.option("--host", default="127.0.0.1", show_default=True, help="where the launched engine listens")
@click.option("--port", type=click.IntRange(1, 65535), default=8100, show_default=True)
@click.option("--side-channel-host", default="", help="where other engines reach NIXL; default: as --advertise, --host")
@click.option("--side-channel-port", type=click.IntRange(1, 65535), default=5600, show_default=True, help="of NIXL")
@click.option("--kv-events-port", type=click.IntRange(0, 65535), default=0, help="publish KV events; default: not")
@click.option("--kv-replay-port", type=click.IntRange(0, 65535), default=0, help="publish missed ones again there")
@click.option(
    "--encoder-cache",
    default="",
    help="of a launched vLLM: a folder that encoders share with those who compute prompts, or redis; E needs it",
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--gpus", default="", help="indices, such as 0,1; default: all")
@click.option("--tensor-parallel", type=click.IntRange(1), default=1, show_default=True)
@click.option("--python", default=sys.executable, show_default="this one", help="the interpreter that has vLLM")
@click.option("--advertise", default="", help="host:port at which proxies reach the engine; default: its own")
@click.option(
    "--connector",
    type=click.Choice(_CONNECTORS),
    default=None,
    show_default="nixl, sglang or trtllm, of an R none",
)
@click.option(
    "--coordinate",
    "coordinates",
    multiple=True,
    help="NAME=VALUE that the connector needs, or an engine that is launched gets; repeatable",
)
@click.option("--x", type=NumberRange(0, 1), help="of a D: share of its sessions kept LOCAL, in mode fraction")
@click.option("--profile", default="", help="name of the engine's profile, as proxies know it; default: theirs")
@click.option("--label", "labels", multiple=True, help="NAME=VALUE by which mode profiles chooses; repeatable")
@click.option("--sidecar", is_flag=True, help="of a D or R: --advertise names its sidecar, which asks P itself")
@click.option("--interval", type=NumberRange(0.1), default=10.0, show_default=True, help="s between heartbeats")
@click.option(
    "--drain-timeout", type=NumberRange(0), default=60.0, show_default=True, help="Seconds for its streams to end"
)
@click.option("--api-key", envvar="PPD_WORKER_API_KEY", default="", help="of the engine; or PPD_WORKER_API_KEY")
@click.option("--curve-key", type=click.Path(path_type=Path), help="this agent's secret certificate")
@click.option("--curve-server-key", type=click.Path(path_type=Path), help="the proxy's public certificate")
@click.option("--log", "log_path", type=click.Path(path_type=Path), default=Path("ppd-engine.log"), show_default=True)
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
def command(role: str, connector: str | None, **flags: Any) -> None:
    """Announce one engine to the proxy. ENGINE_ARGS after -- go to the engine that is launched."""
    options = AgentOptions(role=Role(role), connector=connector or usual_connector(role, flags["engine"]), **flags)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    try:
        for proxy in options.proxies:
            _check_proxy(proxy)
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(_run(options))
    except PPDError as exc:
        raise click.ClickException(str(exc)) from exc


def _check_proxy(address: str) -> None:
    try:
        check_address(address, "proxy")
    except FormatError:
        raise ConfigError(f"proxy = {address!r}: must be host:port, with a port from 1 to 65535") from None


async def _run(options: AgentOptions) -> None:
    address = address_of(options.attach) if options.attach else f"{options.host}:{options.port}"
    if options.attach and options.engine_args:
        raise ConfigError("ENGINE_ARGS: go to an engine that is launched, not to one that is attached")
    if not options.attach:
        # Another program's health would be taken for the launched engine's.
        check_free(options.port, "port", options.host)
    process = None if options.attach else EngineProcess(launch_of(options), options.log_path)
    identity = identity_of(options, address)
    announcer = Announcer(options.proxies, curve_keys(options.curve_key, options.curve_server_key))
    agent = Agent(
        identity,
        announcer,
        process,
        base_url=f"http://{address}",
        interval_s=options.interval,
        drain_timeout_s=options.drain_timeout,
        api_key=options.api_key,
    )
    try:
        await run_until_signal(agent)
    finally:
        announcer.close()
