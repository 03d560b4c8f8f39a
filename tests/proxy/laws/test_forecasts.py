"""How long answers will be, and whether and when sessions return."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from ppd.proxy.laws.forecasts import MODELS_KEPT, MOST_NOTED, MOST_TOKENS, AnswerEnded, Forecasts, SessionReturned
from ppd.proxy.laws.log_histogram import LogHistogram
from ppd.proxy.laws.pauses import CURVE_S, HORIZON_S, SLOT_S, Pauses


def ended(tokens: int, *, model: str = "m", turn: int = 1, mean: float | None = None, at_s: float = 0.0) -> AnswerEnded:
    return AnswerEnded(model, turn, tokens, mean, False, at_s)


def lengths(draw: Callable[[], float], turns: int = 2000, mean: float | None = None, turn: int = 1) -> Forecasts:
    forecasts = Forecasts()
    for _ in range(turns):
        forecasts.take(ended(round(draw()), mean=mean, turn=turn))
    return forecasts


def test_a_models_answers_give_their_median_and_90th_percentile() -> None:
    draw = random.Random(1)
    said = lengths(lambda: draw.lognormvariate(math.log(300), 1.0)).output("m", None, 1)
    assert [said.median, said.p90] == pytest.approx([300, 300 * math.exp(1.2816)], rel=0.1)


def test_a_sessions_own_answers_count_first() -> None:
    """Answers lie around their session's mean, whatever other sessions have."""
    draw = random.Random(2)
    forecasts = lengths(lambda: draw.lognormvariate(math.log(500), 0.3), mean=500.0, turn=3)
    for mean in (50.0, 2000.0):
        said = forecasts.output("m", mean, 3)
        assert [said.median, said.p90] == pytest.approx([mean, mean * math.exp(0.3 * 1.2816)], rel=0.15)


@pytest.mark.parametrize("mean", [None, 100.0])
def test_where_little_is_known_the_longest_answer_may_be_long(mean: float | None) -> None:
    said = Forecasts().output("m", mean, 2)
    assert said.p90 >= 3 * said.median >= 300 or said.median == 100


@pytest.mark.parametrize(
    ("mean", "cap", "most"), [(1e300, None, MOST_TOKENS), (100.0, 7, 7), (100.0, 0, 1), (1e-9, None, 1)]
)
def test_an_answers_forecast_is_bounded(mean: float, cap: int | None, most: int) -> None:
    said = Forecasts().output("m", mean, 2, cap)
    assert 1 <= said.median <= said.p90 <= most


@pytest.mark.parametrize("mean", [math.nan, math.inf, -1.0, 0.0])
def test_a_mean_that_is_none_is_no_mean(mean: float) -> None:
    forecasts = lengths(lambda: 100.0, mean=mean)
    assert forecasts.output("m", mean, 2) == forecasts.output("m", None, 2)


# -- returns

NOW_S = 50_000.0


def paused(share: float, gap_s: Callable[[], float], turns: int = 2000, every_s: float = 5.0) -> Forecasts:
    """So large a share of sessions came back, the rest never. The last turn ended at NOW_S."""
    draw, forecasts = random.Random(3), Forecasts()
    for number in range(turns):
        at_s = NOW_S - (turns - number) * every_s
        forecasts.take(ended(10, at_s=at_s))
        if draw.random() < share and at_s + (gap := gap_s()) <= NOW_S:
            forecasts.take(SessionReturned("m", 1, False, at_s, at_s + gap))
    return forecasts


def chance(forecasts: Forecasts, idle_s: float, *, turn: int = 1, calls_tool: bool = False) -> float:
    return forecasts.chance_of_return("m", turn, calls_tool=calls_tool, idle_s=idle_s, now_s=NOW_S)


def left_s(forecasts: Forecasts, idle_s: float) -> float:
    return forecasts.median_left_s("m", 1, calls_tool=False, idle_s=idle_s, now_s=NOW_S)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("median_s", [2.0, 30.0, 300.0])
def test_the_share_that_returns_and_the_median_of_its_pauses_are_found(share: float, median_s: float) -> None:
    """Also where many are still away that will come back."""
    draw = random.Random(4)
    forecasts = paused(share, lambda: draw.lognormvariate(math.log(median_s), 0.7))
    assert chance(forecasts, 0.0) == pytest.approx(share, abs=0.06)
    assert left_s(forecasts, 0.0) == pytest.approx(median_s, rel=0.25)


def test_the_longer_a_session_is_away_the_less_likely_it_returns() -> None:
    draw = random.Random(5)
    forecasts = paused(0.6, lambda: draw.lognormvariate(math.log(20), 1.0))
    chances = [chance(forecasts, idle_s) for idle_s in (0, 1, 5, 20, 60, 200, 1000, 3599, 3600, 1e9)]
    assert chances == sorted(chances, reverse=True)
    assert chances[-2:] == [0.0, 0.0]
    half = 0.3 / (0.3 + 0.4)  # half of those that return are back after 20 s
    assert chance(forecasts, 20.0) == pytest.approx(half, abs=0.06)


def test_those_that_still_may_return_are_not_taken_for_gone() -> None:
    """All return after 10 minutes, and the last ones are not back yet."""
    forecasts = paused(1.0, lambda: 600.0, turns=1000, every_s=1.0)
    assert chance(forecasts, 0.0) > 0.9


