"""The conversations of a run: open loop, by seed, the same for both arms."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from msgspec.structs import replace

from ppd.offline.experiment.plan import plan
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.proxy.errors import ConfigError
from ppd.proxy.policy import Route

WORKLOAD = Workload(
    first=Profile(name="small", new_tokens=128, output_tokens=128),
    later=Profile(name="tiny", new_tokens=16, output_tokens=32),
    turns=3,
    think_s=5.0,
)


def run_of(**settings: object) -> Run:
    return Run(**{"topology": "1P_3D", "x": 1 / 3, "workload": WORKLOAD, "qps": 4.0, **settings})  # type: ignore[arg-type]


@pytest.mark.slow
def test_arrivals_are_poisson_at_the_rate_asked_for() -> None:
    times = [one.arrival_s for one in plan(run_of(seconds=2000.0))]
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.25, rel=0.05)
    assert spread == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(("seconds", "conversations", "least"), [(10.0, 1, 20), (1.0, 200, 200)])
def test_a_run_lasts_until_it_has_both_its_time_and_its_conversations(
    seconds: float, conversations: int, least: int
) -> None:
    planned = plan(run_of(seconds=seconds, conversations=conversations))
    assert len(planned) >= least
    assert len(planned) == conversations or planned[-1].arrival_s < seconds


def test_the_warm_up_comes_first_and_is_not_measured() -> None:
    planned = plan(run_of(warm_up_s=5.0, seconds=10.0))
    assert all(one.measured == (one.arrival_s >= 5.0) for one in planned)
    assert {one.measured for one in planned} == {True, False}
    assert planned[-1].arrival_s > 10.0


def test_x_is_the_share_of_later_turns_that_go_local() -> None:
    planned = plan(run_of(seconds=1000.0))
    later = [turn.route for one in planned for turn in one.turns[1:]]
    assert {one.turns[0].route for one in planned} == {Route.SPLIT}
    assert later.count(Route.LOCAL) / len(later) == pytest.approx(1 / 3, abs=0.02)


def test_arms_differ_in_nothing_but_their_routes() -> None:
    split, local = plan(run_of(x=0.0)), plan(run_of(x=1.0))
    assert [(a.arrival_s, [t.think_s for t in a.turns]) for a in split] == [
        (b.arrival_s, [t.think_s for t in b.turns]) for b in local
    ]
    assert split[0].turns[1].think_s > 0
    assert split[0].turns[0].think_s == 0
    assert plan(run_of(seed=1)) != plan(run_of(seed=2))


def test_a_trace_gives_its_rhythm_and_the_run_its_rate() -> None:
    burst = [0.0, 0.1, 0.2, 10.0]
    planned = plan(run_of(qps=1.0, seconds=300.0), burst)
    gaps = sorted(after.arrival_s - before.arrival_s for before, after in pairwise(planned))
    assert len(planned) == pytest.approx(300, rel=0.1)
    assert gaps[-1] / gaps[0] == pytest.approx(98.0)


@pytest.mark.parametrize(
    "trace",
    [
        [1.0],
        [2.0, 1.0],
        [3.0, 3.0],
        [0.0, math.nan, 5.0],
        [0.0, math.inf],
        [math.inf, math.inf],
        [-1.7e308, 1.7e308],
    ],
)
def test_a_trace_that_has_no_rhythm_is_refused(trace: list[float]) -> None:
    with pytest.raises(ConfigError, match="arrivals = 'poisson'"):
        plan(run_of(), trace)


def test_a_d_with_a_share_of_its_own_is_not_forced_after_the_first_turn() -> None:
    run = Run(topology="1R_1P_1D_1pD", workload=WORKLOAD, qps=4.0, conversations=50)
    routes = {turn.route for one in plan(run) for turn in one.turns[1:]}
    assert routes == {None, Route.REPLICA}
    assert {one.turns[0].route for one in plan(run)} == {Route.SPLIT, Route.REPLICA}


def test_a_run_is_named_by_all_that_makes_it_another() -> None:
    assert run_of().id == "1P_3D-x0.333/small_tiny-turns3-think5/q4-s0"
    assert Run(topology="4R", workload=WORKLOAD, qps=0.5).cell == "4R/small_tiny-turns3-think5/q0.5"


def test_every_so_many_requests_one_has_an_image_whatever_its_turn() -> None:
    run = run_of(workload=replace(WORKLOAD, image_every=10), conversations=30)
    images = [turn.images for one in plan(run) for turn in one.turns]
    assert [number for number, count in enumerate(images, 1) if count] == [*range(10, len(images) + 1, 10)]
    assert run.id == "1P_3D-x0.333/small_tiny-turns3-think5-images10/q4-s0"
    assert not any(turn.images for one in plan(run_of()) for turn in one.turns)


@pytest.mark.parametrize(("topology", "x"), [("4R", 0.5), ("1P_3D", None), ("1P_1D_2pD", 1.0)])
def test_x_is_for_fleets_that_have_a_choice(topology: str, x: float | None) -> None:
    with pytest.raises(ValueError, match="x: topology"):
        run_of(topology=topology, x=x)
