"""The soak's short form: all of it in two minutes. And that it fails when it should."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.soak import __main__ as soak
from benchmarks.soak import summary
from benchmarks.soak.engines import SoakEngines
from benchmarks.soak.fault_plan import plan
from benchmarks.soak.oracle import running_oracle
from benchmarks.soak.records import ClientOutcome, FleetFault, SoakHead

SEED, MINUTES = 3466, 1.87  # the least time in which every kind of fault comes, of the first 20,000 seeds
OVERHEAD_S = 150.0  # to start, to come to rest, and to write the report
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.alone


async def test_minutes_of_faults_cost_nothing_that_they_should_not(tmp_path: Path) -> None:
    assert {one.kind for one in plan(SEED, MINUTES * 60, SoakEngines())} == set(FleetFault)
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "benchmarks.soak",
            "--seed",
            str(SEED),
            "--minutes",
            str(MINUTES),
            "--out",
            str(tmp_path),
        ),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), MINUTES * 60 + OVERHEAD_S)
    finally:
        if process.returncode is None:
            process.kill()  # its own programs end with it
            await process.wait()
    page = tmp_path / "soak.md"
    assert process.returncode == 0, out.decode() + (page.read_text() if page.exists() else "")
    assert "**Passed.**" in page.read_text()


@pytest.mark.parametrize(("connector", "tls"), [("nixl", False), ("sglang", True)])
async def test_engines_with_other_weights_are_noticed(tmp_path: Path, connector: str, tls: bool) -> None:
    """Whatever they answer is wrong then, so a soak can fail by its texts."""
    head = SoakHead(
        seed=0,
        seconds=2.0,
        warm_up_s=1.0,
        clients=2,
        connector=connector,
        tls=tls,
        machine="",
        started=datetime.now(UTC).isoformat(),
    )
    async with running_oracle(seed=1) as other:
        found = await soak.soak(head, tmp_path, other)
    outcomes = {one.outcome for one in found.requests}
    assert ClientOutcome.WRONG in outcomes and ClientOutcome.COMPLETED not in outcomes
    assert any(problem.endswith(" wrong") for problem in summary.problems(found))
