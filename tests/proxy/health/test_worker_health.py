"""What legs that fail or succeed do to workers' and pairs' health; a clock that tests turn."""

from __future__ import annotations

import logging
from dataclasses import replace as replace_worker
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy.errors import LegError
from ppd.proxy.failures import ROWS, Cause, Failure, HealthEffect, Leg, Phase
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role, Worker, WorkerId
from ppd.proxy.health.circuit_breaker import Breakers, RetryBudget
from ppd.proxy.health.doubts import Doubts
from ppd.proxy.health.worker_health import OVERLOAD_S, Key, WorkerHealth, blamed, blamed_view, keys_of
from ppd.proxy.policy import Decision, Route
from tests.support.clock import FakeClock

OPEN_S, FAILURES = 5.0, 3
ROUTES = {
    Leg.PREFILL: Route.SPLIT,
    Leg.DECODE: Route.SPLIT,
    Leg.LOCAL: Route.LOCAL,
    Leg.REPLICA: Route.REPLICA,
}


class Bench:
    """WorkerHealth over a P and a D, and decisions that use them."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.registry = Registry()
        for role in (Role.PREFILL, Role.DECODE):
            worker = Worker(role=role, address=f"{role}:1")
            self.registry.add_static(worker, clock())
            self.registry.probed(worker.id, worker, None, clock())
        self.breakers: Breakers[Key] = Breakers(FAILURES, OPEN_S)
        self.retries = RetryBudget(0.0, 10)
        self.health = WorkerHealth(self.breakers, self.registry, self.retries, clock)
        self.p, self.d = (view.id for view in self.registry.views())
        self.pair = (self.p, self.d)

    def view(self, role: Role) -> WorkerView:
        return next(view for view in self.registry.views() if view.role is role)

    def decision(self, leg: Leg) -> Decision:
        route = ROUTES[leg]
        prefill = self.view(Role.PREFILL) if route is Route.SPLIT else None
        return Decision(route=route, reason="", decode=self.view(Role.DECODE), prefill=prefill, wanted=route)

    def fail(self, failure: Failure, *, retry_after_s: float = 0.0) -> None:
        leg, phase, cause = failure
        exc = LegError("", worker="", phase=phase, cause=cause, retry_after_s=retry_after_s)
        assert self.health.failed(leg, exc, self.decision(leg), self.clock()) is ROWS[failure]

    def begins(self, made: Decision, *, moved: bool) -> None:
        """Its answer, and P's leg has ended."""
        self.health.began(made)
        self.health.prefilled(made, self.clock(), moved=moved)

    def open(self, *keys: Key) -> None:
        for key in keys:
            assert self.breakers.failed(key, self.clock(), began_s=self.clock(), at_once=True)

    def probe(self, *keys: Key) -> None:
        """Their breakers are half open."""
        self.open(*keys)
        self.clock.advance(OPEN_S)

    def blocked(self) -> set[Any]:
        return set(self.breakers.blocked(self.clock()))

    def failures_left(self, key: Key) -> int:
        """How many more open its breaker."""
        now_s = self.clock()
        return next(n for n in range(1, FAILURES + 1) if self.breakers.failed(key, now_s, began_s=now_s))


@pytest.fixture
def bench(clock: FakeClock) -> Bench:
    return Bench(clock)


NO_ERRORS = (Cause.CLIENT_GONE, Cause.DRAINING, Cause.NO_HANDOFF)
LEG_FAILURES = [failure for failure in ROWS if failure[1] is not Phase.QUEUE and failure[2] not in NO_ERRORS]


