"""Runs in virtual time, in the process where the backend was opened."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ppd.proxy.errors import PPDError
from ppd.servers.fleet.topology import Topology

from ..experiment.records import Outcome, Record, RunResult
from ..experiment.run import Run
from ..simulation.setup import MOST_WORKERS, Setup
from ..simulation.simulate import simulate
from ..sweep.backend import Survey
from ..sweep.loop import utc_now


@dataclass(frozen=True, slots=True)
class SimulatePlan:
    """`trace`: arrival times in s, for runs that follow one."""

    setup: Setup
    trace: Sequence[float] | None = None

    def open(self) -> SimulateBackend:
        return SimulateBackend(self)


class SimulateBackend:
    def __init__(self, plan: SimulatePlan) -> None:
        self._plan = plan

    def survey(self, samples: tuple[Run, ...]) -> Survey:
        asked = (run.topology for run in samples)
        too_large = [name for name in asked if Topology.parse(name).workers > MOST_WORKERS]
        unfit = tuple((name, f"{MOST_WORKERS:,} workers at most are simulated") for name in too_large)
        return Survey("simulated", self._plan.setup.origin(samples[0]), unfit)

    def measure(self, run: Run) -> RunResult:
        started, began_s = utc_now(), time.monotonic()
        records: tuple[Record, ...] = ()
        reason = ""
        try:
            records = simulate(run, self._plan.setup, self._plan.trace)
        except PPDError as exc:
            reason = exc.message
        return RunResult(
            run=run,
            outcome=Outcome.FAILED if reason else Outcome.FINISHED,
            origin=self._plan.setup.origin(run),
            started=started,
            wall_s=time.monotonic() - began_s,
            records=records,
            reason=reason,
        )

    def close(self) -> None: ...
