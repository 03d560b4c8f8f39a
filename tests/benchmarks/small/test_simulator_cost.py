"""The cost of simulated runs, by load."""

from __future__ import annotations

from benchmarks.small.simulator_cost import costs, request_s
from ppd.offline.experiment.records import Origin, Outcome, Record, RunResult
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.simulation.setup import Setup
from tests.support.stepped_engine import profile_of


def result(qps: float, wall_s: float, requests: int) -> RunResult:
    profile = Profile(name="small", new_tokens=8, output_tokens=8)
    record = Record(0, 1, True, 0.0, 0.0, 1.0, 2.0, 8, 0, 8, "REPLICA", "", "R1", 200)
    return RunResult(
        run=Run(topology="1R", workload=Workload(first=profile, later=profile), qps=qps),
        outcome=Outcome.FINISHED,
        origin=Origin(backend="simulate", engine="e"),
        started="",
        wall_s=wall_s,
        records=(record,) * requests,
    )


def test_runs_are_gathered_by_load() -> None:
    low, high = costs([result(8.0, 0.4, 100), result(1.0, 0.1, 10), result(8.0, 0.2, 200)])
    assert (low.qps, low.runs, low.median_s, low.longest_s) == (1.0, 1, 0.1, 0.1)
    assert (high.runs, high.requests, high.longest_s) == (2, 150.0, 0.4)
    assert high.request_s == 0.6000000000000001 / 300


def test_a_request_is_timed_on_fleets_with_and_without_a_choice() -> None:
    setup = Setup(profile=profile_of())
    for topology in ("1R", "1P_1D"):
        assert 0 < request_s(topology, 1, setup, conversations=2, repeats=2) < float("inf")