@pytest.mark.parametrize("failure", LEG_FAILURES, ids="-".join)
def test_a_failure_counts_as_its_row_says_and_against_nobody_else(bench: Bench, failure: Failure) -> None:
    bench.fail(failure, retry_after_s=7.0)
    row, own = ROWS[failure], blamed(failure[0], bench.decision(failure[0]))
    against: Key = bench.pair if row.health is HealthEffect.PAIR else own
    for key in (bench.p, bench.d, bench.pair):
        effect = row.health if key == against else HealthEffect.UNTOUCHED
        opened = effect is HealthEffect.OPENED
        assert (key in bench.breakers.states(bench.clock())) is opened
        assert (key in bench.blocked()) is (opened or effect is HealthEffect.PASSED_OVER)
        if not opened:
            counted = effect in (HealthEffect.COUNTED, HealthEffect.PAIR)
            assert bench.failures_left(key) == (FAILURES - 1 if counted else FAILURES)


@pytest.mark.parametrize("lends", [True, False])
def test_a_prefill_ends_the_failures_in_a_row_of_a_p_and_not_those_of_a_lender(bench: Bench, lends: bool) -> None:
    """One that breaks every stream would never be avoided."""
    bench.registry.add_static(Worker(role=Role.DECODE, address="d2:1"), bench.clock())
    made = bench.decision(Leg.PREFILL)
    lender = bench.registry.views()[-1]
    made = replace(made, prefill=lender) if lends else made
    first = lender.id if lends else bench.p
    bench.breakers.failed(first, bench.clock(), began_s=bench.clock())
    bench.begins(made, moved=True)
    assert bench.failures_left(first) == (FAILURES - 1 if lends else FAILURES)
    assert bench.health.moved_s((first, bench.d)) == bench.clock()
    bench.clock.advance(OPEN_S)
    bench.begins(made, moved=True)
    assert bench.breakers.states(bench.clock()) == {}


def test_the_prompts_of_a_p_that_breaks_its_answers_prove_nothing(bench: Bench) -> None:
    """It answers turns alone too (`prefills_answer`), and would never be avoided."""
    alone = replace(bench.decision(Leg.REPLICA), decode=bench.view(Role.PREFILL))
    exc = LegError("", worker="", phase=Phase.STREAM, cause=Cause.RESET)
    for _ in range(FAILURES - 1):
        bench.health.failed(Leg.REPLICA, exc, alone, bench.clock())
        bench.begins(bench.decision(Leg.PREFILL), moved=True)
    assert bench.failures_left(bench.p) == 1
    bench.clock.advance(OPEN_S)
    bench.health.completed(alone)
    bench.breakers.failed(bench.p, bench.clock(), began_s=bench.clock())
    bench.begins(bench.decision(Leg.PREFILL), moved=True)
    assert bench.failures_left(bench.p) == FAILURES, "it answers well again"


@pytest.mark.parametrize(("retry_after_s", "passed_over_s"), [(7.0, 7.0), (0.0, OVERLOAD_S)])
def test_a_busy_worker_is_passed_over_for_as_long_as_it_asks(
    bench: Bench, retry_after_s: float, passed_over_s: float
) -> None:
    bench.fail((Leg.LOCAL, Phase.HEADERS, Cause.OVERLOADED), retry_after_s=retry_after_s)
    bench.clock.advance(passed_over_s - 0.01)
    assert bench.blocked() == {bench.d}
    bench.clock.advance(0.01)
    assert bench.blocked() == set()


def test_the_death_of_a_worker_has_one_price_however_many_turns_it_broke(bench: Bench) -> None:
    for _ in range(300):
        bench.fail((Leg.LOCAL, Phase.SENT, Cause.WORKER_GONE))
    assert bench.retries.tokens == 9
    bench.fail((Leg.PREFILL, Phase.SENT, Cause.RESET))
    assert bench.retries.tokens == 9, "a turn pays for itself"


def test_a_leg_from_before_an_opening_says_nothing_new(bench: Bench) -> None:
    asked_s = bench.clock()
    bench.clock.advance(1.0)
    bench.probe(bench.d)
    exc = LegError("", worker="", phase=Phase.CONNECT, cause=Cause.REFUSED)
    bench.health.failed(Leg.LOCAL, exc, bench.decision(Leg.LOCAL), asked_s)
    assert bench.breakers.states(bench.clock()) == {bench.d: "half_open"}


