"""Single runs of a sweep on a live fleet: which way they go, and what becomes of one whose fleet does not survive."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from ppd.offline.backends.live import LiveFleet, RunLimits
from ppd.offline.cli.build_table import main
from ppd.offline.experiment.records import Origin, Outcome, RunResult
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.load.target import Target
from ppd.offline.sweep.backend import FleetLost
from ppd.proxy.errors import ConfigError
from tests.support.proxy import ADMIN_KEY

pytestmark = pytest.mark.e2e

RUN = Run(
    topology="1P_2D",
    workload=Workload(
        first=Profile(name="small", new_tokens=64, output_tokens=16),
        later=Profile(name="tiny", new_tokens=16, output_tokens=8),
    ),
    qps=8.0,
    x=1.0,
    seconds=1.5,
    conversations=8,
)
IMPATIENT = RunLimits(health_s=20.0, grace_s=0.3, look_s=0.1)


def routes(result: RunResult) -> Counter[tuple[int, str]]:
    return Counter((record.turn, record.route) for record in result.records)


def live(fleet: Any, **changes: Any) -> LiveFleet:
    target = Target(url=fleet.base_url, model="sim", admin_key=ADMIN_KEY, forces_routes=True)
    return LiveFleet(target=replace(target, **changes), origin=Origin(backend="target", engine=""), limits=IMPATIENT)


@pytest.mark.parametrize(("x", "later"), [(0.0, "SPLIT"), (1.0, "LOCAL")])
async def test_a_run_goes_the_way_that_its_arm_says(start_fleet: Any, x: float, later: str) -> None:
    async with start_fleet("P1 D1 D2", engine={"time_scale": 0.2}) as fleet:
        result = await live(fleet).measure(msgspec.structs.replace(RUN, x=x))
        assert (result.outcome, result.reason, result.failures) == (Outcome.FINISHED, "", 0)
        assert set(routes(result)) == {(1, "SPLIT"), (2, later)}
        assert (result.origin.backend, result.origin.model, result.origin.connector) == ("target", "sim", "nixl")


async def test_a_run_whose_worker_dies_is_failed_and_the_next_one_waits_until_it_is_back(start_fleet: Any) -> None:
    async with start_fleet("P1 D1 D2", engine={"time_scale": 0.2, "shutdown_s": 0.1}) as fleet:
        measuring = asyncio.create_task(live(fleet).measure(RUN))
        await fleet.until(lambda: any(fleet.engines[name].counters.finished for name in ("D1", "D2")))
        await fleet.kill("D2")
        failed = await measuring
        assert (failed.outcome, failed.reason) == (Outcome.FAILED, "D2 is down")
        assert failed.records, "what was measured until then is kept"

        waiting = asyncio.create_task(live(fleet).measure(RUN))
        await fleet.until(lambda: fleet.state("D2") == "down")
        await fleet.start_again("D2")
        assert (await waiting).outcome is Outcome.FINISHED


async def test_a_worker_that_restarts_during_a_run_fails_it_at_once(start_fleet: Any) -> None:
    async with start_fleet("P1 D1 D2", engine={"time_scale": 0.2, "shutdown_s": 0.1}) as fleet:
        patient = replace(live(fleet), limits=replace(IMPATIENT, grace_s=60.0))
        measuring = asyncio.create_task(patient.measure(RUN))
        await fleet.until(lambda: not fleet.idle())
        await fleet.kill("D2")
        await fleet.start_again("D2")
        assert (await measuring).reason == "D2 was restarted"


async def test_a_fleet_that_stays_away_is_lost(start_fleet: Any) -> None:
    async with start_fleet("P1 D1") as fleet:
        gone = replace(live(fleet), limits=replace(IMPATIENT, health_s=0.2))
        with pytest.raises(FleetLost, match=r"not a healthy, idle 1P_2D for 0\.2 s: it is 1P_1D"):
            await gone.measure(RUN)


async def test_a_run_whose_requests_mostly_fail_is_a_failed_one(start_fleet: Any) -> None:
    async with start_fleet("P1 D1 D2", engine={"max_model_len": 32}) as fleet:
        result = await live(fleet).measure(RUN)
        assert result.outcome is Outcome.FAILED
        assert "requests failed, the first with: " in result.reason
        assert result.failures == len(result.records) > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"admin_key": "guess"}, "does not take the admin key"),
        ({"url": "http://127.0.0.1:1"}, "does not answer"),
    ],
)
async def test_a_proxy_that_cannot_be_used_is_told(start_fleet: Any, changes: dict[str, str], said: str) -> None:
    async with start_fleet("R1") as fleet:
        with pytest.raises(Exception, match=said):
            await live(fleet, **changes).look()


async def test_something_else_than_the_proxy_is_told_by_its_not_heeding_the_header(start_fleet: Any) -> None:
    async with start_fleet("R1") as fleet:
        await live(fleet).check_forcing()
        engine = f"http://{fleet.engines['R1'].address}"
        with pytest.raises(ConfigError, match="does not heed X-PPD-Force-Route"):
            await live(fleet, url=engine).check_forcing()


@pytest.mark.parametrize(("workers", "cells"), [("P1 D1 R1", {"1R_1P_1D-x0", "1R_1P_1D-x1"}), ("R1", {"1R"})])
async def test_a_grid_takes_the_topology_of_the_fleet_that_is_there(
    start_fleet: Any, workers: str, cells: set[str]
) -> None:
    async with start_fleet(workers) as fleet:
        argv = ["--target", fleet.base_url, "--grid", "quick", "--topology", "auto", "--list"]
        listed = await asyncio.to_thread(CliRunner().invoke, main, argv, env={"PPD_ADMIN_KEY": ADMIN_KEY})
        assert listed.exit_code == 0, listed.output
        assert {line.split("/")[0] for line in listed.stdout.splitlines()} == cells
