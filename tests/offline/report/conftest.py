"""Cells and sweeps that are worked out by hand or by a simple law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ppd.offline.experiment.cells import MeasuredCell
from ppd.offline.experiment.plan import plan
from ppd.offline.experiment.records import Origin, Outcome, Record, RunResult
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.experiment.statistics import Estimate
from ppd.offline.sweep.folder import SweepFolder
from ppd.offline.sweep.grid import Arms, Grid

MakeCell = Callable[..., MeasuredCell]
MakeSweep = Callable[..., Path]

FIRST = Profile(name="small", new_tokens=128, output_tokens=128)
LATER = {
    name: Profile(name=name, new_tokens=new, output_tokens=output)
    for name, new, output in (("long_gen", 32, 512), ("mid_bal", 128, 128), ("huge_paste", 1024, 32))
}
ORIGIN = Origin(
    backend="simulate",
    engine="ppd simulator",
    model="m",
    gpu="g",
    gpu_count=4,
    profile="p",
    note="the profile is modelled",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a cell measured, in short: means in s; `half` is half the interval of both, `went` LOCAL and SPLIT turns."""

    later: str = "mid_bal"
    turns: int = 2
    qps: float = 1.0
    ttft: float | None = 0.1
    tpot: float | None = 0.01
    half: float | None = None
    p99: float | None = None
    tokens: float | None = 1000.0
    requests: int = 200
    failures: int = 0
    failed: tuple[str, ...] = ()
    went: tuple[int, int] = (0, 0)
    lateness: float | None = None

    def estimate(self, mean: float | None, tail: float | None = None) -> Estimate | None:
        return None if mean is None else Estimate(100, mean, mean, tail or mean, None, self.half)


@pytest.fixture
def cell() -> MakeCell:
    """`cell("2P_2D", 1.0, ttft=0.1)`, and whatever else `Measured` has."""

    def make(topology: str, x: float | None = None, **measured: Any) -> MeasuredCell:
        given = Measured(**measured)
        ttft, tpot = given.estimate(given.ttft, given.p99), given.estimate(given.tpot)
        return MeasuredCell(
            topology=topology,
            x=x,
            workload=Workload(first=FIRST, later=LATER[given.later], turns=given.turns),
            qps=given.qps,
            seeds=(0,),
            requests=given.requests,
            failures=given.failures,
            later_requests=given.requests // 2,
            later_failures=0,
            ttft_s=ttft,
            tpot_s=tpot,
            first_ttft_s=ttft,
            later_ttft_s=ttft,
            later_tpot_s=tpot,
            tokens_per_s=given.tokens,
            failed=given.failed,
            local_turns=given.went[0],
            split_turns=given.went[1],
            lateness_p99_s=given.lateness,
        )

    return make


@pytest.fixture
def sweep(tmp_path: Path, sweep_in: MakeSweep) -> MakeSweep:
    """`sweep("2P_2D", "4R", turns=(2, 4))`: a folder whose runs follow `_record`'s law. `fails`: of which run ids."""
    return partial(sweep_in, tmp_path)


@pytest.fixture(scope="session")
def sweep_in() -> MakeSweep:
    """As `sweep`, in a folder that is named."""

    def make(
        parent: Path,
        *topologies: str,
        qps: tuple[float, ...] = (1, 4, 8),
        turns: tuple[int, ...] = (2,),
        later: Sequence[str] = tuple(LATER),
        seeds: int = 2,
        fails: Callable[[Run], str] = lambda run: "",
        origin: Origin = ORIGIN,
        name: str = "sweep",
    ) -> Path:
        grid = Grid(
            arms=tuple(Arms(topology=t, x=() if t.endswith("R") else (0.0, 1.0)) for t in topologies),
            first=(FIRST,),
            later=tuple(LATER[name] for name in later),
            qps=qps,
            turns=turns,
            seconds=5.0,
            conversations=10,
            seeds=seeds,
            max_seeds=seeds,
        )
        folder = SweepFolder.create(parent / name, grid, origin, "2026-01-02T03:04:05Z")
        for seed in range(seeds):
            for run in grid.runs(seed):
                folder.save(_result(run, fails(run), origin))
        return folder.path

    return make


def _result(run: Run, reason: str, origin: Origin) -> RunResult:
    records = [
        _record(
            run, conversation.number, number, conversation.arrival_s, turn.new_tokens, turn.output_tokens, turn.route
        )
        for conversation in plan(run)
        for number, turn in enumerate(conversation.turns, 1)
    ]
    return RunResult(
        run=run,
        outcome=Outcome.FAILED if reason else Outcome.FINISHED,
        origin=origin,
        started="2026-01-02T03:04:05Z",
        wall_s=1.0,
        records=() if reason else tuple(records),
        reason=reason,
    )


def _record(run: Run, conversation: int, turn: int, arrival_s: float, new: int, output: int, route: Any) -> Record:
    """LOCAL halves the TTFT and adds a tenth to the TPOT; later conversations wait longer."""
    is_local = turn > 1 and run.x == 1
    ttft_s = (0.1 + new * 5e-5 + 0.01 * run.qps + 0.002 * (conversation % 7)) * (0.5 if is_local else 1.0)
    tpot_s = 0.008 * (1 + 0.02 * run.qps) * (1.1 if is_local else 1.0)
    scheduled_s = arrival_s + 2.0 * (turn - 1)
    return Record(
        conversation=conversation,
        turn=turn,
        measured=True,
        scheduled_s=scheduled_s,
        sent_s=scheduled_s,
        first_token_s=scheduled_s + ttft_s,
        last_token_s=scheduled_s + ttft_s + tpot_s * (output - 1),
        prompt_tokens=new,
        cached_tokens=None,
        output_tokens=output,
        route=str(route),
        prefill="P1",
        decode="D1",
        status=200,
    )
