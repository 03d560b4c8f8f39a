from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest

from ppd.offline.experiment.run import Run
from ppd.offline.sweep.schedule import Schedule
from ppd.proxy.errors import ConfigError
from tests.support.sweep import failed, finished, grid, run

WIDE = (0.05, 0.5)  # TTFTs whose interval is wider than any precision asked for here
NARROW = (0.1, 0.1)


def ids(schedule: Schedule) -> list[str]:
    return [waiting.id for waiting in schedule.waiting]


def drain(schedule: Schedule, ttfts_s: tuple[float, ...] = NARROW) -> list[str]:
    """All that it hands out, one after the other, each finished with these TTFTs."""
    order = []
    while (taken := schedule.take()) is not None:
        order.append(taken.id)
        schedule.done(finished(taken, ttfts_s))
    return order


def test_every_cell_gets_its_first_seed_before_any_gets_its_second() -> None:
    assert drain(Schedule(grid(qps=(1.0,), seeds=2, max_seeds=2))) == [
        "1P_1D-x0/small_tiny/q1-s0",
        "1P_1D-x1/small_tiny/q1-s0",
        "2R/small_tiny/q1-s0",
        "1P_1D-x0/small_tiny/q1-s1",
        "1P_1D-x1/small_tiny/q1-s1",
        "2R/small_tiny/q1-s1",
    ]


def test_a_topology_is_finished_first_where_starting_one_takes_long() -> None:
    order = drain(Schedule(grid(seeds=2, max_seeds=3, precision=0.0), topology_first=True), WIDE)
    topologies = [name.split("-")[0].split("/")[0] for name in order]
    assert topologies == ["1P_1D"] * 12 + ["2R"] * 6


@pytest.mark.parametrize(
    ("ttfts_s", "runs"),
    [(NARROW, 2), (WIDE, 5)],
    ids=["narrow: the least number", "wide: the largest number"],
)
def test_a_cell_gets_more_seeds_only_while_it_is_not_known_well(ttfts_s: tuple[float, ...], runs: int) -> None:
    schedule = Schedule(grid(qps=(1.0,), seeds=2, max_seeds=5, precision=0.05), only=["2R/*"])
    seeds = []
    while (taken := schedule.take()) is not None:
        seeds.append(taken.seed)
        scale = 1.0 if ttfts_s is NARROW else 1.0 + taken.seed  # of the runs' means, which the interval is over
        schedule.done(finished(taken, tuple(scale * value for value in ttfts_s)))
    assert seeds == list(range(runs))


def test_a_precision_of_zero_asks_for_every_seed() -> None:
    assert len(drain(Schedule(grid(qps=(1.0,), seeds=1, max_seeds=3, precision=0.0), only=["2R/*"]), WIDE)) == 3


def seeds_by_arm(schedule: Schedule, ttft_s: Callable[[Run], float | None]) -> dict[float | None, list[int]]:
    """The seeds that each arm gets, in order, by x; a TTFT of None: the run failed."""
    seeds: dict[float | None, list[int]] = defaultdict(list)
    while (taken := schedule.take()) is not None:
        seeds[taken.x].append(taken.seed)
        took_s = ttft_s(taken)
        schedule.done(failed(taken) if took_s is None else finished(taken, (took_s, took_s)))
    return seeds


def test_arms_of_a_decision_rest_on_the_same_seeds() -> None:
    """One arm varies from run to run, the other does not, and ends no earlier for that."""
    schedule = Schedule(grid(seeds=2, max_seeds=4, precision=0.05), only=["1P_1D-x*/small_tiny/q1"])
    seeds = seeds_by_arm(schedule, lambda taken: 0.1 if taken.x else 0.1 * (1 + taken.seed))
    assert seeds == {0.0: [0, 1, 2, 3], 1.0: [0, 1, 2, 3]}


def test_arms_that_were_left_uneven_are_made_even() -> None:
    done = [finished(run(seed)) for seed in range(3)] + [finished(run(0, x=1.0))]
    schedule = Schedule(grid(seeds=1, max_seeds=5, precision=0.05), done, only=["1P_1D-x*/small_tiny/q1"])
    assert seeds_by_arm(schedule, lambda taken: 0.1) == {1.0: [1, 2]}