@pytest.mark.parametrize("failure", [each for each in LEG_FAILURES if ROUTES[each[0]] is Route.SPLIT], ids="-".join)
def test_whom_a_failure_says_nothing_about_may_be_probed_at_once(bench: Bench, failure: Failure) -> None:
    bench.probe(bench.p, bench.d, bench.pair)
    bench.health.asked(bench.decision(failure[0]), bench.clock())
    assert bench.blocked() == {bench.p, bench.d, bench.pair}
    bench.fail(failure)
    effect = ROWS[failure].health
    against: Key = bench.pair if effect is HealthEffect.PAIR else blamed(failure[0], bench.decision(failure[0]))
    assert bench.blocked() == (set() if effect is HealthEffect.UNTOUCHED else {against})


def test_who_leaves_leaves_the_probing_to_the_next(bench: Bench) -> None:
    bench.probe(bench.p, bench.d, bench.pair)
    bench.health.asked(bench.decision(Leg.DECODE), bench.clock())
    bench.health.left(bench.decision(Leg.DECODE), bench.clock())
    assert bench.blocked() == set()
    assert set(bench.breakers.states(bench.clock()).values()) == {"half_open"}


@pytest.mark.parametrize("ends", ["left", "failed", "overloaded", "by P"])
def test_a_turn_that_ends_beside_anothers_probes_leaves_them_alone(bench: Bench, ends: str) -> None:
    bench.probe(bench.p, bench.d, bench.pair)
    bench.health.asked(made := bench.decision(Leg.DECODE), bench.clock())
    bench.clock.advance(1.0)
    match ends:
        case "left":
            bench.health.left(made, bench.clock())
        case "failed":
            bench.fail((Leg.DECODE, Phase.HEADERS, Cause.REQUEST))
        case "overloaded":
            bench.fail((Leg.DECODE, Phase.HEADERS, Cause.OVERLOADED))
            bench.clock.advance(OVERLOAD_S)
        case _:
            bench.health.prefill_left(made, bench.clock())
    assert bench.blocked() == {bench.p, bench.d, bench.pair}


def test_a_turn_that_waits_for_encoders_keeps_its_probes(bench: Bench) -> None:
    bench.probe(bench.p, bench.d, bench.pair)
    bench.health.asked(made := bench.decision(Leg.DECODE), bench.clock())
    before_s = bench.clock()
    bench.clock.advance(1.0)
    bench.health.asked_later(made, before_s, bench.clock())
    bench.health.left(made, before_s)
    assert bench.blocked() == {bench.p, bench.d, bench.pair}
    bench.health.left(made, bench.clock())
    assert bench.blocked() == set()


def test_an_answer_that_begins_closes_every_half_open_breaker(bench: Bench) -> None:
    bench.probe(bench.p, bench.d, bench.pair)
    bench.health.asked(bench.decision(Leg.DECODE), bench.clock())
    bench.begins(bench.decision(Leg.DECODE), moved=True)
    assert bench.breakers.states(bench.clock()) == {}


def test_an_answer_that_begins_before_ps_leg_has_ended_says_nothing_of_p_and_the_pair(bench: Bench) -> None:
    bench.probe(bench.p, bench.d, bench.pair)
    bench.health.asked(made := bench.decision(Leg.DECODE), bench.clock())
    bench.health.began(made)
    assert set(bench.breakers.states(bench.clock())) == bench.blocked() == {bench.p, bench.pair}
    bench.health.prefill_left(made, bench.clock())
    assert set(bench.breakers.states(bench.clock())) == {bench.p, bench.pair}
    assert bench.blocked() == set(), "another turn may probe them"
    bench.health.prefilled(made, bench.clock(), moved=True)
    assert bench.breakers.states(bench.clock()) == {}


