"""Token counts as they are learnt from usage."""

from __future__ import annotations

import pytest

from ppd.proxy.sessions.token_estimates import DEFAULT_OUTPUT_TOKENS, TokenEstimator, decayed_mean


@pytest.mark.parametrize(("n_bytes", "tokens"), [(0, 0), (-5, 0), (1, 1), (4, 1), (400, 100), (4001, 1000)])
def test_an_unknown_model_has_four_bytes_a_token(n_bytes: int, tokens: int) -> None:
    assert TokenEstimator().estimate("m", n_bytes) == tokens


def test_each_model_learns_its_own_ratio() -> None:
    tokens = TokenEstimator()
    for _ in range(200):
        tokens.learn("dense", 3000, 1500, None)
    assert tokens.bytes_per_token("dense") == pytest.approx(2.0, abs=0.05)
    assert tokens.estimate("dense", 1000) == pytest.approx(500, abs=15)
    assert tokens.bytes_per_token("other") == 4.0


def test_one_short_prompt_does_not_set_the_ratio() -> None:
    tokens = TokenEstimator()
    tokens.learn("m", 2, 12, None)
    assert tokens.bytes_per_token("m") > 3.8


def test_a_change_of_habit_is_followed() -> None:
    tokens = TokenEstimator()
    for _ in range(300):
        tokens.learn("m", 4000, 1000, 100)
    for _ in range(300):
        tokens.learn("m", 4000, 2000, 900)
    assert tokens.bytes_per_token("m") == pytest.approx(2.0, abs=0.2)
    assert tokens.expected_output("m", None, None) == pytest.approx(900, abs=10)


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
    tokens.learn("m", 100, 25, 80)
    assert tokens.expected_output("m", session_mean, cap) == expected


def test_before_any_answer_the_default_is_expected() -> None:
    tokens = TokenEstimator()
    assert tokens.expected_output("m", None, None) == DEFAULT_OUTPUT_TOKENS
    tokens.learn("m", 100, 25, None)
    assert tokens.expected_output("m", None, None) == DEFAULT_OUTPUT_TOKENS


@pytest.mark.parametrize(("prompt_bytes", "prompt_tokens", "completion"), [(0, 5, 0), (5, 0, 0), (-1, -1, -1)])
def test_counts_of_nothing_teach_nothing(prompt_bytes: int, prompt_tokens: int, completion: int) -> None:
    tokens = TokenEstimator()
    tokens.learn("m", prompt_bytes, prompt_tokens, completion)
    assert tokens.bytes_per_token("m") == 4.0
    assert tokens.expected_output("m", None, None) == DEFAULT_OUTPUT_TOKENS


def test_the_model_heard_of_longest_ago_gives_way() -> None:
    tokens = TokenEstimator(capacity=2)
    for model in ("a", "b", "a", "c"):
        tokens.learn(model, 20_000, 10_000, 10)
    assert [tokens.bytes_per_token(model) == 4.0 for model in ("a", "b", "c")] == [False, True, False]


@pytest.mark.parametrize(("mean", "value", "result"), [(None, 8.0, 8.0), (10.0, 20.0, 15.0)])
def test_the_first_value_is_the_mean(mean: float | None, value: float, result: float) -> None:
    assert decayed_mean(mean, value, 0.5) == result
