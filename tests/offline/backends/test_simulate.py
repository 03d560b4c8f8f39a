"""Runs in virtual time: which fleets can be simulated."""

from __future__ import annotations

from ppd.offline.backends.simulate import SimulatePlan
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.simulation.setup import MOST_WORKERS, Setup
from tests.support.stepped_engine import profile_of

CHAT = Profile(name="chat", new_tokens=10, output_tokens=10)


def test_a_fleet_that_no_memory_holds_is_not_simulated() -> None:
    most, beyond = f"{MOST_WORKERS}R", f"{MOST_WORKERS + 1}R"
    samples = tuple(Run(topology=name, workload=Workload(first=CHAT, later=CHAT), qps=1.0) for name in (most, beyond))
    survey = SimulatePlan(Setup(profile=profile_of())).open().survey(samples)
    assert dict(survey.unfit) == {beyond: f"{MOST_WORKERS:,} workers at most are simulated"}
