"""The loop over executors that answer at once; processes and fleets are in tests/e2e."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from ppd.offline.experiment.records import Outcome, RunResult
from ppd.offline.experiment.run import Run
from ppd.offline.sweep.backend import FleetLost
from ppd.offline.sweep.folder import SweepFolder
from ppd.offline.sweep.loop import Loop, SurveyedExecutor, survey
from ppd.offline.sweep.schedule import Schedule
from ppd.proxy.errors import ConfigError, FormatError
from tests.support.sweep import (
    ORIGIN,
    Died,
    FakeExecutor,
    HangingExecutor,
    Notes,
    failed,
    finished,
    full_disk,
    grid,
    record,
    run,
)

CELLS = 6


def begun(path: Path) -> SweepFolder:
    return SweepFolder.create(path, grid(), ORIGIN, "2026-01-01T00:00:00+00:00")


def surveyed(*executors: FakeExecutor) -> list[SurveyedExecutor]:
    return survey(executors, list(grid().runs(0)), lambda: False, lambda line: None)


def swept(folder: SweepFolder, *executors: FakeExecutor, schedule: Schedule | None = None) -> tuple[Schedule, Notes]:
    schedule, notes = schedule or Schedule(grid()), Notes()
    assert Loop(schedule, folder, notes, lambda: False).drive(surveyed(*executors))
    return schedule, notes


def test_every_run_is_measured_once_and_saved(tmp_path: Path) -> None:
    folder, executors = begun(tmp_path), (FakeExecutor(), FakeExecutor())
    schedule, notes = swept(folder, *executors)
    assert sorted(result.run.id for result in folder.results()) == sorted(made.id for made in grid().runs(0))
    assert [len(executor.measured) for executor in executors] == [3, 3]
    assert (schedule.finished, schedule.waiting, notes.current) == (CELLS, [], set())


def test_a_failed_run_is_recorded_and_the_sweep_goes_on(tmp_path: Path) -> None:
    def answer(asked: Run) -> RunResult:
        return failed(asked) if asked.x == 1.0 else finished(asked)

    folder = begun(tmp_path)
    schedule, _ = swept(folder, FakeExecutor(answer))
    assert (schedule.finished, schedule.failed) == (4, 2)
    assert {result.reason for result in folder.results() if result.outcome is Outcome.FAILED} == {"D1 is gone"}


def test_each_result_is_on_disk_before_the_next_run_begins(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    seen: list[int] = []

    def answer(asked: Run) -> RunResult:
        seen.append(len(list(folder.results())))
        return finished(asked)

    swept(folder, FakeExecutor(answer))
    assert seen == list(range(CELLS))


def lost(asked: Run) -> RunResult:
    if asked.topology == "2R":
        raise FleetLost("it did not start")
    return finished(asked)


def test_a_topology_that_is_lost_here_is_measured_elsewhere(tmp_path: Path) -> None:
    folder, whole = begun(tmp_path), FakeExecutor()
    schedule, notes = swept(folder, FakeExecutor(lost), whole)
    assert schedule.finished == CELLS
    assert {asked.topology for asked in whole.measured} >= {"2R"}
    assert notes.lines == ["here: no more runs of 2R here: it did not start"]


def test_a_topology_that_is_lost_everywhere_is_left_over(tmp_path: Path) -> None:
    folder, executor = begun(tmp_path), FakeExecutor(lost)
    schedule, notes = swept(folder, executor)
    assert schedule.topologies == ["2R"]
    assert [asked.topology for asked in executor.measured].count("2R") == 1
    assert notes.current == set()


def test_a_run_whose_process_died_gets_another_try(tmp_path: Path) -> None:
    deaths = {"left": 1}

    def answer(asked: Run) -> RunResult:
        if asked.id == "1P_1D-x1/small_tiny/q4-s0" and deaths["left"]:
            deaths["left"] -= 1
            raise Died
        return finished(asked)

    executor = FakeExecutor(answer)
    schedule, notes = swept(begun(tmp_path), executor)
    assert (schedule.finished, schedule.failed, executor.reopened) == (CELLS, 0, 1)
    assert "1P_1D-x1/small_tiny/q4-s0 died; it is measured once more" in notes.lines[0]


def test_a_run_that_always_kills_its_process_is_a_failed_one(tmp_path: Path) -> None:
    def answer(asked: Run) -> RunResult:
        if asked.topology == "2R":
            raise Died
        return finished(asked)

    folder, executor = begun(tmp_path), FakeExecutor(answer)
    schedule, _ = swept(folder, executor)
    reasons = {result.reason for result in folder.results() if result.outcome is Outcome.FAILED}
    assert (schedule.finished, schedule.failed, executor.reopened) == (4, 2, 4)
    assert reasons == {"the process that measured it died"}


class DeadExecutor(FakeExecutor):
    """Its process dies while it has nothing to do: so many times it takes no run."""

    def __init__(self, deaths: int) -> None:
        super().__init__()
        self._deaths = deaths

    def measure(self, asked: Run) -> Future[RunResult]:
        if self.reopened < self._deaths:
            raise Died
        return super().measure(asked)


def test_a_process_that_died_while_idle_is_started_again_and_no_run_is_lost(tmp_path: Path) -> None:
    executor = DeadExecutor(deaths=1)
    schedule, notes = swept(begun(tmp_path), executor)
    assert (schedule.finished, schedule.failed, executor.reopened) == (CELLS, 0, 1)
    assert notes.lines == ["here: its process died; a new one is started"]


def test_a_process_that_cannot_be_started_again_loses_no_run(tmp_path: Path) -> None:
    schedule = Schedule(grid())
    with pytest.raises(Died):
        swept(begun(tmp_path), DeadExecutor(deaths=2), schedule=schedule)
    assert len(schedule.waiting) == CELLS


def mistaken(asked: Run) -> RunResult:
    raise ZeroDivisionError("of the harness")


def test_a_run_that_the_harness_cannot_do_is_a_failed_one(tmp_path: Path) -> None:
    def answer(asked: Run) -> RunResult:
        return mistaken(asked) if asked.topology == "2R" and asked.qps == 1.0 else finished(asked)

    folder = begun(tmp_path)
    schedule, _ = swept(folder, FakeExecutor(answer))
    assert (schedule.finished, schedule.failed) == (CELLS - 1, 1)
    reasons = [result.reason for result in folder.results() if result.outcome is Outcome.FAILED]
    assert reasons == ["the harness failed: ZeroDivisionError: of the harness"]


def test_a_harness_that_can_do_no_run_ends_the_sweep_and_what_runs_is_abandoned(tmp_path: Path) -> None:
    folder, schedule, hanging = begun(tmp_path), Schedule(grid()), HangingExecutor()
    with pytest.raises(ZeroDivisionError):
        swept(folder, FakeExecutor(mistaken), hanging, schedule=schedule)
    assert hanging.abandoned == 1
    assert schedule.failed == 2
    assert len(schedule.waiting) == CELLS - 2, "neither the last one nor the one that hangs is lost"


def test_a_full_disk_ends_the_sweep_with_what_was_done_whole(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    folder.save(finished(run(0)))
    with full_disk(100), pytest.raises(FormatError, match="cannot be written: File too large"):
        swept(folder, FakeExecutor(), schedule=Schedule(grid(), folder.results()))
    assert [result.run for result in folder.results()] == [run(0)]


def test_stopping_abandons_what_is_measured_and_keeps_what_was_done(tmp_path: Path) -> None:
    folder, quick, hanging, notes = begun(tmp_path), FakeExecutor(), HangingExecutor(), Notes()
    schedule = Schedule(grid())
    ended = Loop(schedule, folder, notes, lambda: len(list(folder.results())) == 3).drive(surveyed(hanging, quick))
    assert not ended
    assert (schedule.finished, quick.abandoned, hanging.abandoned) == (3, 0, 1)

    again, _ = swept(folder, FakeExecutor(), schedule=Schedule(grid(), folder.results()))
    assert again.finished == CELLS
    assert len(list(folder.results())) == CELLS


def test_a_cell_gets_seeds_until_it_is_known(tmp_path: Path) -> None:
    """One cell varies from run to run, the others do not."""

    def answer(asked: Run) -> RunResult:
        varies = asked.topology == "2R" and asked.qps == 1.0
        return finished(asked, (0.1 * (1 + asked.seed * varies),) * 2)

    axes = grid(seeds=2, max_seeds=4, precision=0.05)
    folder = SweepFolder.create(tmp_path, axes, ORIGIN, "2026-01-01T00:00:00+00:00")
    swept(folder, FakeExecutor(answer), schedule=Schedule(axes))
    seeds: dict[str, int] = {}
    for result in folder.results():
        seeds[result.run.cell] = seeds.get(result.run.cell, 0) + 1
    assert seeds.pop("2R/small_tiny/q1") == 4
    assert set(seeds.values()) == {2}


def test_topologies_that_no_executor_has_are_told_and_left_out() -> None:
    lines: list[str] = []
    partial = FakeExecutor(unfit={"2R": "http://a is 1P_1D"})
    found = survey([partial, partial], list(grid().runs(0)), lambda: False, lines.append)
    assert lines == ["skipped: 2R: http://a is 1P_1D"]
    assert [one.topologies for one in found] == [{"1P_1D"}, {"1P_1D"}]


def test_executors_that_have_none_of_the_topologies_are_an_error() -> None:
    none = FakeExecutor(unfit={"2R": "http://a is 1P_3D", "1P_1D": "http://a is 1P_3D"})
    with pytest.raises(ConfigError, match=r"nothing can be measured: 1P_1D: http://a is 1P_3D, 2R: http://a is 1P_3D"):
        survey([none], list(grid().runs(0)), lambda: False, lambda line: None)


def test_records_survive_the_round_through_the_folder(tmp_path: Path) -> None:
    def answer(asked: Run) -> RunResult:
        return finished(asked, (0.25,))

    folder = begun(tmp_path)
    swept(folder, FakeExecutor(answer))
    assert {result.records for result in folder.results()} == {(record(0.25),)}
    assert folder.path_of(run(0)).exists()