def test_a_p_that_hands_nothing_over_leaves_the_probing_of_the_pair_to_the_next(bench: Bench) -> None:
    bench.probe(bench.p, bench.d, bench.pair)
    bench.health.asked(made := bench.decision(Leg.DECODE), bench.clock())
    bench.begins(made, moved=False)
    assert bench.breakers.states(bench.clock()) == {bench.pair: "half_open"}
    assert bench.blocked() == set()


def test_a_recovered_workers_share_of_traffic_starts_small(bench: Bench) -> None:
    bench.probe(bench.d)
    bench.begins(bench.decision(Leg.LOCAL), moved=True)
    assert bench.view(Role.DECODE).since_s == bench.clock()
    assert bench.view(Role.PREFILL).since_s < bench.clock()


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
@pytest.mark.parametrize("is_back", [True, False])
def test_what_was_asked_of_an_engine_before_this_one_tells_nothing_of_it(bench: Bench, leg: Leg, is_back: bool) -> None:
    """Time-outs come when another engine has long been at the address, or none."""
    made, asked_s = bench.decision(leg), bench.clock()
    own = blamed_view(leg, made)
    bench.clock.advance(60.0)
    if is_back:
        bench.registry.probed(own.id, replace_worker(own.worker, incarnation="another"), None, bench.clock())
    else:
        bench.registry.remove(own.id)
    for cause in (Cause.SERVER, Cause.TIMEOUT, Cause.RESET) * FAILURES:
        exc = LegError("", worker="", phase=Phase.HEADERS, cause=cause)
        bench.health.failed(leg, exc, made, asked_s)
        bench.health.leg_failed(leg, exc, own.id, asked_s)
    assert (bench.blocked(), len(bench.breakers.circuits)) == (set(), 0)


def test_a_d_that_breaks_every_stream_is_passed_over_in_the_end(bench: Bench) -> None:
    for _ in range(FAILURES):
        assert bench.blocked() == set()
        bench.begins(bench.decision(Leg.DECODE), moved=True)
        bench.fail((Leg.DECODE, Phase.STREAM, Cause.RESET))
    assert bench.blocked() == {bench.d}


def test_a_complete_answer_ends_the_row_of_failures(bench: Bench) -> None:
    for _ in range(2 * FAILURES):
        bench.fail((Leg.DECODE, Phase.STREAM, Cause.RESET))
        bench.health.completed(bench.decision(Leg.DECODE))
    assert bench.blocked() == set()


def test_when_kv_last_moved_is_known_of_a_pair(bench: Bench) -> None:
    assert bench.health.moved_s(bench.pair) < 0
    bench.begins(bench.decision(Leg.LOCAL), moved=True)
    assert bench.health.moved_s(bench.pair) < 0
    bench.begins(bench.decision(Leg.DECODE), moved=True)
    assert bench.health.moved_s(bench.pair) == bench.clock()


@pytest.mark.parametrize("gone", ["p", "d"])
def test_a_worker_that_is_gone_takes_its_pairs_along(bench: Bench, gone: str) -> None:
    bench.begins(bench.decision(Leg.DECODE), moved=True)
    bench.open(bench.p, bench.d, bench.pair)
    bench.health.forget(getattr(bench, gone))
    assert bench.blocked() == {bench.d if gone == "p" else bench.p}
    assert bench.health.moved_s(bench.pair) < 0


def test_what_a_turn_tells_of_a_worker_that_is_gone_is_not_kept_for_ever(bench: Bench) -> None:
    """It ended after its P had left, so nothing would tell again that P is gone."""
    split = bench.decision(Leg.DECODE)
    bench.registry.remove(bench.p)
    bench.health.forget(bench.p)
    bench.begins(split, moved=True)
    failure = LegError("", worker=bench.p, phase=Phase.STREAM, cause=Cause.RESET)
    bench.health.failed(Leg.LOCAL, failure, replace(split, decode=split.prefill, prefill=None), bench.clock())
    bench.health.forget(WorkerId("R:1"))  # whoever goes next
    assert (bench.health._moved_s, bench.health._spoiling) == ({}, set())