def test_turns_and_tool_calls_are_told_apart() -> None:
    forecasts = Forecasts()
    for number in range(400):
        at_s = NOW_S - 20_000 + 10.0 * number
        for turn, calls_tool, returns in ((1, False, False), (2, False, True), (1, True, True)):
            forecasts.take(AnswerEnded("m", turn, 10, None, calls_tool, at_s))
            if returns:
                forecasts.take(SessionReturned("m", turn, calls_tool, at_s, at_s + 1.0))
    assert chance(forecasts, 0.0) < 0.05
    assert chance(forecasts, 0.0, turn=3) > 0.95
    assert chance(forecasts, 0.0, calls_tool=True) > 0.95
    assert chance(forecasts, 0.0, turn=4) == chance(Forecasts(), 0.0)


def test_whatever_comes_chances_are_chances_and_memory_is_bounded() -> None:
    draw, forecasts = random.Random(6), Forecasts()
    odd = [0.0, -1e9, 1e9, 1e18, math.nan, math.inf, -math.inf, NOW_S]
    for number in range(5000):
        at_s = draw.choice([*odd, draw.uniform(0, 2e6)])
        model, turn = f"m{draw.randrange(2 * MODELS_KEPT)}" if number < 500 else "m", draw.randrange(-3, 9)
        tokens, mean = draw.choice([0, -5, 10**30, 77]), draw.choice([None, 1e-300, 1e300, 50.0])
        forecasts.take(AnswerEnded(model, turn, tokens, mean, draw.random() < 0.5, at_s))
        came_s = draw.choice([*odd, at_s + draw.expovariate(0.1)])
        forecasts.take(SessionReturned(model, turn, draw.random() < 0.5, at_s, came_s))
        idle_s, now_s = draw.choice([*odd, draw.uniform(0, 4000)]), draw.uniform(-1e6, 3e6)
        asked = {"calls_tool": draw.random() < 0.5, "idle_s": idle_s, "now_s": now_s}
        assert 0.0 <= forecasts.chance_of_return("m", turn, **asked) <= 1.0  # type: ignore[arg-type]
        assert 0.0 <= forecasts.median_left_s("m", turn, **asked) <= HORIZON_S  # type: ignore[arg-type]
        said = forecasts.output("m", mean, turn)
        assert 1 <= said.median <= said.p90 <= MOST_TOKENS
    assert len(forecasts._models) == MODELS_KEPT
    slots = [len(pauses._waited_for) for known in forecasts._models.values() for pauses in known.pauses]
    assert max(slots) <= 2 * HORIZON_S / SLOT_S + 1


def test_habits_that_change_are_followed() -> None:
    pauses = Pauses()
    for number in range(40_000):
        at_s = number * 1.0
        pauses.ended(at_s)
        pauses.returned(at_s, 5.0 if number < 20_000 else 100.0)
    assert pauses.time_of(0.5, 40_000.0 + CURVE_S) == pytest.approx(100.0, rel=0.3)


def test_what_is_only_noted_is_known_to_whoever_asks() -> None:
    """Half of the answers before another process's habits are taken are in those."""
    noted, asked = Forecasts(), Forecasts()
    (theirs,) = lengths(lambda: 500.0, turns=3).habits()
    for number in range(3 * MOST_NOTED + 5):
        for forecasts in (noted, asked):
            forecasts.take(ended(100 + number, mean=50.0, at_s=NOW_S - number))
            forecasts.take(SessionReturned("m", 1, False, NOW_S - number, NOW_S))
            if number == MOST_NOTED // 2:
                forecasts.adopt(theirs)
        asked.output("m", None, 1)
    assert noted._noted
    assert chance(noted, 3.0) == chance(asked, 3.0)
    assert list(noted.habits()) == list(asked.habits())


def test_another_process_takes_all_of_it() -> None:
    draw = random.Random(7)
    ours, theirs = paused(0.6, lambda: draw.lognormvariate(3, 1)), Forecasts()
    for habits in ours.habits():
        theirs.adopt(habits)
    assert theirs.output("m", None, 1) == ours.output("m", None, 1)
    assert [chance(theirs, idle_s) for idle_s in (0, 50)] == [chance(ours, idle_s) for idle_s in (0, 50)]


def test_a_histogram_finds_quantiles_to_the_width_of_a_bin() -> None:
    draw, histogram = random.Random(8), LogHistogram(1.0, 1e6, 4)
    values = sorted(draw.lognormvariate(6, 1.5) for _ in range(3000))
    for value in values:
        histogram.add(value)
    for share in (0.05, 0.5, 0.9, 0.99):
        assert histogram.quantile(share) == pytest.approx(values[int(share * 3000)], rel=0.19)
    assert len(histogram.counts) == math.ceil(math.log2(1e6) * 4) + 1


@pytest.mark.parametrize(
    ("bins", "share", "where"),
    [
        ((), 0.5, 8),
        ((3,), 0.0, 3),
        ((3,), 0.5, 3.5),
        ((3,), 1.0, 4),
        ((0, 5), 0.5, 1),
        ((0, 5), 0.75, 5.5),
        ((7,), 1, 8),
    ],
)
def test_a_quantile_lies_in_a_bin_that_is_not_empty(bins: tuple[int, ...], share: float, where: float) -> None:
    histogram = LogHistogram(1.0, 2.0**7, 1)
    for number in bins:
        histogram.add(1.5 * 2.0**number)
    assert histogram.quantile(share) == histogram.begin(where)
