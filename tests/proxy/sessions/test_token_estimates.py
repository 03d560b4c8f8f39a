"""Token counts as they are learnt from usage."""

from __future__ import annotations

from random import Random

import pytest

from ppd.proxy.sessions.text_kinds import Amounts, Kind
from ppd.proxy.sessions.token_estimates import DEFAULT_OUTPUT_TOKENS, TokenEstimator, output_mean

PROSE, JSON = Kind.MARKS_0, Kind.MARKS_40
Added = dict[int, int]
TRUE: dict[int, float] = {Kind.START: 20.0, Kind.UNITS: 6.0, PROSE: 0.21, JSON: 0.5}
"""Tokens for one of each, as some engine's model has them."""


def amounts(added: Added) -> Amounts:
    return tuple(number for kind, amount in added.items() if amount for number in (kind, amount))


def tokens_of(added: Added) -> int:
    return round(sum(TRUE[kind] * amount for kind, amount in added.items()))


def taught(*turns: Added, rounds: int = 100) -> TokenEstimator:
    tokens = TokenEstimator()
    for _ in range(rounds):
        for added in turns:
            tokens.learn("m", amounts(added), tokens_of(added), None)
    return tokens


@pytest.mark.parametrize(
    ("added", "tokens"),
    [
        ({}, 0),
        ({Kind.START: 0, Kind.UNITS: 0, PROSE: 0}, 0),
        ({Kind.UNREAD: 1}, 1),
        ({Kind.UNREAD: 400}, 100),
        ({Kind.UNREAD: 400, Kind.UNITS: 2}, 108),
        ({PROSE: 1000}, 200),
        ({JSON: 1000}, 430),
        ({Kind.TOKEN_IDS: 4000}, 1000),
    ],
)
def test_an_unknown_model_has_the_usual_tokens(added: Added, tokens: int) -> None:
    assert TokenEstimator().estimate("m", amounts(added)) == tokens


def test_each_model_learns_its_own_tokens() -> None:
    tokens = TokenEstimator()
    for _ in range(50):
        tokens.learn("dense", amounts({PROSE: 3000}), 1500, None)
    assert tokens.estimate("dense", amounts({PROSE: 1000})) == pytest.approx(500, abs=15)
    assert tokens.estimate("other", amounts({PROSE: 1000})) == 200


def test_kinds_of_text_and_what_the_template_adds_are_told_apart() -> None:
    short: Added = {Kind.UNITS: 1, PROSE: 60}
    long: Added = {Kind.UNITS: 1, PROSE: 2000}
    results: Added = {Kind.UNITS: 2, JSON: 4000}
    both: Added = {Kind.UNITS: 2, PROSE: 100, JSON: 900}
    tokens = taught({**short, Kind.START: 1}, short, long, results, both)
    first: Added = {Kind.UNITS: 1, Kind.START: 1, PROSE: 500}
    for added in (short, long, results, both, first):
        assert tokens.estimate("m", amounts(added)) == pytest.approx(tokens_of(added), rel=0.06)


def test_large_results_whose_tokens_vary_leave_short_messages_alone() -> None:
    """With one least-squares fit over tokens, short messages were off by a factor of seven."""
    random, tokens, errors = Random(1), TokenEstimator(), list[float]()
    short: Added = {Kind.UNITS: 1, PROSE: 80}
    for _ in range(400):
        tokens.learn(
            "m", amounts({Kind.UNITS: 2, PROSE: 40, JSON: 60_000}), round(60_000 * random.uniform(0.35, 0.65)), None
        )
        tokens.learn("m", amounts(short), tokens_of(short), None)
        errors.append(abs(tokens.estimate("m", amounts(short)) / tokens_of(short) - 1))
    assert max(errors[100:]) < 0.1


def test_one_short_prompt_does_not_set_the_ratio() -> None:
    tokens = TokenEstimator()
    tokens.learn("m", amounts({Kind.UNITS: 1, PROSE: 2}), 12, None)
    assert tokens.estimate("m", amounts({PROSE: 1000})) == pytest.approx(200, rel=0.15)


