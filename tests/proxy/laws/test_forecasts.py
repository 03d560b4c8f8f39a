"""Whether and when sessions return."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from ppd.proxy.laws.forecasts import MODELS_KEPT, MOST_NOTED, AnswerEnded, Forecasts, SessionReturned, kind_of
from ppd.proxy.laws.pauses import CURVE_S, HORIZON_S, SLOT_S, Pauses

NOW_S = 50_000.0


def paused(share: float, gap_s: Callable[[], float], turns: int = 2000, every_s: float = 5.0) -> Forecasts:
    """So large a share of sessions came back, the rest never. The last turn ended at NOW_S."""
    draw, forecasts = random.Random(3), Forecasts()
    for number in range(turns):
        at_s = NOW_S - (turns - number) * every_s
        forecasts.take(AnswerEnded("m", 1, False, at_s))
        if draw.random() < share and at_s + (gap := gap_s()) <= NOW_S:
            forecasts.take(SessionReturned("m", 1, False, at_s, at_s + gap))
    return forecasts


def chance(forecasts: Forecasts, idle_s: float, *, turn: int = 1, calls_tool: bool = False) -> float:
    return forecasts.chance_of_return("m", turn, calls_tool=calls_tool, idle_s=idle_s, now_s=NOW_S)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("median_s", [2.0, 30.0, 300.0])
def test_the_share_that_returns_and_the_median_of_its_pauses_are_found(share: float, median_s: float) -> None:
    """Also where many are still away that will come back."""
    draw = random.Random(4)
    forecasts = paused(share, lambda: draw.lognormvariate(math.log(median_s), 0.7))
    assert chance(forecasts, 0.0) == pytest.approx(share, abs=0.06)
    pauses = forecasts.pauses("m")[kind_of(1, False)]
    half = 1.0 - share / 2
    assert pauses.away(median_s / 1.3, NOW_S) > half > pauses.away(median_s * 1.3, NOW_S)


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
            forecasts.take(AnswerEnded("m", turn, calls_tool, at_s))
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
        forecasts.take(AnswerEnded(model, turn, draw.random() < 0.5, at_s))
        came_s = draw.choice([*odd, at_s + draw.expovariate(0.1)])
        forecasts.take(SessionReturned(model, turn, draw.random() < 0.5, at_s, came_s))
        idle_s, now_s = draw.choice([*odd, draw.uniform(0, 4000)]), draw.uniform(-1e6, 3e6)
        asked = {"calls_tool": draw.random() < 0.5, "idle_s": idle_s, "now_s": now_s}
        assert 0.0 <= forecasts.chance_of_return("m", turn, **asked) <= 1.0  # type: ignore[arg-type]
    assert len(forecasts._models) == MODELS_KEPT
    slots = [len(pauses._waited_for) for known in forecasts._models.values() for pauses in known]
    assert max(slots) <= 2 * HORIZON_S / SLOT_S + 1


def test_habits_that_change_are_followed() -> None:
    pauses = Pauses()
    for number in range(40_000):
        at_s = number * 1.0
        pauses.ended(at_s)
        pauses.returned(at_s, 5.0 if number < 20_000 else 100.0)
    now_s = 40_000.0 + CURVE_S
    assert pauses.away(70.0, now_s) > 0.5 > pauses.away(140.0, now_s)


def test_what_is_only_noted_is_known_to_whoever_asks() -> None:
    """Half of the turns before another process's habits are taken are in those."""
    noted, asked = Forecasts(), Forecasts()
    (theirs,) = paused(1.0, lambda: 500.0, turns=3).habits()
    for number in range(3 * MOST_NOTED + 5):
        for forecasts in (noted, asked):
            forecasts.take(AnswerEnded("m", 1, False, NOW_S - number))
            forecasts.take(SessionReturned("m", 1, False, NOW_S - number, NOW_S))
            if number == MOST_NOTED // 2:
                forecasts.adopt(theirs)
        asked.pauses("m")
    assert noted._noted
    assert chance(noted, 3.0) == chance(asked, 3.0)
    assert list(noted.habits()) == list(asked.habits())


def test_another_process_takes_all_of_it() -> None:
    draw = random.Random(7)
    ours, theirs = paused(0.6, lambda: draw.lognormvariate(3, 1)), Forecasts()
    for habits in ours.habits():
        theirs.adopt(habits)
    assert [chance(theirs, idle_s) for idle_s in (0, 50)] == [chance(ours, idle_s) for idle_s in (0, 50)]
