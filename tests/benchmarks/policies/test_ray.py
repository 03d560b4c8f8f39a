"""Jobs on a Ray cluster: what comes back is what this process would have measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.policies.cells import Cell
from benchmarks.policies.executors import RayTasks
from benchmarks.policies.measuring import MeasureJob, Method, Question, measure

METHOD = Method(data=Path("/nowhere"), questions=(Question(0.025, 0.9, 1),), sessions=10, later_turns=10, precision=0.3)


@pytest.fixture
def tasks() -> Iterator[RayTasks]:
    cluster = RayTasks("local")
    yield cluster
    cluster.close()


@pytest.mark.slow
def test_a_task_finds_what_this_process_does(tasks: RayTasks) -> None:
    job = MeasureJob(cell=Cell("m512-8k", "1P_1D"), mode="always_local", method=METHOD)
    found = tasks.submit(job).result(timeout=120)
    assert tasks.places >= 1
    assert msgspec.structs.replace(found, cpu_s=0.0) == msgspec.structs.replace(measure(job), cpu_s=0.0)