@pytest.mark.parametrize(("leg", "keys"), [(Leg.DECODE, 3), (Leg.LOCAL, 1), (Leg.REPLICA, 1)])
def test_a_decision_concerns_its_workers_and_their_pair(bench: Bench, leg: Leg, keys: int) -> None:
    assert len(keys_of(bench.decision(leg))) == keys


def test_an_answer_without_a_handoff_says_nothing_about_the_pair(bench: Bench) -> None:
    bench.open(bench.pair)
    bench.begins(bench.decision(Leg.DECODE), moved=False)
    assert bench.pair in bench.breakers.states(bench.clock())
    assert bench.health.moved_s(bench.pair) < 0


def test_operators_are_told_who_is_passed_over_and_who_is_back(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ppd.proxy.health.worker_health"):
        bench.fail((Leg.LOCAL, Phase.CONNECT, Cause.REFUSED))
        for _ in range(FAILURES):
            bench.fail((Leg.DECODE, Phase.HEADERS, Cause.SERVER))
        bench.clock.advance(OPEN_S)
        bench.health.succeeded(bench.d)
    assert [record.getMessage() for record in caplog.records] == [
        "worker D1 D:1 gets no turns for a while: refused at connect",
        "the pair of worker P1 P:1 and worker D1 D:1 gets no turns for a while: 5xx at headers",
        "worker D1 D:1 gets turns as before",
    ]


@pytest.mark.parametrize(
    ("connector", "failure", "is_asked"),
    [
        ("mooncake", (Leg.DECODE, Phase.HEADERS, Cause.SERVER), True),
        ("mooncake", (Leg.PREFILL, Phase.SENT, Cause.RESET), True),
        ("trtllm_gen_first", (Leg.DECODE, Phase.HEADERS, Cause.SERVER), True),
        ("mooncake", (Leg.DECODE, Phase.HEADERS, Cause.OVERLOADED), False),
        ("mooncake", (Leg.DECODE, Phase.HEADERS, Cause.REQUEST), False),
        ("mooncake", (Leg.LOCAL, Phase.HEADERS, Cause.SERVER), False),
        ("nixl", (Leg.DECODE, Phase.HEADERS, Cause.SERVER), False),
    ],
)
def test_a_p_whose_leg_failed_is_asked_again(bench: Bench, connector: str, failure: Failure, is_asked: bool) -> None:
    worker = Worker(role=Role.PREFILL, address="P:1", connector=connector)
    bench.registry.remove(bench.p)
    bench.registry.add_static(worker, bench.clock())
    bench.registry.probed(worker.id, worker, None, bench.clock())
    bench.fail(failure)
    assert bench.health.to_ask_again == ({worker.id} if is_asked else set())


def test_a_failure_that_counts_late_lets_no_second_probe_through(clock: FakeClock) -> None:
    """Of a turn that was in doubt: it has left its workers before, and another turn tries one of them since."""
    bench = Bench(clock)
    split, asked_s = bench.decision(Leg.PREFILL), clock()
    exc = LegError("", worker=bench.p, phase=Phase.HEADERS, cause=Cause.SERVER)
    doubts = Doubts(has_urls=True)
    doubts.count(exc, partial(bench.health.count, Leg.PREFILL, exc, split, asked_s))
    bench.health.left(split, asked_s)
    bench.probe(bench.d)
    bench.health.asked(bench.decision(Leg.LOCAL), bench.clock())
    assert bench.blocked() == {bench.d}
    doubts.answered()
    assert bench.failures_left(bench.p) == FAILURES - 1
    assert bench.blocked() >= {bench.d}, "its probe is under way"
