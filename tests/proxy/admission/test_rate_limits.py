"""Requests and tokens a minute: who is let through, and when the others may come back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.admission.keys import Client
from ppd.proxy.admission.rate_limits import Limit, RateLimits, with_limits
from ppd.proxy.errors import RateLimited, error_body
from tests.support.clock import FakeClock


def client(name: str = "acme", rpm: int = 0, tpm: int = 0) -> Client:
    return Client(name=name, tenant="t", requests_per_minute=rpm, tokens_per_minute=tpm)


def refused(limits: RateLimits, asking: Client, tokens: int, now_s: float) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        limits.take(asking, tokens, now_s)
    return caught.value


def taken(limits: RateLimits, asking: Client, tokens: int, now_s: float) -> int:
    """How many such requests are let through at once."""
    for count in range(10_000):
        try:
            limits.take(asking, tokens, now_s)
        except RateLimited:
            return count
    return 10_000


@pytest.mark.parametrize(
    ("rpm", "tpm", "tokens", "let_through", "reason", "retry_after_s"),
    [
        (1, 0, 100, 1, Limit.REQUESTS, 60.0),
        (6, 0, 100, 6, Limit.REQUESTS, 10.0),
        (600, 0, 100, 600, Limit.REQUESTS, 1.0),  # in fact 0.1 s: no client is told to retry in less than one
        (0, 60, 10, 6, Limit.TOKENS, 1.0),
        (0, 60, 25, 3, Limit.TOKENS, 16.0),  # 15 in debt, and one to go on with
        (0, 60, 600, 1, Limit.TOKENS, 541.0),
        (0, 60, 0, 10_000, None, 0.0),
        (0, 0, 10**9, 10_000, None, 0.0),
        (2, 60, 10, 2, Limit.REQUESTS, 30.0),
        (2, 60, 100, 1, Limit.TOKENS, 41.0),
        (1, 60, 100, 1, Limit.REQUESTS, 60.0),  # the longer of both waits
        (1, 60, 200, 1, Limit.TOKENS, 141.0),
    ],
)
def test_a_minutes_allowance_is_let_through_at_once(
    rpm: int, tpm: int, tokens: int, let_through: int, reason: Limit | None, retry_after_s: float, clock: FakeClock
) -> None:
    limits, asking = RateLimits(), client(rpm=rpm, tpm=tpm)
    assert taken(limits, asking, tokens, clock()) == let_through
    if reason is not None:
        error = refused(limits, asking, tokens, clock())
        assert error.reason == reason
        assert error.retry_after_s == pytest.approx(retry_after_s)


def test_a_refusal_is_a_429_that_names_the_key_and_its_limit(clock: FakeClock) -> None:
    limits, asking = RateLimits(), client(rpm=1)
    limits.take(asking, 10, clock())
    error = refused(limits, asking, 10, clock())
    assert (error.status, error.message) == (
        429,
        "key 'acme' has used its 1 requests_per_minute; retry in 60.000 s",
    )
    body = msgspec.json.decode(error_body(error.message, error.kind, error.code))
    assert body["error"]["type"] == "rate_limit_error"
    assert body["error"]["code"] == "requests_per_minute"


SIZES = st.integers(0, 500)
STEPS = st.lists(st.tuples(st.floats(0.0, 30.0), SIZES), min_size=1, max_size=40)


@given(st.integers(1, 60), st.integers(1, 60), STEPS)
def test_who_comes_back_when_told_is_let_through_and_not_before(
    rpm: int, tpm: int, steps: list[tuple[float, int]]
) -> None:
    limits, asking, now_s = RateLimits(), client(rpm=rpm, tpm=tpm), 1e6
    for wait_s, tokens in steps:
        now_s += wait_s
        try:
            limits.take(asking, tokens, now_s)
        except RateLimited as exc:
            told_s = float(exc.message.split()[-2])  # `retry_after_s` is never below one second
            if told_s > 0.01:
                refused(limits, asking, tokens, now_s + told_s - 0.01)
            now_s += max(told_s + 0.001, exc.retry_after_s)
            limits.take(asking, tokens, now_s)


def test_the_time_to_come_back_is_exact(clock: FakeClock) -> None:
    limits, asking = RateLimits(), client(rpm=7, tpm=11)
    clock.advance(1 / 3)
    for _ in range(100):
        limits.take(asking, 17, clock())
        clock.advance(refused(limits, asking, 17, clock()).retry_after_s)


@given(STEPS)
def test_over_any_time_no_more_is_used_than_the_allowance_and_one_request(steps: list[tuple[float, int]]) -> None:
    limits, asking, now_s = RateLimits(), client(tpm=100), 0.0
    let_through: list[tuple[float, int]] = []
    for wait_s, tokens in steps:
        now_s += wait_s
        try:
            limits.take(asking, tokens, now_s)
        except RateLimited:
            continue
        let_through.append((now_s, tokens))
    for first, (begin_s, _) in enumerate(let_through):
        for last in range(first, len(let_through)):
            end_s, size = let_through[last]
            used = sum(tokens for _, tokens in let_through[first:last])
            assert used < 100 + (end_s - begin_s) / 60 * 100 + 1e-3, (used, size)


def test_smaller_requests_do_not_keep_a_large_one_out_for_ever(clock: FakeClock) -> None:
    limits, asking = RateLimits(), client(tpm=60)
    assert taken(limits, asking, 5, clock()) == 12
    clock.advance(refused(limits, asking, 1000, clock()).retry_after_s)
    limits.take(asking, 1000, clock())
    assert refused(limits, asking, 5, clock()).retry_after_s == pytest.approx(1000.0)


@pytest.mark.parametrize(
    ("estimated", "actual", "retry_after_s"),
    [
        (100, 100, 41.0),
        (100, 160, 101.0),  # more than was expected: a debt
        (100, 90, 31.0),
        (0, 100, 41.0),
        (60, 61, 2.0),
    ],
)
def test_what_a_request_really_used_counts(estimated: int, actual: int, retry_after_s: float, clock: FakeClock) -> None:
    limits, asking = RateLimits(), client(tpm=60)
    limits.take(asking, estimated, clock())
    limits.settle(asking, estimated, actual, clock())
    assert refused(limits, asking, 1, clock()).retry_after_s == pytest.approx(retry_after_s)


@pytest.mark.parametrize(("estimated", "actual"), [(50, 0), (5000, 30), (60, 0)])
def test_what_was_not_used_comes_back_up_to_one_minutes_allowance(
    estimated: int, actual: int, clock: FakeClock
) -> None:
    limits, asking = RateLimits(), client(tpm=60)
    limits.take(asking, estimated, clock())
    limits.settle(asking, estimated, actual, clock())
    limits.settle(asking, 600, 0, clock())  # more than it holds
    assert taken(limits, asking, 1, clock()) == 60


def test_a_debt_that_comes_late_counts_from_then_on(clock: FakeClock) -> None:
    limits, asking = RateLimits(), client(tpm=60)
    limits.take(asking, 1, clock())
    clock.advance(3600)
    limits.settle(asking, 1, 101, clock())
    assert refused(limits, asking, 1, clock()).retry_after_s == pytest.approx(41.0)


def test_a_request_that_came_to_nothing_stays_counted_as_one(clock: FakeClock) -> None:
    limits, asking = RateLimits(), client(rpm=1, tpm=60)
    limits.take(asking, 600, clock())
    limits.settle(asking, 600, 0, clock())
    assert refused(limits, asking, 1, clock()).reason == Limit.REQUESTS


def test_a_refused_request_uses_nothing(clock: FakeClock) -> None:
    limits, asking = RateLimits(), client(rpm=2, tpm=600)
    limits.take(asking, 1200, clock())
    for _ in range(5):
        assert refused(limits, asking, 1200, clock()).reason == Limit.TOKENS
    clock.advance(61)
    assert taken(limits, asking, 1, clock()) == 2


def test_limits_are_a_keys_own_and_not_its_tenants(clock: FakeClock) -> None:
    limits = RateLimits()
    assert taken(limits, client("a", rpm=2), 1, clock()) == 2
    assert taken(limits, client("b", rpm=3), 1, clock()) == 3
    assert taken(limits, client("a", rpm=2), 1, clock()) == 0


def test_a_debt_outlives_a_change_of_the_limit(clock: FakeClock) -> None:
    limits = RateLimits()
    limits.take(client(tpm=60), 120, clock())
    assert refused(limits, client(tpm=600), 1, clock()).retry_after_s == pytest.approx(60.1)
    assert taken(limits, client(tpm=0), 1, clock()) == 10_000


def test_refusals_are_counted_by_their_reason(clock: FakeClock) -> None:
    limits = RateLimits()
    assert limits.refused == {Limit.REQUESTS: 0, Limit.TOKENS: 0}
    limits.take(client("a", rpm=1), 1, clock())
    limits.take(client("b", tpm=1), 1, clock())
    for asking in (client("a", rpm=1), client("b", tpm=1), client("b", tpm=1)):
        refused(limits, asking, 1, clock())
    assert limits.refused == {Limit.REQUESTS: 1, Limit.TOKENS: 2}


def test_keys_that_are_quiet_are_forgotten(clock: FakeClock) -> None:
    limits = RateLimits()
    for number in range(1000):
        limits.take(client(f"k{number}", rpm=60, tpm=60), 10, clock())
    limits.take(client("deep", tpm=60), 6000, clock())
    limits.take(client("free"), 10, clock())
    assert len(limits) == 2001
    clock.advance(60)
    limits.take(client("late", rpm=60), 10, clock())
    assert len(limits) == 2  # the debt, and the one that has just come
    refused(limits, client("deep", tpm=60), 1, clock())


@pytest.mark.parametrize(
    ("used", "after_s", "remaining", "reset"),
    [
        (0, 0.0, "60", "0ms"),
        (1, 0.0, "59", "1s"),
        (1, 0.5, "59", "500ms"),
        (1, 0.9999, "59", "1ms"),
        (60, 0.0, "0", "1m0s"),
        (30, 1.2344, "31", "28.766s"),
    ],
)
def test_a_key_is_told_what_it_has_left_as_openai_says_it(
    used: int, after_s: float, remaining: str, reset: str
) -> None:
    limits, client = RateLimits(), Client(name="a", tenant="a", requests_per_minute=60)
    for _ in range(used):
        limits.take(client, 0, 0.0)
    assert limits.headers(client, after_s) == {
        "X-RateLimit-Limit-Requests": "60",
        "X-RateLimit-Remaining-Requests": remaining,
        "X-RateLimit-Reset-Requests": reset,
    }


def test_a_key_in_debt_has_nothing_left_and_one_without_limits_is_told_nothing() -> None:
    limits, client = RateLimits(), Client(name="a", tenant="a", tokens_per_minute=600)
    limits.take(client, 6000, 0.0)
    shown = limits.headers(client, 0.0)
    assert (shown["X-RateLimit-Remaining-Tokens"], shown["X-RateLimit-Reset-Tokens"]) == ("0", "10m0s")
    assert limits.headers(Client(name="b", tenant="b"), 0.0) == {}


def test_a_list_of_prompts_counts_as_its_prompts_and_may_leave_a_debt(clock: FakeClock) -> None:
    limits, asking = RateLimits(), client(rpm=6)
    limits.take(asking, 0, clock(), requests=5)
    limits.take(asking, 0, clock(), requests=7)  # 6 in debt
    assert refused(limits, asking, 0, clock()).retry_after_s == pytest.approx(70.0)
    clock.advance(70.0)
    limits.take(asking, 0, clock())


def test_of_what_two_processes_know_of_a_key_the_later_time_counts() -> None:
    limits = RateLimits()
    for full_s in (5.0, 9.0, 3.0):
        limits.owe("key", Limit.TOKENS, full_s)
    assert list(limits.debts()) == [("key", Limit.TOKENS, 9.0)]


def test_a_workers_own_limits_are_not_shown_beside_a_keys() -> None:
    sent = {"X-RateLimit-Limit-Requests": "1", "x-ratelimit-remaining-tokens": "2", "date": "now"}
    own = {"X-RateLimit-Limit-Requests": "60"}
    assert with_limits(sent, own) == {"date": "now", **own}
