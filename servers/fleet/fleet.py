"""A fleet on one machine: an agent and an engine for each worker, and before them the proxy, or Envoy and a picker.

`plan` is pure: it lists the programs and their ports. `LocalFleet` starts them, waits until the proxy can use every
worker, and stops them all.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from ppd.proxy.config import Mode
from ppd.proxy.connectors.nixl import READS_BACK, Nixl
from ppd.proxy.connectors.nixl_push import NixlPush
from ppd.proxy.fleet.worker import ANSWERING, Role

from ..sim.protocols import PROTOCOLS
from ..sim.protocols.legs import Own
from ..vllm.launch import Launch
from .gateway import EnvoyGateway, picker_flags, sidecar_flags
from .ports import FIRST_PORT, FIRST_SIDE_CHANNEL, FIRST_SIDECAR, HOST
from .prepare import Prepared
from .process import EngineFailed, EngineProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    engine: str  # sim or vllm
    workers: Mapping[Role, int]
    prepared: Prepared
    x_of_decodes: tuple[float | None, ...] = ()  # the own x of each D; None, or none here: it has none
    connector: str | None = None  # of P and D; None: the usual one
    readback: bool = False  # D keep KV for P to read back, and both say so
    tensor_parallel: int = 1
    encoder_folder: Path | None = None  # of vLLM's encoder cache: made for this fleet, and removed at its end
    port: int = 10001
    gateway: EnvoyGateway | None = None  # in place of the proxy, on its port
    heartbeat_port: int = 30001
    port_offset: int = 0  # added to every worker's port, so that two fleets fit on one machine
    # No other proxy knows the default: what answers to it is this fleet's own.
    admin_key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    proxy_args: tuple[str, ...] = ()
    log_dir: Path = field(default_factory=lambda: Path("ppd-logs"))


@dataclass(frozen=True, slots=True)
class FleetProgram:
    name: str  # "P-8100", or "proxy"
    address: str
    launch: Launch
    log: Path
    worker: str = ""  # of an agent: the address that it announces

    def known_as(self, names: Mapping[str, str]) -> str:
        """names: by address, what the proxy calls its workers: it numbers them as they come."""
        known = names.get(self.worker or self.address)
        if known is None:
            return self.name
        return known if self.worker else f"{known}-sidecar"


def plan(spec: FleetSpec) -> tuple[FleetProgram, ...]:
    members = [_proxy(spec)]
    if spec.gateway is not None:
        envoy = Launch(spec.gateway.command(spec.port), {})
        members.append(FleetProgram("envoy", f"{HOST}:{spec.port}", envoy, spec.log_dir / "envoy.log"))
    ordinal = answering = 0
    for role in Role:
        for index in range(spec.workers.get(role, 0)):
            listens = ""
            if spec.gateway is not None and role in ANSWERING:
                listens = f"{HOST}:{FIRST_SIDECAR + spec.port_offset + answering}"
                answering += 1
            worker = _worker(spec, role, index, ordinal, listens)
            members.append(worker)
            if listens:
                members.append(_sidecar(spec, role, worker, listens))
            ordinal += 1
    return tuple(members)


def _proxy(spec: FleetSpec) -> FleetProgram:
    front = ("--port", str(spec.port)) if spec.gateway is None else picker_flags(spec.port)
    flags = [*front, "--heartbeat-port", str(spec.heartbeat_port), *spec.proxy_args]
    if any(x is not None for x in spec.x_of_decodes):
        flags += ["--mode", Mode.FRACTION]
    launch = Launch((*_ppd("serve"), *flags), {"PPD_ADMIN_KEY": spec.admin_key})
    name = "proxy" if spec.gateway is None else "picker"
    return FleetProgram(name, f"{HOST}:{front[1]}", launch, spec.log_dir / f"{name}.log")


def _sidecar(spec: FleetSpec, role: Role, worker: FleetProgram, listens: str) -> FleetProgram:
    name, connector = f"{worker.name}-sidecar", spec.connector
    if role is not Role.DECODE and (connector is None or PROTOCOLS[connector].engine == "vllm"):
        connector = None  # this R has none
    known = () if connector is None or role is not Role.DECODE else _known_to_sidecar(spec, worker)
    flags = sidecar_flags(worker.address, role, listens, f"{HOST}:{spec.heartbeat_port}", connector, known)
    return FleetProgram(name, listens, Launch((*_ppd("sidecar"), *flags), {}), spec.log_dir / f"{name}.log")


def _known_to_sidecar(spec: FleetSpec, decode: FleetProgram) -> tuple[str, ...]:
    """What a heartbeat tells the picker of this D and of each P, where the connector must know it."""
    flags = [f"--coordinate={name}={value}" for name, value in _coordinates(spec, Role.DECODE, decode.address).items()]
    for index in range(spec.workers.get(Role.PREFILL, 0)):
        address = f"{HOST}:{FIRST_PORT[Role.PREFILL] + spec.port_offset + index}"
        told = _coordinates(spec, Role.PREFILL, address)
        if told:
            flags.append(",".join((f"--prefill={address}", *(f"{name}={value}" for name, value in told.items()))))
    return tuple(flags)


def _coordinates(spec: FleetSpec, role: Role, address: str) -> dict[str, str]:
    """As the worker's agent announces them."""
    before = sum(count for other, count in spec.workers.items() if list(Role).index(other) < list(Role).index(role))
    ordinal = before + int(address.rpartition(":")[2]) - FIRST_PORT[role] - spec.port_offset
    own = Own(role, address, HOST, FIRST_SIDE_CHANNEL + spec.port_offset + ordinal)
    told = PROTOCOLS[spec.connector or Nixl.name].coordinates(own)
    if spec.connector == NixlPush.name and spec.tensor_parallel > 1:
        told["tp_size"] = str(spec.tensor_parallel)
    return told


