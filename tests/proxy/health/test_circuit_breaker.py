"""When a worker or a pair is passed over, for how long, and how it comes back."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ppd.proxy.health.circuit_breaker import MEMORY_S, OPEN_LIMIT_S, PROBE_LIMIT_S, Breakers

FAILURES, OPEN_S = 3, 5.0


def opened(at_s: float = 0.0) -> Breakers[str]:
    breakers: Breakers[str] = Breakers(FAILURES, OPEN_S)
    assert breakers.failed("d", at_s, began_s=at_s, at_once=True)
    return breakers


def test_it_opens_at_the_last_of_so_many_failures_in_a_row() -> None:
    breakers: Breakers[str] = Breakers(FAILURES, OPEN_S)
    assert [breakers.failed("d", 1.0, began_s=0.0) for _ in range(FAILURES)] == [False, False, True]
    assert breakers.blocked(1.0) == {"d"}
    assert breakers.states(1.0) == {"d": "open"}


def test_a_success_ends_the_row() -> None:
    breakers: Breakers[str] = Breakers(FAILURES, OPEN_S)
    for _ in range(10):
        assert not breakers.failed("d", 1.0, began_s=0.0)
        assert not breakers.failed("d", 1.0, began_s=0.0)
        assert not breakers.succeeded("d", 1.0)
    assert breakers.blocked(1.0) == frozenset()


def test_refused_connections_open_it_at_once() -> None:
    assert opened().blocked(0.0) == {"d"}


def test_one_worker_says_nothing_about_another() -> None:
    breakers = opened()
    assert not breakers.failed("e", 0.0, began_s=0.0)
    assert breakers.blocked(0.0) == {"d"}


@pytest.mark.parametrize(("after_s", "blocked", "state"), [(4.9, True, "open"), (5.0, False, "half_open")])
def test_it_is_open_for_its_time(after_s: float, blocked: bool, state: str) -> None:
    breakers = opened()
    assert ("d" in breakers.blocked(after_s)) is blocked
    assert breakers.states(after_s) == {"d": state}


def test_half_open_lets_one_probe_through() -> None:
    breakers = opened()
    assert breakers.blocked(5.0) == frozenset()
    breakers.began("d", 5.0)
    assert breakers.blocked(5.0) == {"d"}
    assert breakers.states(5.0) == {"d": "half_open"}


def test_a_probes_success_closes_it_and_the_back_off_starts_over() -> None:
    breakers = opened()
    breakers.began("d", 5.0)
    assert breakers.succeeded("d", 6.0)
    assert not breakers.blocked(6.0)
    assert not breakers.states(6.0)
    assert not breakers.succeeded("d", 6.0), "it is closed already"
    assert breakers.failed("d", 10.0, began_s=9.0, at_once=True)
    assert breakers.blocked(15.0) == frozenset()


def test_each_failed_probe_doubles_the_time_up_to_a_limit() -> None:
    breakers, now_s, times_s = opened(), 0.0, []
    for _ in range(7):
        while breakers.blocked(now_s):
            now_s += 1.0
        times_s.append(now_s)
        breakers.began("d", now_s)
        assert breakers.failed("d", now_s, began_s=now_s)
    waits_s = [after_s - before_s for before_s, after_s in zip([0.0, *times_s], times_s, strict=False)]
    assert waits_s == [5, 10, 20, 40, 80, OPEN_LIMIT_S, OPEN_LIMIT_S]


def test_a_client_that_leaves_ends_the_probe_and_the_next_may_be_one() -> None:
    breakers = opened()
    breakers.began("d", 5.0)
    breakers.abandoned("d", 5.0)
    assert breakers.blocked(5.0) == frozenset()
    assert breakers.states(5.0) == {"d": "half_open"}


def test_a_leg_that_ends_beside_the_probe_leaves_it_alone() -> None:
    breakers = opened()
    breakers.began("d", 5.0)
    breakers.began("d", 6.0)  # one that came in all the same, say as every worker is blocked
    breakers.abandoned("d", 6.0)
    assert breakers.blocked(6.0) == {"d"}
    breakers.abandoned("d", 5.0)
    assert breakers.blocked(6.0) == frozenset()


def test_a_probe_whose_time_is_up_does_not_end_the_next_one() -> None:
    breakers = opened()
    breakers.began("d", 5.0)
    breakers.began("d", 5.0 + PROBE_LIMIT_S)
    breakers.abandoned("d", 5.0)
    assert breakers.blocked(6.0 + PROBE_LIMIT_S) == {"d"}


def test_a_probe_that_is_asked_later_has_its_time_from_then_on() -> None:
    breakers = opened()
    breakers.began("d", 5.0)
    breakers.postponed("d", 5.5, 25.0)  # another leg
    assert breakers.blocked(5.0 + PROBE_LIMIT_S) == frozenset()
    breakers.postponed("d", 5.0, 25.0)
    assert breakers.blocked(5.0 + PROBE_LIMIT_S) == {"d"}
    breakers.abandoned("d", 25.0)
    assert breakers.blocked(26.0) == frozenset()


def test_a_probe_that_never_reports_blocks_for_a_limited_time() -> None:
    breakers = opened()
    breakers.began("d", 6.0)
    breakers.began("d", 20.0)  # one that came in all the same is not the probe
    assert breakers.blocked(5.9 + PROBE_LIMIT_S) == {"d"}
    assert breakers.blocked(6.0 + PROBE_LIMIT_S) == frozenset()
    breakers.began("d", 40.0)
    assert breakers.blocked(40.0) == {"d"}
    assert breakers.failed("d", 41.0, began_s=6.0), "the first probe's verdict counts, late as it is"


@pytest.mark.parametrize("at_s", [1.0, 5.0, 7.0])
def test_legs_asked_before_it_opened_fail_without_a_further_effect(at_s: float) -> None:
    """Open, half open and with the probe under way."""
    breakers = opened(at_s=0.5)
    if at_s == 7.0:
        breakers.began("d", 6.0)
    before = breakers.blocked(at_s)
    for _ in range(50):
        assert not breakers.failed("d", at_s, began_s=0.1)
    assert breakers.blocked(at_s) == before
    assert breakers.blocked(40.0) == frozenset()


def test_legs_asked_before_it_opened_do_not_open_it_again_after_it_closed() -> None:
    breakers = opened(at_s=1.0)
    breakers.began("d", 6.0)
    assert breakers.succeeded("d", 7.0)
    assert not any(breakers.failed("d", 60.0, began_s=0.5) for _ in range(50))
    assert [breakers.failed("d", 61.0, began_s=8.0) for _ in range(FAILURES)] == [False, False, True]


def test_a_success_while_it_is_open_is_of_a_leg_asked_before() -> None:
    breakers = opened()
    assert not breakers.succeeded("d", 1.0)
    assert breakers.blocked(1.0) == {"d"}


def test_overload_is_passed_over_and_never_a_failure() -> None:
    breakers: Breakers[str] = Breakers(1, OPEN_S)
    breakers.overloaded("d", 10.0, 0.0)
    breakers.overloaded("d", 8.0, 0.0)
    assert breakers.blocked(9.9) == {"d"}
    assert not breakers.states(9.9)
    assert breakers.blocked(10.0) == frozenset()


def test_a_probe_that_meets_overload_proved_nothing() -> None:
    breakers = opened()
    breakers.began("d", 5.0)
    breakers.overloaded("d", 8.0, 5.0)
    breakers.abandoned("d", 5.0)
    assert breakers.blocked(7.9) == {"d"}
    assert breakers.blocked(8.0) == frozenset()
    assert breakers.states(8.0) == {"d": "half_open"}
    breakers.began("d", 8.0)
    assert breakers.succeeded("d", 8.5)


def test_a_leg_that_meets_overload_beside_the_probe_leaves_it_alone() -> None:
    breakers = opened()
    breakers.began("d", 5.0)
    breakers.overloaded("d", 7.0, 6.0)
    assert breakers.blocked(7.0) == {"d"}
    assert breakers.succeeded("d", 8.0)


def test_a_worker_that_is_gone_is_forgotten_with_its_pairs() -> None:
    breakers: Breakers[str | tuple[str, str]] = Breakers(1, OPEN_S)
    for key in ("p", "d", ("p", "d"), ("p", "e"), ("q", "d")):
        assert breakers.failed(key, 0.0, began_s=0.0)
    breakers.forget("p")
    assert breakers.blocked(0.0) == {"d", ("q", "d")}


@pytest.mark.parametrize(
    ("failed_s", "overloaded_s", "blocked", "state"),
    [
        (1.0, 2.0, False, ""),
        (1.0, 5.0, True, ""),  # the new engine's own word stays, and no more than that
        (5.0, 6.0, True, "open"),
    ],
)
def test_of_an_engine_that_is_another_one_since_only_what_came_before_is_forgotten(
    failed_s: float, overloaded_s: float, blocked: bool, state: str
) -> None:
    breakers: Breakers[str] = Breakers(1, OPEN_S)
    breakers.failed("d", failed_s, began_s=failed_s)
    breakers.overloaded("d", 9.0, overloaded_s)
    breakers.forget("d", since_s=4.0)
    assert (breakers.blocked(6.0) == {"d"}) is blocked
    assert breakers.states(6.0) == ({"d": state} if state else {})


def test_keys_that_fail_no_more_take_no_memory() -> None:
    """Also those that nobody forgets: a leg of a worker that is gone may fail last of all."""
    breakers: Breakers[int] = Breakers(FAILURES, OPEN_S)
    for number in range(100):
        breakers.failed(number, 0.0, began_s=0.0, at_once=number % 2 == 0)
        breakers.overloaded(number, 1.0, 0.0)
    breakers.blocked(MEMORY_S - 1.0)
    assert len(breakers.circuits) == 100
    breakers.blocked(MEMORY_S)
    assert len(breakers.circuits) == 0


def test_when_all_is_well_the_same_empty_set_is_handed_out() -> None:
    breakers: Breakers[str] = Breakers(FAILURES, OPEN_S)
    first = breakers.blocked(0.0)
    breakers.began("d", 1.0)
    breakers.succeeded("d", 2.0)
    assert breakers.blocked(1e9) is first


class BreakerMachine(RuleBasedStateMachine):
    """Two keys against the rules in words: a naive model that keeps a whole history and looks everything up in it."""

    def __init__(self) -> None:
        super().__init__()
        self.breakers: Breakers[str] = Breakers(FAILURES, OPEN_S)
        self.now_s = 0.0
        self.legs: dict[str, list[float]] = {"a": [], "b": []}  # when each leg that has not reported was asked
        self.row = {"a": 0, "b": 0}  # failures in a row
        self.opened_s: dict[str, list[float]] = {"a": [], "b": []}  # openings in a row
        self.last_opened_s = {"a": -1.0, "b": -1.0}
        self.until_s = {"a": 0.0, "b": 0.0}
        self.probe_s: dict[str, float | None] = {"a": None, "b": None}
        self.overloaded_s = {"a": 0.0, "b": 0.0}

    keys = st.sampled_from("ab")

    def is_open(self, key: str) -> bool:
        return bool(self.opened_s[key]) and self.now_s < self.until_s[key]

    def is_probed(self, key: str) -> bool:
        probe_s = self.probe_s[key]
        return probe_s is not None and self.now_s - probe_s < PROBE_LIMIT_S

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 35.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(key=keys)
    def begin(self, key: str) -> None:
        self.breakers.began(key, self.now_s)
        self.legs[key].append(self.now_s)
        if self.opened_s[key] and not self.is_open(key) and not self.is_probed(key):
            self.probe_s[key] = self.now_s

    @rule(key=keys, which=st.integers(0, 99), at_once=st.booleans())
    def fail(self, key: str, which: int, at_once: bool) -> None:
        if not self.legs[key]:
            return
        began_s = self.legs[key].pop(which % len(self.legs[key]))
        opens = False
        if not self.is_open(key) and began_s >= self.last_opened_s[key]:
            self.row[key] += 1
            opens = bool(self.opened_s[key]) or at_once or self.row[key] >= FAILURES
        assert self.breakers.failed(key, self.now_s, began_s=began_s, at_once=at_once) is opens
        if opens:
            self.until_s[key] = self.now_s + min(OPEN_LIMIT_S, OPEN_S * 2 ** len(self.opened_s[key]))
            self.opened_s[key].append(self.now_s)
            self.last_opened_s[key] = self.now_s
            self.row[key], self.probe_s[key] = 0, None

    @rule(key=keys, which=st.integers(0, 99))
    def succeed(self, key: str, which: int) -> None:
        if not self.legs[key]:
            return
        self.legs[key].pop(which % len(self.legs[key]))
        closes = bool(self.opened_s[key]) and not self.is_open(key)
        assert self.breakers.succeeded(key, self.now_s) is closes
        if not self.is_open(key):
            self.row[key], self.opened_s[key], self.probe_s[key] = 0, [], None

    @rule(key=keys, which=st.integers(0, 99))
    def abandon(self, key: str, which: int) -> None:
        if not self.legs[key]:
            return
        began_s = self.legs[key].pop(which % len(self.legs[key]))
        self.breakers.abandoned(key, began_s)
        if self.probe_s[key] == began_s:
            self.probe_s[key] = None

    @rule(key=keys, seconds=st.sampled_from([1.0, 9.0]))
    def overload(self, key: str, seconds: float) -> None:
        self.breakers.overloaded(key, self.now_s + seconds, self.now_s)
        self.overloaded_s[key] = max(self.overloaded_s[key], self.now_s + seconds)

    @precondition(lambda self: self.now_s > 0)
    @rule(key=keys)
    def forget(self, key: str) -> None:
        self.breakers.forget(key)
        self.row[key], self.opened_s[key], self.probe_s[key] = 0, [], None
        self.last_opened_s[key], self.overloaded_s[key] = -1.0, 0.0

    @invariant()
    def answers_follow_the_rules(self) -> None:
        blocked = {
            key
            for key in "ab"
            if self.now_s < self.overloaded_s[key] or self.is_open(key) or (self.opened_s[key] and self.is_probed(key))
        }
        assert self.breakers.blocked(self.now_s) == blocked
        states = {key: "open" if self.is_open(key) else "half_open" for key in "ab" if self.opened_s[key]}
        assert self.breakers.states(self.now_s) == states

    @invariant()
    def nothing_is_blocked_for_ever(self) -> None:
        horizon_s = self.now_s + OPEN_LIMIT_S + PROBE_LIMIT_S
        for circuit in self.breakers.circuits.values():
            assert not circuit.is_blocked(horizon_s)


TestBreakerMachine = BreakerMachine.TestCase
