"""Runs on fleets that are started for them on this machine, one topology after the other."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ppd.proxy.errors import PPDError
from ppd.servers.cli.up import READY_S
from ppd.servers.fleet.fleet import FleetSpec, LocalFleet
from ppd.servers.fleet.ports import free_offset, free_ports
from ppd.servers.fleet.prepare import Prepared, prepare
from ppd.servers.fleet.process import EngineFailed
from ppd.servers.fleet.topology import Topology

from ..experiment.records import Origin, Outcome, Record, RunResult
from ..experiment.run import Run
from ..load.target import Target
from ..sweep.backend import FleetLost, Survey
from ..sweep.loop import failure
from .live import LiveFleet, RunLimits

STARTS = 2  # attempts, after which a topology is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """`engine`: sim or vllm. `model`: empty for the engine's default. `asking`: the target but for its url and keys."""

    engine: str
    log_dir: Path
    asking: Target
    model: str = ""
    tensor_parallel: int = 1
    engine_args: tuple[str, ...] = ()
    note: str = ""
    limits: RunLimits = field(default_factory=RunLimits)
    trace: Sequence[float] | None = None

    def open(self) -> LaunchBackend:
        return LaunchBackend(self)


@dataclass(frozen=True, slots=True)
class _Running:
    topology: str
    fleet: LocalFleet
    live: LiveFleet

    def serves(self, topology: str) -> bool:
        programs = [self.fleet.process(member.name) for member in self.fleet.members]
        return topology == self.topology and all(program.is_running for program in programs)


class LaunchBackend:
    """Keeps a fleet as long as runs of its topology come, and starts a new one after a failed run."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self._prepared: Prepared | None = None
        self._running: _Running | None = None

    def survey(self, samples: tuple[Run, ...]) -> Survey:
        host, prepared = socket.gethostname(), self._ready()
        unfit = too_large(samples, prepared, self._plan.tensor_parallel, host)
        return Survey(f"fleets on {host}", self._origin(samples[0].topology), unfit)

    def measure(self, run: Run) -> RunResult:
        return self._runner.run(self._measure(run))

    def close(self) -> None:
        self._runner.run(self._stop())
        self._runner.close()

    def _ready(self) -> Prepared:
        if self._prepared is None:
            plan = self._plan
            self._prepared = prepare(plan.engine, plan.model, plan.engine_args, lambda line: print(line, flush=True))
        return self._prepared

    async def _measure(self, run: Run) -> RunResult:
        if self._running is None or not self._running.serves(run.topology):
            await self._stop()
            self._running = await self._started(run.topology)
        try:
            result = await self._watched(run, self._running)
        except FleetLost:
            await self._stop()
            raise
        if result.outcome is Outcome.FAILED:
            await self._stop()
        return result

    async def _watched(self, run: Run, running: _Running) -> RunResult:
        """A process that exits fails the run at once, with the last line of its log; records until then are kept."""
        records: list[Record] = []
        measuring = asyncio.ensure_future(running.live.measure(run, records))
        ended = asyncio.ensure_future(running.fleet.wait_ended())
        try:
            await asyncio.wait({measuring, ended}, return_when=asyncio.FIRST_COMPLETED)
            if measuring.done():
                return measuring.result()
            ended.result()
            raise AssertionError("the wait for an end ends by an error")
        except EngineFailed as exc:
            return failure(run, self._origin(run.topology), in_one_line(exc), records)
        finally:
            for task in (measuring, ended):
                task.cancel()
            await asyncio.gather(measuring, ended, return_exceptions=True)

    async def _started(self, topology: str) -> _Running:
        reason = ""
        for _ in range(STARTS):
            try:
                return await self._start(topology)
            except PPDError as exc:
                reason = in_one_line(exc)
                await self._stop()
        raise FleetLost(f"it did not start: {reason}; logs are in {self._plan.log_dir}")

    async def _start(self, topology: str) -> _Running:
        plan, prepared = self._plan, self._ready()
        port_offset = self._stack.enter_context(free_offset(Topology.parse(topology).by_role))
        spec = fleet_spec(plan, prepared, topology, port_offset)
        fleet = await self._stack.enter_async_context(LocalFleet(spec))
        await fleet.wait_ready(READY_S[plan.engine])
        live = LiveFleet(
            target=replace(plan.asking, url=fleet.url, model=prepared.name, admin_key=spec.admin_key),
            origin=self._origin(topology),
            limits=plan.limits,
            trace=plan.trace,
        )
        return _Running(topology, fleet, live)

    async def _stop(self) -> None:
        self._running = None
        await self._stack.aclose()

    def _origin(self, topology: str) -> Origin:
        # The engine's version and its connector are known once it runs.
        plan, prepared = self._plan, self._ready()
        on_gpu = prepared.device == "cuda"
        return Origin(
            backend="launch",
            engine="",
            model=prepared.name,
            gpu=gpu_name() if on_gpu else "",
            gpu_count=Topology.parse(topology).workers * plan.tensor_parallel if on_gpu else 0,
            note=plan.note,
        )


def too_large(
    samples: Sequence[Run], prepared: Prepared, tensor_parallel: int, host: str
) -> tuple[tuple[str, str], ...]:
    """Topologies that need more GPUs than there are: workers that share a GPU would measure something else."""
    wanted = {run.topology: Topology.parse(run.topology).workers * tensor_parallel for run in samples}
    return tuple(
        (topology, f"needs {count} GPUs, {host} has {prepared.gpu_count}")
        for topology, count in wanted.items()
        if prepared.device == "cuda" and count > prepared.gpu_count
    )


def fleet_spec(plan: LaunchPlan, prepared: Prepared, topology: str, port_offset: int) -> FleetSpec:
    counts = Topology.parse(topology)
    port, heartbeat_port = free_ports(2)
    return FleetSpec(
        engine=plan.engine,
        workers=counts.by_role,
        x_of_decodes=counts.x_of_decodes,
        prepared=prepared,
        tensor_parallel=plan.tensor_parallel,
        port=port,
        heartbeat_port=heartbeat_port,
        port_offset=port_offset,
        admin_key=secrets.token_hex(16),
        log_dir=plan.log_dir / topology,
    )


def in_one_line(exc: PPDError) -> str:
    """A failed start's first line, and the last line of the log that comes with it."""
    first, *log = exc.message.splitlines()
    told = [line.strip() for line in log if line.strip()]
    what = first.partition(";")[0]
    return f"{what} ({told[-1]})" if told else what


def gpu_name() -> str:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=False)
    return listed.stdout.splitlines()[0].strip() if listed.returncode == 0 and listed.stdout else ""