def _worker(spec: FleetSpec, role: Role, index: int, ordinal: int, advertised: str) -> FleetProgram:
    """advertised: where the proxy reaches it, if not at its own port."""
    port = FIRST_PORT[role] + spec.port_offset + index
    argv = [*_ppd("agent"), "--role", role, "--engine", spec.engine, "--port", str(port)]
    argv += ["--proxy", f"{HOST}:{spec.heartbeat_port}"]
    argv += ["--side-channel-port", str(FIRST_SIDE_CHANNEL + spec.port_offset + ordinal)]
    argv += ["--advertise", advertised, "--sidecar"] if advertised else []
    name, engine = f"{role}-{port}", spec.prepared  # not "D1": the proxy numbers workers as they come
    engine_log = spec.log_dir / f"{name}-engine.log"
    argv += ["--log", str(engine_log)]
    own_x = spec.x_of_decodes[index] if role is Role.DECODE and spec.x_of_decodes else None
    if own_x is not None:
        argv += ["--x", f"{own_x:g}"]
    if engine.model:
        argv += ["--model", engine.model]
    if (
        spec.connector
        and role is not Role.ENCODE
        and (role is not Role.REPLICA or PROTOCOLS[spec.connector].engine != "vllm")
    ):
        argv += ["--connector", spec.connector]
    if spec.connector == NixlPush.name and role in (Role.PREFILL, Role.DECODE):  # as sidecars know it; all end at once
        argv += ["--coordinate", f"engine_id={HOST}:{port}"]
    if spec.readback and role in (Role.PREFILL, Role.DECODE):
        argv += ["--coordinate", f"{READS_BACK}=true"]
    if spec.engine == "vllm":
        argv += ["--device", engine.device, "--tensor-parallel", str(spec.tensor_parallel), "--python", engine.python]
        argv += ["--encoder-cache", str(spec.encoder_folder)] if spec.encoder_folder is not None else []
    args = engine.engine_args
    if engine.device == "cuda":
        gpus, share = share_of_gpus(spec, ordinal)
        argv += ["--gpus", ",".join(map(str, gpus))]
        args = (*(("--gpu-memory-utilization", f"{share:.2f}") if share < 1 else ()), *args)
    address = f"{HOST}:{port}"
    launch = Launch((*argv, "--", *args), dict(engine.env))
    return FleetProgram(name, address, launch, engine_log, advertised or address)


