"""Which contenders are tried: on goodputs that are known, and answers that cost nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from ppd.offline.advice.contenders import Contender, Setting, first_contenders, neighbours, workers_for
from ppd.offline.advice.interval import Interval
from ppd.offline.advice.search import ROUND, Budget, Search, Standing
from ppd.offline.advice.trying import Figures, Job, TryOutcome
from ppd.proxy.errors import ConfigError
from ppd.servers.fleet.topology import Topology
from tests.support.clock import FakeClock

MODES = ("slo", "always_local", "replica")
AT = Figures(rate=1.0, first_share=1.0, later_share=1.0, ttft_first=None, ttft_later=None, tpot=None, turns=9)


class Known:
    """Answers by a rule, and counts."""

    def __init__(self, goodput: Mapping[Contender, float], usual: float = 1.0) -> None:
        self.goodput = goodput
        self.usual = usual
        self.jobs: list[Job] = []

    def __call__(self, jobs: Sequence[Job]) -> list[TryOutcome]:
        assert len(jobs) <= ROUND
        self.jobs += jobs
        return [self._outcome(job) for job in jobs]

    def _outcome(self, job: Job) -> TryOutcome:
        rate = self.goodput.get(job.contender, self.usual)
        if job.at is not None:
            return TryOutcome(figures=AT, windows=1, cpu_s=0.1)
        return TryOutcome(rate=None if job.bar and rate < job.bar else rate, windows=1, cpu_s=0.1)


def searched(ask: Known, workers: int = 8, **late: float) -> tuple[Search, list[Standing]]:
    spent = iter(range(1000))
    search = Search(ask, MODES, 1.0, Budget(late.get("budget", 1e9), now=lambda: next(spent)))
    contenders = first_contenders(workers, MODES)
    search.pilot(contenders)
    search.all(contenders)
    return search, search.refined()


def test_all_fleets_with_all_gpus_are_contenders_each_with_the_modes_that_are_rules_of_their_own_there() -> None:
    found = first_contenders(4, MODES)
    assert {str(one) for one in found} == {
        *("4R slo", "1P_3D slo", "2P_2D slo", "3P_1D slo", "4R replica"),
        *("1P_3D always_local", "2P_2D always_local", "3P_1D always_local"),
    }
    assert all(Topology.parse(one.topology).workers == 4 for one in found)
    assert first_contenders(1, MODES) == [Contender("1R", "slo"), Contender("1R", "replica")]
    assert len({one.topology for one in first_contenders(64, MODES)}) == 9


def test_gpus_are_counted_by_engines() -> None:
    assert workers_for(9, 2) == 4
    with pytest.raises(ConfigError, match="gpus = 1: one engine of this profile takes 2"):
        workers_for(1, 2)


def test_neighbours_differ_in_a_worker_or_two_and_are_new() -> None:
    best, known = Contender("2P_4D", "slo"), [Contender("3P_3D", "slo")]
    assert [one.topology for one in neighbours([best], MODES, known)] == ["1P_5D", "1P_4D_1R", "2P_3D_1R"]
    assert [one.topology for one in neighbours([Contender("4R", "slo")], MODES, ())] == ["1P_1D_2R"]


@pytest.mark.parametrize("best", [Contender("8R", "replica"), Contender("5P_3D", "always_local")])
def test_the_best_is_found_wherever_it_stands(best: Contender) -> None:
    search, standings = searched(Known({best: 3.0, Contender("2P_6D", "slo"): 2.0}))
    assert [one.contender for one in standings[:2]] == [best, Contender("2P_6D", "slo")]
    assert standings[1].beside(standings[0]).value == pytest.approx(2 / 3)
    assert standings[0].at_log is AT
    assert any(not one.contender.is_disaggregated for one in standings)
    assert not search.untried


def test_a_fleet_between_those_tried_first_is_reached() -> None:
    best = Contender("10P_54D", "slo")
    rates = {Contender(f"{p}P_{64 - p}D", "slo"): 2.0 + (1 - abs(p - 10) / 64) for p in range(1, 64)}
    assert searched(Known(rates), workers=64)[1][0].contender == best


def test_most_contenders_cost_one_small_window() -> None:
    ask = Known({Contender("8R", "slo"): 9.0, Contender("1P_7D", "slo"): 8.0, Contender("2P_6D", "slo"): 8.5})
    search, _ = searched(ask)
    assert len(search.below) > 10
    fine = [job for job in ask.jobs if job.draw]
    assert {job.draw for job in fine} == {1, 2, 3}
    assert len(fine) == 3 + 3 + 3


@pytest.mark.parametrize(
    ("budget", "is_all_tried", "draws"), [(1.0, False, 0), (4.0, True, 1), (5.0, True, 2), (8.0, True, 3)]
)
def test_a_late_search_ends_with_what_it_has(budget: float, is_all_tried: bool, draws: int) -> None:
    """Each look at the clock takes a second."""
    search, standings = searched(Known({}), budget=budget)
    assert (not search.untried) is is_all_tried
    assert standings
    assert (search.draws, {len(one.rates) for one in standings}) == (draws, {max(1, draws)})
    assert {one.contender for one in standings}.isdisjoint(search.untried)


class Slow(Known):
    """Searches that take `takes_s` each, and end when they are late with a part of the rate; after one another."""

    def __init__(self, clock: FakeClock, takes_s: float, usual: float = 1.0) -> None:
        super().__init__({}, usual)
        self.clock = clock
        self.takes_s = takes_s

    def _outcome(self, job: Job) -> TryOutcome:
        if self.clock() > job.until_s:
            return TryOutcome(is_cut=True)
        until_s = min(self.clock() + self.takes_s, job.until_s)
        share = (until_s - self.clock()) / self.takes_s
        self.clock.now_s = until_s + 0.001
        if share == 1.0 or job.at:
            return super()._outcome(job)
        return TryOutcome(rate=share * self.usual or None, is_cut=True, windows=1)


@pytest.mark.parametrize(
    ("takes_s", "tried", "untried", "draws", "cut"),
    [
        (
            50.0,
            2,
            1,
            1,
            2,
        ),  # the second of the pilot is ended after 10 s, the third is not begun; then one that is ended
        (19.0, 3, 0, 1, 1),  # all of the pilot; of the first draw one and a half
        (200.0, 1, 2, 1, 3),  # each is ended, of the pilot, of the draw, and with another setting
    ],
)
def test_no_search_outlasts_the_budget_whatever_the_fleets_cost(
    clock: FakeClock, takes_s: float, tried: int, untried: int, draws: int, cut: int
) -> None:
    ask = Slow(clock, takes_s)
    search = Search(ask, MODES, 1.0, Budget(100.0, clock(), clock))
    ended_s = clock() + 100.0
    contenders = first_contenders(256, MODES)[:3]
    search.pilot(contenders)
    search.all(contenders)
    standings = search.refined()
    assert search.improved(standings[0], [Setting(prefills_answer=True)]) == []
    assert clock() < ended_s + 1.0
    assert (len(search.coarse), len(search.untried), search.draws, search.cut) == (tried, untried, draws, cut)
    assert standings


def test_what_there_was_no_time_to_try_once_is_untried_not_below() -> None:
    class Cut(Known):
        def _outcome(self, job: Job) -> TryOutcome:
            return TryOutcome(is_cut=True)

    search = Search(Cut({}), MODES, 1.0)
    search.pilot(contenders := first_contenders(8, MODES))
    assert (search.untried, search.below, search.coarse) == (contenders[:3], set(), {})


@pytest.mark.parametrize(("asked", "is_played"), [(0.01, True), (8.0, True), (40.0, False)])
def test_a_rate_far_beyond_the_goodput_is_not_played(asked: float, is_played: bool) -> None:
    """Nothing is in time there, and the queues that grow meanwhile take minutes."""
    ask = Known({}, usual=2.0)
    search = Search(ask, MODES, asked)
    search.pilot(first_contenders(8, MODES))
    standings = search.refined()
    assert {one.at_log for one in standings} == {AT if is_played else None}
    assert any(job.at for job in ask.jobs) is is_played


def test_where_no_rate_is_low_enough_the_figures_tell_why() -> None:
    search = Search(Known({}, usual=0.0), MODES, 40.0)
    search.pilot(first_contenders(8, MODES))
    assert {one.at_log for one in search.refined()} == {AT}


def test_the_same_is_asked_whatever_the_number_of_processors() -> None:
    first, second = Known({Contender("8R", "slo"): 2.0}), Known({Contender("8R", "slo"): 2.0})
    searched(first)
    searched(second)
    assert first.jobs == second.jobs


@pytest.mark.parametrize(
    ("values", "value", "bounds"),
    [([2.0], 2.0, False), ([2.0, 8.0], 4.0, True), ([0.0, 4.0], 2.0, False), ([3.0, 3.0, 3.0], 3.0, True)],
)
def test_an_interval_of_rates(values: list[float], value: float, bounds: bool) -> None:
    found = Interval.of(values)
    assert found.value == pytest.approx(value)
    assert (found.low is not None) is bounds
    assert found.low is None or found.low <= found.value <= (found.high or 0.0) + 1e-9