def test_an_arm_whose_every_run_failed_gets_no_more_while_the_other_does() -> None:
    schedule = Schedule(grid(seeds=2, max_seeds=3, precision=0.0), only=["1P_1D-x*/small_tiny/q1"])
    seeds = seeds_by_arm(schedule, lambda taken: None if taken.x else 0.1)
    assert seeds == {0.0: [0, 1, 2], 1.0: [0, 1]}


@pytest.mark.parametrize("max_seeds", [1, 3])
def test_one_run_never_tells_how_well_a_cell_is_known(max_seeds: int) -> None:
    axes = grid(qps=(1.0,), seeds=1, max_seeds=max_seeds, precision=0.05)
    assert len(drain(Schedule(axes, only=["2R/*"]), NARROW)) == min(2, max_seeds)


def test_a_cell_whose_every_run_failed_gets_no_more() -> None:
    schedule = Schedule(grid(seeds=2, max_seeds=9, precision=0.01), only=["2R/small_tiny/q1"])
    count = 0
    while (taken := schedule.take()) is not None:
        count += 1
        schedule.done(failed(taken))
    assert (count, schedule.failed, schedule.finished) == (2, 2, 0)


def test_what_is_measured_already_is_not_measured_again() -> None:
    done = [finished(run(0)), finished(run(0, x=1.0)), finished(run(0, topology="2R", x=None, qps=4.0))]
    schedule = Schedule(grid(), done)
    assert schedule.finished == 3
    assert drain(schedule) == [
        "1P_1D-x0/small_tiny/q4-s0",
        "1P_1D-x1/small_tiny/q4-s0",
        "2R/small_tiny/q1-s0",
    ]


@pytest.mark.parametrize("present", [[0], [1], [0, 1], [2]])
def test_resuming_fills_up_the_seeds_that_are_missing(present: list[int]) -> None:
    done = [finished(run(seed, topology="2R", x=None)) for seed in present]
    schedule = Schedule(grid(seeds=3, max_seeds=3), done, only=["2R/small_tiny/q1"])
    seeds = sorted(waiting.seed for waiting in schedule.waiting)
    assert seeds == sorted({0, 1, 2} - set(present))


def test_an_interrupted_cell_that_is_not_known_well_goes_on_where_it_stopped() -> None:
    done = [finished(run(seed, topology="2R", x=None), (0.1 * (seed + 1),) * 2) for seed in range(3)]
    schedule = Schedule(grid(seeds=2, max_seeds=5, precision=0.05), done, only=["2R/small_tiny/q1"])
    assert ids(schedule) == ["2R/small_tiny/q1-s3"]


def test_a_run_of_the_same_name_that_asked_for_something_else_does_not_count() -> None:
    schedule = Schedule(grid(seconds=20.0), [finished(run(0))])
    assert "1P_1D-x0/small_tiny/q1-s0" in ids(schedule)


def test_a_place_gets_only_topologies_that_it_has() -> None:
    schedule = Schedule(grid())
    taken = schedule.take({"2R"})
    assert taken is not None and taken.topology == "2R"
    assert schedule.take({"9R"}) is None
    assert len(schedule.waiting) == 5


def test_a_run_that_is_put_back_keeps_its_place() -> None:
    schedule = Schedule(grid())
    before = ids(schedule)
    taken = schedule.take()
    assert taken is not None
    schedule.put_back(taken)
    assert ids(schedule) == before


@pytest.mark.parametrize(
    ("only", "cells"),
    [
        (["1P_1D-x1/*"], 2),
        (["*/q4"], 3),
        (["2R/small_tiny/q1", "1P_1D-x0/*"], 3),
        (["2R"], 2),
    ],
)
def test_only_takes_cells_and_topologies(only: list[str], cells: int) -> None:
    assert len(Schedule(grid(), only=only).waiting) == cells


def test_a_pattern_that_matches_nothing_shows_how_a_cell_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"only = '9P': must match a cell of the grid, such as 1P_1D-x0/small_tiny/q1"
    ):
        Schedule(grid(), only=["9P"])


def test_each_run_is_handed_out_once_whatever_the_order_of_results() -> None:
    schedule = Schedule(grid(seeds=2, max_seeds=4, precision=0.0))
    order: list[str] = []
    taken = []
    while True:
        while (next_run := schedule.take()) is not None:
            taken.append(next_run)
        if not taken:
            break
        last = taken.pop()  # the latest one ends first
        order.append(last.id)
        schedule.done(finished(last, WIDE))
    assert len(order) == len(set(order)) == 6 * 4