def test_a_change_of_habit_is_followed() -> None:
    tokens = TokenEstimator()
    for _ in range(300):
        tokens.learn("m", amounts({PROSE: 4000}), 1000, 100)
    for _ in range(300):
        tokens.learn("m", amounts({PROSE: 4000}), 2000, 900)
    assert tokens.estimate("m", amounts({PROSE: 4000})) == pytest.approx(2000, rel=0.1)
    assert tokens.expected_output("m", None, None) == pytest.approx(900, abs=10)


@pytest.mark.parametrize("counted", [1, 5, 10**6, 10**400])
def test_one_count_that_cannot_be_moves_little(counted: int) -> None:
    added: Added = {Kind.UNITS: 1, PROSE: 4000}
    tokens = taught(added)
    tokens.learn("m", amounts(added), counted, None)
    assert tokens.estimate("m", amounts(added)) == pytest.approx(tokens_of(added), rel=0.05)


@pytest.mark.parametrize("counted", [1, 10**400])
def test_counts_that_can_never_be_keep_estimates_above_nothing_and_finite(counted: int) -> None:
    tokens = TokenEstimator()
    for _ in range(1000):
        tokens.learn("m", amounts({Kind.START: 1, Kind.UNITS: 1, PROSE: 4000, Kind.MEDIA: 4096}), counted, counted)
    assert 1 <= tokens.estimate("m", amounts({PROSE: 1000})) <= 2000
    assert tokens.expected_output("m", None, None) >= 1


@pytest.mark.parametrize(
    ("added", "new_tokens", "completion"),
    [({}, 5, 0), ({PROSE: 5}, 0, 0), ({PROSE: 500}, -40, 0), ({}, -1, -1), ({Kind.UNITS: 0}, 9, None)],
)
def test_counts_of_nothing_teach_nothing(added: Added, new_tokens: int, completion: int | None) -> None:
    tokens = TokenEstimator()
    tokens.learn("m", amounts(added), new_tokens, completion)
    assert tokens.estimate("m", amounts({PROSE: 1000, Kind.UNITS: 1})) == 204
    assert tokens.expected_output("m", None, None) == DEFAULT_OUTPUT_TOKENS


@pytest.mark.parametrize(
    ("session_mean", "cap", "expected"),
    [
        (None, None, 80),  # the model's habit
        (20.4, None, 20),  # the session's own comes first
        (20.4, 10, 10),
        (20.4, 4096, 20),  # a cap is not a forecast
        (None, 0, 1),
        (0.0, None, 1),
    ],
)
def test_the_expected_output_is_the_habit_below_the_cap(
    session_mean: float | None, cap: int | None, expected: int
) -> None:
    tokens = TokenEstimator()
    tokens.learn("m", amounts({PROSE: 100}), 25, 80)
    assert tokens.expected_output("m", session_mean, cap) == expected


def test_before_any_answer_the_default_is_expected() -> None:
    tokens = TokenEstimator()
    assert tokens.expected_output("m", None, None) == DEFAULT_OUTPUT_TOKENS
    tokens.learn("m", amounts({PROSE: 100}), 25, None)
    assert tokens.expected_output("m", None, None) == DEFAULT_OUTPUT_TOKENS


def test_the_model_heard_of_longest_ago_gives_way() -> None:
    tokens = TokenEstimator(capacity=2)
    for model in ("a", "b", "a", "c"):
        tokens.learn(model, amounts({PROSE: 20_000}), 10_000, 10)
    assert [tokens.estimate(model, amounts({PROSE: 1000})) == 200 for model in ("a", "b", "c")] == [False, True, False]


@pytest.mark.parametrize(
    ("mean", "tokens", "result"),
    [
        (None, 8.0, 8.0),
        (10.0, 20.0, 15.0),
        (None, 4e9, 64 * 256),
        (64.0, 4e9, 32 + 32 * 256),
        (1000.0, 60_000.0, 30_500),
    ],
)
def test_the_first_answer_is_the_mean_and_none_counts_beyond_measure(
    mean: float | None, tokens: float, result: float
) -> None:
    assert output_mean(mean, tokens, 0.5) == result
