"""The sessions of a receipt log, as a trace that the simulator plays."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.offline.advice.traffic import Traffic, traffic_of
from ppd.offline.simulation.traced_prompts import TurnPrompt, traced_prompts
from ppd.proxy.errors import ConfigError
from ppd.proxy.telemetry.receipts import Receipt
from tests.offline.replay.receipts import log_of, receipt

YEAR_S = 365 * 86400.0


def turn(session: str, number: int, prompt: int, repeated: int, at_s: float, **fields: Any) -> Receipt:
    """It answers 50 tokens in 1.1 s."""
    plain = {"estimated_prompt_tokens": prompt, "estimated_new_tokens": prompt - repeated, "prompt_tokens": prompt}
    return receipt("D1", at_s, session=session, turn=number, **{"cached_tokens": 0, **plain, **fields})


def many(*turns: Receipt) -> list[Receipt]:
    """With sessions of one turn, as a log needs some."""
    return [*turns, *(turn(f"other{at}", 1, 700, 0, 100.0 + 10.0 * at) for at in range(10))]


def traffic(*turns: Receipt) -> Traffic:
    return traffic_of(log_of(*many(*turns)).turns)


def prompts_of(found: Traffic) -> tuple[TurnPrompt, ...]:
    """Of the first session."""
    return traced_prompts(found.drawn(0)).conversations[0]


@pytest.mark.parametrize(
    ("second", "known"),
    [
        (turn("s", 2, 1300, 1050, 5.0), 1050),  # the history with its answer
        (turn("s", 2, 1300, 1040, 5.0), 1050),  # an estimate that misses its end by a little
        (turn("s", 2, 1300, 1000, 5.0), 1000),  # the answer is rendered otherwise
        (turn("s", 2, 400, 300, 5.0), 300),  # the history was cut
        (turn("s", 2, 1000, 1000, 5.0, kind="retry"), 999),  # the same prompt again: one token is computed
        (turn("s", 2, 1300, 0, 5.0), 0),
    ],
)
def test_a_later_turn_repeats_what_its_receipt_says(second: Receipt, known: int) -> None:
    first, later = prompts_of(traffic(turn("s", 1, 1000, 0, 0.0), second))
    assert (first.prompt_tokens, first.known_tokens, first.output_tokens) == (1000, 0, 50)
    assert (later.prompt_tokens, later.known_tokens) == (second.prompt_tokens, known)
    assert later.think_s == pytest.approx(3.9)


def test_first_turns_share_the_beginning_that_was_cached() -> None:
    found = traced_prompts(traffic(*(turn(f"s{at}", 1, 2000, 0, at, cached_tokens=1200) for at in range(3))).drawn(0))
    one, two, other = (found.conversations[at][0] for at in (0, 1, 3))
    assert one.spans[0] == two.spans[0] != other.spans[0]
    assert one.spans[0].tokens == 1024
    assert one.spans[1] != two.spans[1]


def test_what_no_engine_counted_is_taken_as_estimated() -> None:
    broken = turn("s", 1, 900, 0, 0.0, outcome="cancelled", estimated_output_tokens=70)
    found = traffic(broken).sessions[0].turns[0]
    assert (found.prompt_tokens, found.output_tokens, found.is_counted) == (900, 70, False)


def test_the_rate_is_that_of_sessions_that_began_in_the_log() -> None:
    older, branch = turn("old", 4, 5000, 4900, 0.0), turn("b", 3, 900, 600, 1.0, kind="branch")
    found = traffic(older, branch, turn("b", 4, 1200, 950, 6.0))
    assert (found.began_before, found.branches, found.later_turns) == (1, 1, 1)
    assert len(found.sessions) == 11
    assert found.rate == pytest.approx(10 / (190.0 - 1.0))
    assert [one.may_go_on for one in found.sessions] == [False] * 10 + [True]


@pytest.mark.parametrize("years", [-56, 80])
def test_a_clock_that_was_wrong_for_a_while_does_not_set_the_rate(years: int) -> None:
    plain = many()
    assert traffic_of(log_of(*plain).turns).rate == pytest.approx(0.1)
    wrong = (turn(f"w{at}", 1, 700, 0, 56 * YEAR_S + years * YEAR_S + 10.0 * at) for at in range(3))
    now = (turn(f"n{at}", 1, 700, 0, 56 * YEAR_S + 10.0 * at) for at in range(10))
    found = traffic_of(log_of(*wrong, *now).turns)
    assert (len(found.sessions), found.silences) == (13, 1)
    assert found.rate == pytest.approx(0.1)
    assert found.burstiness == pytest.approx(0.0, abs=1e-3)


def test_sessions_that_are_always_rare_set_the_rate() -> None:
    found = traffic_of(log_of(*(turn(f"s{at}", 1, 700, 0, at * YEAR_S / 10) for at in range(10))).turns)
    assert found.silences == 0
    assert found.rate == pytest.approx(10 / YEAR_S)


def test_draws_are_by_their_seed_and_repeat_sessions_without_sharing_their_text() -> None:
    found = traffic(*(turn(f"s{at}", 1, 1000 + at, 0, at) for at in range(5)))
    assert found.drawn(3) == found.drawn(3) != found.drawn(4)
    spans = [one[0].spans for one in traced_prompts(found.drawn(3)).conversations]
    assert len(set(spans)) == len(spans) == 15
    assert len({one.prompt_tokens for (one,) in traced_prompts(found.drawn(0)).conversations}) == 6


def test_of_several_models_one_is_played() -> None:
    log = log_of(*many(), *(turn("x", 1, 100, 0, float(at_s), model="rare") for at_s in range(2)))
    assert (traffic_of(log.turns).model, traffic_of(log.turns).other_models) == ("m", {"rare": 2})
    with pytest.raises(ConfigError, match="model = 'none': must be m, rare"):
        traffic_of(log.turns, "none")
    with pytest.raises(ConfigError, match="the log has 1 sessions of model 'rare'"):
        traffic_of(log.turns, "rare")


def test_a_prompt_that_the_engine_counted_as_empty_is_played_as_one_token() -> None:
    found = traffic(turn("s", 1, 1000, 0, 0.0, prompt_tokens=0), turn("s", 2, 1300, 1050, 5.0, prompt_tokens=0))
    assert found.sessions[0].shared_tokens == 0
    assert [one.prompt_tokens for one in prompts_of(found)] == [1, 1]


def test_turns_without_a_session_are_each_alone() -> None:
    found = traffic_of(log_of(*(receipt("D1", 5.0 * number, session="") for number in range(12))).turns)
    assert [len(one.turns) for one in found.sessions] == [1] * 12