def share_of_gpus(spec: FleetSpec, ordinal: int) -> tuple[tuple[int, ...], float]:
    """A worker's GPUs, and its share of each one's memory: 1 if it shares them with no other worker.

    GPUs are assigned in order; if there are fewer than the fleet needs, workers share them evenly.
    """
    count, wanted = spec.prepared.gpu_count, sum(spec.workers.values()) * spec.tensor_parallel
    first = ordinal * spec.tensor_parallel
    gpus = tuple((first + n) % count for n in range(spec.tensor_parallel))
    return gpus, 1.0 if wanted <= count else 0.9 / math.ceil(wanted / count)


def _ppd(command: str) -> list[str]:
    return [sys.executable, "-m", "ppd.servers", command]


class LocalFleet:
    """The running programs of a plan; an async context manager."""

    def __init__(self, spec: FleetSpec) -> None:
        self._spec = spec
        self.members = plan(spec)
        self.names: dict[str, str] = {}  # by address, what the proxy calls its workers, as soon as they are up
        self._front = self.members[0].name
        self._processes = {
            member.name: EngineProcess(member.launch, spec.log_dir / f"{member.name}.log", name=member.name)
            for member in self.members
        }

    async def __aenter__(self) -> LocalFleet:
        if self._spec.encoder_folder is not None:  # not before: a fleet may still be refused
            self._spec.encoder_folder.mkdir(mode=0o700)
        try:
            for process in self._processes.values():
                await process.start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._spec.port}"

    def process(self, name: str) -> EngineProcess:
        return self._processes[name]

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns when every worker is up at the proxy; EngineFailed, with a log's tail, as soon as a program ends."""
        ended = [asyncio.ensure_future(self._ended(process)) for process in self._processes.values()]
        ready = asyncio.ensure_future(self._ready())
        try:
            done, _ = await asyncio.wait({ready, *ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise EngineFailed(
                    f"the fleet was not ready after {timeout_s:g} s; {self._processes[self._front].last_words()}"
                )
            for task in done:
                task.result()
        finally:
            for task in (ready, *ended):
                task.cancel()
            await asyncio.gather(ready, *ended, return_exceptions=True)

    async def wait_ended(self) -> None:
        """Waits until a program ends by itself; then EngineFailed."""
        await asyncio.gather(*(self._ended(process) for process in self._processes.values()))

    async def _ended(self, process: EngineProcess) -> None:
        code = await process.wait()
        name = next(member.known_as(self.names) for member in self.members if member.name == process.name)
        raise EngineFailed(f"{name} ended with {code}; {process.last_words()}")

    async def _ready(self) -> None:
        wanted = {member.worker for member in self.members if member.worker}
        headers = {"X-Admin-Key": self._spec.admin_key}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5), headers=headers) as session:
            while not wanted <= self.names.keys():
                await asyncio.sleep(0.1)
                self.names = await self._workers_up(session)

    async def _workers_up(self, session: aiohttp.ClientSession) -> dict[str, str]:
        """Names by address, as the fleet's own proxy lists them: another one on its port refuses the admin key."""
        try:
            async with session.get(f"{self.url}/admin/workers") as response:
                if response.status != 200:
                    return {}
                listed = (await response.json(content_type=None))["workers"]
                return {worker["id"]: worker["name"] for worker in listed if worker["state"] == "up"}
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
            return {}

    async def _stop(self) -> None:
        # Workers first, so that none announces itself to a proxy that is gone, and what carries their turns last.
        workers = {member.name for member in self.members if member.worker}
        await asyncio.gather(*(self._processes[name].stop() for name in workers))
        others = (process for name, process in self._processes.items() if name not in workers)
        await asyncio.gather(*(process.stop() for process in others))
        if self._spec.encoder_folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._spec.encoder_folder, ignore_errors=True)
