from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ppd.offline.experiment.records import Origin
from ppd.offline.sweep.progress import Display, RunDurations, arrivals_s, size, spoken
from ppd.offline.sweep.schedule import Schedule
from tests.support.clock import FakeClock
from tests.support.sweep import LATER, WORKLOAD, failed, finished, grid, run


def test_runs_of_the_same_load_tell_how_long_one_takes() -> None:
    pace = RunDurations()
    for seed, wall_s in ((0, 10.0), (1, 14.0)):
        pace.add(finished(run(seed), wall_s=wall_s))
    pace.add(finished(run(0, qps=4.0), wall_s=90.0))
    assert pace.of(run(9, topology="9R", x=None)) == 12.0


def test_a_load_that_was_not_measured_yet_is_scaled_by_its_tokens() -> None:
    pace = RunDurations()
    pace.add(finished(run(0, qps=1.0), wall_s=5.0))
    wanted = run(0, qps=4.0)
    assert size(wanted) == 4 * size(run(0, qps=1.0))
    assert pace.of(wanted) == 20.0


def test_a_live_run_is_scaled_by_how_long_conversations_arrive() -> None:
    pace = RunDurations()
    live = finished(run(0, qps=1.0, seconds=10.0, conversations=20), wall_s=24.0)  # 20 s of arrivals, and a tail
    pace.add(msgspec.structs.replace(live, origin=Origin(backend="target", engine="vllm 0.32.0")))
    assert pace.of(run(0, qps=4.0, seconds=10.0, conversations=20)) == 12.0


def test_failed_runs_do_not_tell_how_long_a_run_takes() -> None:
    pace = RunDurations()
    pace.add(failed(run(0)))
    assert pace.of(run(0)) is None
    assert pace.left_s([run(0)], 1) is None


@pytest.mark.parametrize(("executors", "left_s"), [(1, 20.0), (4, 5.0)])
def test_executors_share_what_is_left(executors: int, left_s: float) -> None:
    pace = RunDurations()
    pace.add(finished(run(0), wall_s=10.0))
    assert pace.left_s([run(1), run(2)], executors) == left_s


def test_a_runs_size_counts_every_conversation_it_asks_for() -> None:
    tokens = WORKLOAD.longest_context
    assert tokens == 128 + 128 + LATER.new_tokens + LATER.output_tokens
    assert size(run(qps=2.0, seconds=10.0, warm_up_s=5.0)) == (20 + 10) * tokens
    assert size(run(qps=0.5, seconds=10.0, conversations=30)) == 30 * tokens


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"qps": 2.0, "seconds": 10.0}, 10.0),
        ({"qps": 2.0, "seconds": 10.0, "conversations": 60, "warm_up_s": 3.0}, 33.0),
    ],
)
def test_a_fleet_is_asked_for_as_long_as_conversations_arrive(changes: dict[str, Any], seconds: float) -> None:
    assert arrivals_s(run(**changes)) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.26, "0.3 s"),
        (40.0, "40 s"),
        (200.0, "3 min 20 s"),
        (1300.0, "21 min"),
        (7500.0, "2 h 5 min"),
    ],
)
def test_times_are_spoken(seconds: float, text: str) -> None:
    assert spoken(seconds) == text


# Below, a run at q4 is four times one at q1 until one was measured: three of each are in the grid.


def shown(*, is_terminal: bool, clock: FakeClock) -> tuple[Display, Schedule, io.StringIO]:
    schedule, output = Schedule(grid()), io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=100, color_system=None)
    return Display(console, schedule, RunDurations(), 1, clock), schedule, output


def measured(display: Display, schedule: Schedule, *, fails: bool = False) -> str:
    taken = schedule.take()
    assert taken is not None
    display.started(taken, "here")
    result = failed(taken) if fails else finished(taken, wall_s=2.0)
    schedule.done(result)
    display.finished(result)
    return taken.id


def test_without_a_terminal_there_is_a_line_now_and_then(clock: FakeClock) -> None:
    display, schedule, output = shown(is_terminal=False, clock=clock)
    with display:
        first = measured(display, schedule)
        measured(display, schedule)
        clock.advance(11.0)
        third = measured(display, schedule)
    assert output.getvalue().splitlines() == [
        f"{first} took 2.0 s; 1 of 6 runs done; 28 s left",
        f"{third} took 2.0 s; 3 of 6 runs done; 6.0 s left",
    ]


def test_a_failed_run_is_told_at_once(clock: FakeClock) -> None:
    display, schedule, output = shown(is_terminal=False, clock=clock)
    with display:
        measured(display, schedule)
        name = measured(display, schedule, fails=True)
    assert output.getvalue().splitlines()[-1] == f"failed: {name}: D1 is gone"
    assert display.line() == "2 of 6 runs done, 1 of them failed; 26 s left"


def test_on_a_terminal_the_current_run_is_shown(clock: FakeClock) -> None:
    display, schedule, output = shown(is_terminal=True, clock=clock)
    taken = schedule.take()
    assert taken is not None
    with display:
        display.started(taken, "http://a:1")
        assert f"{taken.id}  http://a:1" in output.getvalue()
        assert "0/6" in output.getvalue()


def test_a_run_that_is_put_back_is_not_current(clock: FakeClock) -> None:
    display, schedule, _ = shown(is_terminal=False, clock=clock)
    taken = schedule.take()
    assert taken is not None
    display.started(taken, "here")
    schedule.put_back(taken)
    display.put_back(taken)
    assert display.line() == "0 of 6 runs done", "and how long the rest takes is not known yet"
