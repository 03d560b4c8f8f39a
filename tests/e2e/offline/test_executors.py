"""Backends in processes of their own, here and on Ray: what an executor promises, whatever kind it is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from ppd.offline.sweep.backend import Executor, FleetLost
from ppd.offline.sweep.processes import ProcessExecutor
from ppd.offline.sweep.ray import Ray
from ppd.proxy.errors import ConfigError
from tests.support.sweep import DIES, HANGS, LOST, ORIGIN, FakePlan, finished, run

pytestmark = pytest.mark.e2e

LIMIT_S = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[Ray]:
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # where its processes find the fakes
        ray = Ray("local")
        yield ray
        ray.close()


@pytest.fixture(params=["process", "ray task", "ray fleet"])
def executor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Executor]:
    made: Executor
    if request.param == "process":
        made = ProcessExecutor(FakePlan(tmp_path))
    else:
        ray: Ray = request.getfixturevalue("cluster")
        plan = FakePlan(tmp_path)
        made = ray.anywhere(plan) if request.param == "ray task" else ray.on(ray.nodes[0], plan)
    yield made
    made.close()


def said(folder: Path) -> list[str]:
    file = folder / "said"
    return [line.partition(" by ")[0] for line in file.read_text().splitlines()] if file.exists() else []


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_it_measures_elsewhere_what_would_be_measured_here(executor: Executor, tmp_path: Path) -> None:
    assert executor.measure(run(0)).result(LIMIT_S) == finished(run(0))
    assert executor.measure(run(7)).result(LIMIT_S) == finished(run(7))
    assert f"by {os.getpid()}" not in (tmp_path / "said").read_text()


def test_it_says_what_it_found(executor: Executor) -> None:
    survey = executor.survey((run(0), run(0, topology="2P_2D"))).result(LIMIT_S)
    assert (survey.place, survey.origin, survey.unfit) == ("fake", ORIGIN, (("2P_2D", "too large"),))


def test_our_own_errors_come_back_as_they_are(executor: Executor) -> None:
    error = executor.measure(run(LOST)).exception(LIMIT_S)
    assert isinstance(error, FleetLost)
    assert error.message == "it is gone"
    assert not executor.is_death(error)


def test_a_process_that_dies_is_told_from_an_error_and_replaced(executor: Executor) -> None:
    error = executor.measure(run(DIES)).exception(LIMIT_S)
    assert error is not None and executor.is_death(error)
    executor.reopen()
    assert executor.measure(run(0)).result(LIMIT_S) == finished(run(0))


def test_a_run_that_is_abandoned_ends_and_brings_nothing(executor: Executor, tmp_path: Path) -> None:
    hanging = executor.measure(run(HANGS))
    until(lambda: f"measuring {HANGS}" in said(tmp_path))
    executor.abandon()
    assert hanging.exception(LIMIT_S) is not None


def test_an_abandoned_process_still_closes_its_station(tmp_path: Path) -> None:
    executor = ProcessExecutor(FakePlan(tmp_path))
    executor.measure(run(HANGS))
    until(lambda: f"measuring {HANGS}" in said(tmp_path))
    executor.abandon()
    executor.close()
    assert said(tmp_path) == ["opened", f"measuring {HANGS}", "closed"]


def test_a_process_is_ended_that_is_at_work_before_its_number_is_known(tmp_path: Path) -> None:
    executor = ProcessExecutor(FakePlan(tmp_path))
    known, executor._pid = executor._pid, Future()
    hanging = executor.measure(run(HANGS))
    until(lambda: f"measuring {HANGS}" in said(tmp_path))
    executor.abandon()
    executor._pid.set_result(known.result(LIMIT_S))
    assert hanging.exception(LIMIT_S) is not None
    executor.close()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells which signals a process holds")
def test_a_process_never_hears_ctrl_c_not_even_while_it_imports(tmp_path: Path) -> None:
    executor = ProcessExecutor(FakePlan(tmp_path))
    status = Path(f"/proc/{executor._pid.result(LIMIT_S)}/status").read_text()
    held = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:"))
    assert int(held, 16) & 1 << signal.SIGINT - 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    executor.close()


def test_a_backend_lives_from_run_to_run(tmp_path: Path) -> None:
    executor = ProcessExecutor(FakePlan(tmp_path))
    for seed in (0, 7):
        executor.measure(run(seed)).result(LIMIT_S)
    executor.close()
    assert said(tmp_path) == ["opened", "measuring 0", "measuring 7", "closed"]


def test_a_fleet_on_ray_lives_from_run_to_run(cluster: Ray, tmp_path: Path) -> None:
    executor = cluster.on(cluster.nodes[0], FakePlan(tmp_path))
    for seed in (0, 7):
        executor.measure(run(seed)).result(LIMIT_S)
    executor.close()
    assert said(tmp_path) == ["opened", "measuring 0", "measuring 7", "closed"]


PARENT = """
import sys, time
from pathlib import Path
from ppd.offline.sweep.processes import ProcessExecutor
from tests.support.sweep import HANGS, FakePlan, run

ProcessExecutor(FakePlan(Path(sys.argv[1]))).measure(run(HANGS))
time.sleep(60)
"""


def test_a_process_ends_with_the_one_that_asked_for_it(tmp_path: Path) -> None:
    """Even where that was killed, and could close nothing."""
    path = str(Path(__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], env=os.environ | {"PYTHONPATH": path}
    ) as parent:
        until(lambda: f"measuring {HANGS}" in said(tmp_path))
        parent.kill()
    pid = int((tmp_path / "said").read_text().split()[-1])
    process = Path(f"/proc/{pid}")
    until(lambda: not process.exists())
    assert not process.exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "ray://127.0.0.1:99999", "127.0.0.1:0"])
def test_a_cluster_that_is_not_there_is_told_at_once(address: str) -> None:
    with pytest.raises(ConfigError, match=r"must be a cluster's address, auto or local"):
        Ray(address)


def test_a_port_above_65535_is_not_the_port_it_is_modulo_65536() -> None:
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port = somebody.getsockname()[1] + 65536
        with pytest.raises(ConfigError, match="with a port from 1 to 65535"):
            Ray(f"127.0.0.1:{port}")
