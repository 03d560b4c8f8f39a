"""Retries are a share of traffic, whatever fails."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.health.circuit_breaker import RetryBudget


@given(
    thousandths=st.integers(0, 1000),
    burst=st.integers(0, 20),
    tries=st.lists(st.integers(0, 5), max_size=300),  # retries that each turn would like
)
def test_retries_never_storm(thousandths: int, burst: int, tries: list[int]) -> None:
    budget = RetryBudget(thousandths / 1000, burst)
    retries = 0
    for turns, wanted in enumerate(tries, 1):
        budget.deposit()
        retries += sum(budget.take() for _ in range(wanted))
        assert 1000 * retries <= thousandths * turns + 1000 * burst


def test_when_every_turn_fails_exactly_the_share_is_tried_again() -> None:
    budget = RetryBudget(share=0.2, burst=10)
    retries = 0
    for _ in range(1000):
        budget.deposit()
        retries += budget.take()
    assert retries == 209  # the first deposit found the budget full


@pytest.mark.parametrize(
    ("share", "burst", "quiet_turns", "retries"), [(0.1, 3, 0, 3), (0.1, 3, 10_000, 3), (1, 0, 9, 0)]
)
def test_a_quiet_time_saves_up_no_more_than_the_burst(share: float, burst: int, quiet_turns: int, retries: int) -> None:
    budget = RetryBudget(share, burst)
    for _ in range(quiet_turns):
        budget.deposit()
    assert budget.tokens == retries
    assert [budget.take() for _ in range(retries + 2)] == [True] * retries + [False] * 2
    assert budget.tokens == 0.0
