from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from ppd.offline.backends.launch import LaunchPlan, fleet_spec, in_one_line, too_large
from ppd.offline.load.target import Target
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role
from ppd.servers.fleet.fleet import plan
from ppd.servers.fleet.ports import FIRST_PORT, free_offset
from ppd.servers.fleet.prepare import Prepared
from ppd.servers.fleet.process import EngineFailed
from tests.support.sweep import run

ON_CPU = Prepared(model="", name="sim")
ASKING = Target(url="http://replaced", model="", admin_key="-", forces_routes=True)


def launching(tmp_path: Path) -> LaunchPlan:
    return LaunchPlan(engine="sim", log_dir=tmp_path, asking=ASKING)


@pytest.mark.parametrize(
    ("topology", "workers"),
    [
        ("1P_3D", {Role.PREFILL: 1, Role.DECODE: 3, Role.REPLICA: 0}),
        ("4R", {Role.PREFILL: 0, Role.DECODE: 0, Role.REPLICA: 4}),
        ("1R_1P_2D", {Role.PREFILL: 1, Role.DECODE: 2, Role.REPLICA: 1}),
        ("1R_1P_1D_1pD", {Role.PREFILL: 1, Role.DECODE: 2, Role.REPLICA: 1}),
    ],
)
def test_a_topology_is_launched_as_it_is_named(tmp_path: Path, topology: str, workers: dict[Role, int]) -> None:
    spec = fleet_spec(launching(tmp_path), ON_CPU, topology, 0)
    assert spec.workers == {**workers, Role.ENCODE: 0}
    assert len(plan(spec)) == 1 + sum(workers.values())
    assert spec.log_dir == tmp_path / topology
    assert spec.x_of_decodes == ((0.0, 1.0) if "pD" in topology else (None,) * workers[Role.DECODE])


def test_every_fleet_has_a_key_and_ports_of_its_own(tmp_path: Path) -> None:
    first, second = (fleet_spec(launching(tmp_path), ON_CPU, "1P_1D", 0) for _ in range(2))
    assert first.admin_key and first.admin_key != second.admin_key
    assert first.port != first.heartbeat_port


def test_workers_ports_keep_clear_of_a_fleet_that_is_there() -> None:
    workers = {Role.PREFILL: 1, Role.DECODE: 1, Role.REPLICA: 0}
    with free_offset(workers) as free:
        pass
    with contextlib.closing(socket.socket()) as other:
        other.bind(("127.0.0.1", FIRST_PORT[Role.DECODE] + free))
        with free_offset(workers) as beside:
            assert beside > free
    with free_offset(workers) as again:
        assert again == free


@pytest.mark.parametrize(
    ("device", "gpus", "tensor_parallel", "unfit"),
    [
        ("cuda", 4, 1, []),
        ("cuda", 3, 1, [("2P_2D", "needs 4 GPUs, host has 3")]),
        ("cuda", 4, 2, [("2P_2D", "needs 8 GPUs, host has 4")]),
        ("cuda", 1, 1, [("1P_1D", "needs 2 GPUs, host has 1"), ("2P_2D", "needs 4 GPUs, host has 1")]),
        ("cpu", 0, 1, []),
    ],
)
def test_a_topology_gets_whole_gpus_or_is_not_measured(
    device: str, gpus: int, tensor_parallel: int, unfit: list[tuple[str, str]]
) -> None:
    prepared = Prepared(model="m", name="m", device="cuda" if device == "cuda" else "cpu", gpu_count=gpus)
    samples = [run(0), run(0, topology="2P_2D")]
    assert too_large(samples, prepared, tensor_parallel, "host") == tuple(unfit)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            EngineFailed("D1 ended with 1; the end of logs/D1.log:\nTraceback\nOSError: no room\n"),
            "D1 ended with 1 (OSError: no room)",
        ),
        (EngineFailed("P1 was not healthy after 60 s; the end of x:\n"), "P1 was not healthy after 60 s"),
        (ConfigError("port = 1: must be free"), "port = 1: must be free"),
    ],
)
def test_a_failed_start_is_told_in_one_line(error: EngineFailed | ConfigError, line: str) -> None:
    assert in_one_line(error) == line
