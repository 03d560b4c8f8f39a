"""The executors that the flags of `ppd-build-table` ask for, and the backend in each."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from ppd.proxy.errors import ConfigError
from ppd.proxy.laws.profile_file import Transfers, encode

from ..backends.live import RunLimits
from ..backends.target import TargetPlan
from ..load.target import Api, Target
from ..simulation.setup import Setup, setup_for
from ..sweep.backend import BackendPlan, Executor
from ..sweep.folder import How
from ..sweep.processes import ProcessExecutor
from ..sweep.ray import Ray
from .build_table_flags import BuildTableFlags

USUAL_HARDWARE = "h100-llama-3.1-8b"


def open_executors(
    flags: BuildTableFlags, trace: Sequence[float] | None, runs: int, stack: ExitStack
) -> list[Executor]:
    """No more than there are runs; `stack` closes them."""
    ray = Ray(flags.ray) if flags.ray else None
    if ray is not None:
        stack.callback(ray.close)
    executors: list[Executor] = []
    for plan, node in _plans(flags, trace, runs, ray):
        if ray is None:
            executors.append(ProcessExecutor(plan))
        else:
            executors.append(ray.on(node, plan) if node else ray.anywhere(plan))
        stack.callback(executors[-1].close)
    return executors


def _plans(
    flags: BuildTableFlags, trace: Sequence[float] | None, runs: int, ray: Ray | None
) -> list[tuple[BackendPlan, str]]:
    """A plan for each executor, and the id of the cluster's node that it must run on; empty for any."""
    if flags.simulate:
        cores = usable_cores() if ray is None else ray.cpus
        return [(_simulated(flags, trace), "")] * min(flags.jobs or cores, runs)
    if flags.launch:
        return [(_launched(flags, trace), node) for node in (ray.nodes if ray else [""])]
    key = admin_key(flags)
    return [(_targeted(flags, trace, url, key), "") for url in flags.targets]


def how_of(flags: BuildTableFlags, trace: Sequence[float] | None) -> How:
    # What the figures depend on: a resumed sweep must go on in the same way.
    arrivals = "" if trace is None else _digest("\n".join(map(repr, trace)).encode())
    if flags.simulate:
        return How(profile_sha256=_digest(encode(_setup(flags).profile)), arrivals_sha256=arrivals)
    return How(
        gpus_per_worker=str(flags.tensor_parallel) if flags.launch else "",
        engine_args=shlex.join(flags.engine_args),
        api=flags.api,
        tokenizer_sha256=_digest_of(flags.tokenizer / "tokenizer.json") if flags.tokenizer else "",
        arrivals_sha256=arrivals,
    )


def _digest_of(path: Path) -> str:
    try:
        return _digest(path.read_bytes())
    except OSError as exc:
        raise ConfigError(f"tokenizer: {path}: {exc.strerror}", param="tokenizer") from exc


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _simulated(flags: BuildTableFlags, trace: Sequence[float] | None) -> BackendPlan:
    from ..backends.simulate import SimulatePlan

    return SimulatePlan(_setup(flags), trace)


def _setup(flags: BuildTableFlags) -> Setup:
    setup = setup_for(flags.hardware or USUAL_HARDWARE)
    if flags.transfers is None:
        return setup
    return replace(setup, profile=msgspec.structs.replace(setup.profile, transfers=Transfers(flags.transfers)))


def _launched(flags: BuildTableFlags, trace: Sequence[float] | None) -> BackendPlan:
    from ..backends.launch import LaunchPlan

    return LaunchPlan(
        engine=flags.engine,
        model=flags.model,
        tensor_parallel=flags.tensor_parallel,
        engine_args=flags.engine_args,
        log_dir=flags.folder / "logs",
        asking=_target(flags, "http://127.0.0.1", "-"),  # each fleet has a URL and a key of its own
        note=flags.note,
        limits=RunLimits(health_s=flags.health_limit),
        trace=trace,
    )


def _targeted(flags: BuildTableFlags, trace: Sequence[float] | None, url: str, key: str) -> BackendPlan:
    return TargetPlan(
        target=_target(flags, url.rstrip("/").removesuffix("/v1"), key),
        gpu=flags.gpu,
        gpu_count=flags.gpu_count,
        note=flags.note,
        limits=RunLimits(health_s=flags.health_limit),
        trace=trace,
    )


def topologies_there(flags: BuildTableFlags) -> list[str]:
    """What the targets are now, by their proxies' own lists of workers."""
    key, found = admin_key(flags), []
    for url in flags.targets:
        plan = TargetPlan(target=_target(flags, url.rstrip("/").removesuffix("/v1"), key))
        if not (topology := asyncio.run(plan.open().topology())):
            raise ConfigError(f"{url} has no worker that is up", param="topology")
        found.append(topology)
    return found


def _target(flags: BuildTableFlags, url: str, key: str) -> Target:
    return Target(
        url=url,
        model=flags.model,
        api=Api(flags.api),
        admin_key=key,
        forces_routes=True,
        timeout_s=flags.request_timeout,
        tokenizer=flags.tokenizer,
    )


def admin_key(flags: BuildTableFlags) -> str:
    """ConfigError where there is none; no message contains the key."""
    key = flags.admin_key
    if flags.admin_key_file is not None:
        try:
            key = flags.admin_key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"admin_key_file = {str(flags.admin_key_file)!r}: must be a readable file") from exc
    if not key:
        raise ConfigError("the proxy's admin key is needed: set PPD_ADMIN_KEY, or give --admin-key-file")
    return key
