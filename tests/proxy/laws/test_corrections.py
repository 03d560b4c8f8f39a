"""What measured times teach of the laws."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy.laws.corrections import (
    LEAST_SPREAD,
    LIKES_KEPT,
    USUAL_SPREAD,
    WORKERS_KEPT,
    Corrections,
    Figure,
    Measured,
)

LIKES = "h100/D/m"
PLAIN_S = 0.1


def measured(ratio: float, worker: str = "d1", likes: str = LIKES, **changes: Any) -> Measured:
    turn = Measured(worker, "i", likes, Figure.TTFT, PLAIN_S, 1.0, PLAIN_S * ratio)
    return replace(turn, **changes)


def factor(corrections: Corrections, now_s: float, worker: str = "d1", incarnation: str = "i") -> float:
    return corrections.factor(worker, incarnation, LIKES, Figure.TTFT, now_s)


def taught(ratio: float, turns: int, every_s: float = 1.0, worker: str = "d1") -> Corrections:
    corrections = Corrections()
    for number in range(turns):
        corrections.learn(measured(ratio, worker), number * every_s)
    return corrections


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.8, 1.0, 1.3, 2.0, 3.5])
def test_a_worker_that_is_always_off_by_as_much_is_corrected_by_it(ratio: float) -> None:
    assert factor(taught(ratio, 200), 200) == pytest.approx(ratio, rel=0.1)


@pytest.mark.parametrize(("ratio", "bound"), [(100.0, 4.0), (0.001, 0.25)])
def test_a_factor_is_bounded(ratio: float, bound: float) -> None:
    assert factor(taught(ratio, 2000), 2000) == pytest.approx(bound, rel=0.01)


@pytest.mark.parametrize("ratio", [100.0, 0.01])
def test_an_outlier_changes_little(ratio: float) -> None:
    corrections = taught(1.0, 50)
    corrections.learn(measured(ratio), 50)
    assert factor(corrections, 50) == pytest.approx(1.0, abs=0.03)


def test_a_tenth_of_outliers_changes_little() -> None:
    draw, corrections = random.Random(3), Corrections()
    for number in range(1000):
        ratio = 100.0 if draw.random() < 0.1 else 1.5 * math.exp(draw.gauss(0, 0.2))
        corrections.learn(measured(ratio), number)
    assert factor(corrections, 1000) == pytest.approx(1.5, rel=0.15)


def test_one_turn_says_little_and_the_first_ones_say_more_each() -> None:
    factors = [factor(taught(2.0, turns), turns) for turns in (1, 3, 10, 30)]
    assert factors == sorted(factors)
    assert (factors[0] < 1.2, factors[-1] > 1.6) == (True, True)


def spread(corrections: Corrections, now_s: float, worker: str = "d1", incarnation: str = "i") -> float:
    return corrections.ttft_spread(worker, incarnation, LIKES, now_s)


@pytest.mark.parametrize("off", [0.0, 0.2, 0.5])
def test_how_far_turns_lie_from_a_law_is_learnt(off: float) -> None:
    draw, corrections = random.Random(5), Corrections()
    for number in range(500):
        corrections.learn(measured(2.0 * math.exp(draw.gauss(0, off))), number)
    assert spread(corrections, 500) == pytest.approx(max(off, LEAST_SPREAD), rel=0.2)
    assert spread(corrections, 500, "d2") == pytest.approx(max(off, LEAST_SPREAD), rel=0.3), "as of its likes"
    assert spread(corrections, 500, incarnation="j") == spread(corrections, 500, "d2")
    assert spread(corrections, 500 + 20 * 3600) == pytest.approx(USUAL_SPREAD, rel=0.01), "long ago"


def test_a_worker_whose_turns_lie_far_off_says_little_of_its_likes() -> None:
    """Nor do its TPOTs say anything of its TTFTs."""
    draw, corrections = random.Random(5), Corrections()
    for number in range(2000):
        far = number % 8 == 0
        corrections.learn(measured(math.exp(draw.gauss(0, 0.6 if far else 0.1)), f"d{number % 8}"), number)
        corrections.learn(measured(1.0, f"d{number % 8}", figure=Figure.TPOT), number)
    assert spread(corrections, 2000, "d0") == pytest.approx(0.6, rel=0.3)
    assert spread(corrections, 2000, "d1") < 0.2


def test_without_turns_and_with_absurd_ones_a_spread_stays_in_bounds() -> None:
    assert spread(Corrections(), 0.0) == pytest.approx(USUAL_SPREAD)
    draw, corrections = random.Random(5), Corrections()
    for number in range(500):
        corrections.learn(measured(draw.choice([1e-4, 1e4])), number)
    assert spread(corrections, 500) < 1.3


NONSENSE = [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-9, 1e9]


@pytest.mark.parametrize("value", NONSENSE)
@pytest.mark.parametrize("name", ["plain_s", "measured_s", "factor"])
def test_a_figure_that_is_none_teaches_nothing(name: str, value: float) -> None:
    corrections = taught(2.0, 50)
    before, turns = factor(corrections, 50), corrections.turns
    assert not corrections.learn(replace(measured(1.0), **{name: value}), 50)
    assert (factor(corrections, 50), corrections.turns) == (before, turns)


def test_all_turns_of_a_proxy_that_stood_still_change_little() -> None:
    corrections = taught(1.0, 100)
    for _ in range(1000):
        corrections.learn(measured(100.0), 130.0)
    assert factor(corrections, 130.0) < 1.3


def test_all_turns_of_a_proxy_that_stood_still_hardly_say_that_a_law_is_off() -> None:
    corrections = taught(1.0, 100)
    before = spread(corrections, 130.0)
    for _ in range(1000):
        corrections.learn(measured(100.0), 130.0)
    assert before < spread(corrections, 130.0) < before + 0.3


def test_a_clock_that_stands_still_or_jumps_back_does_no_harm() -> None:
    draw, corrections = random.Random(5), Corrections()
    for _ in range(500):
        corrections.learn(measured(math.exp(draw.gauss(0, 3))), draw.choice([0.0, 5.0, -1e9, 1e9]))
        assert 0.25 <= factor(corrections, draw.choice([-1e12, 0.0, 1e12])) <= 4.0


def test_new_workers_have_what_their_likes_have_in_common() -> None:
    corrections = Corrections()
    for number in range(300):
        corrections.learn(measured(2.0, f"d{number % 3}"), number)
    assert factor(corrections, 300, "new") == pytest.approx(2.0, rel=0.1)
    assert corrections.factor("new", "i", "other/D/m", Figure.TTFT, 300) == 1.0
    assert corrections.factor("new", "i", LIKES, Figure.TPOT, 300) == 1.0


def test_one_slow_worker_is_corrected_and_hardly_changes_what_others_are_believed_to_do() -> None:
    corrections = Corrections()
    for number in range(2000):
        slow = number % 8 == 0
        corrections.learn(measured(3.0 if slow else 1.0, f"d{number % 8}"), number)
    assert factor(corrections, 2000, "d0") == pytest.approx(3.0, rel=0.1)
    assert factor(corrections, 2000, "d1") == pytest.approx(1.0, rel=0.05)
    assert factor(corrections, 2000, "new") == pytest.approx(1.0, abs=0.15)


def test_another_engine_at_the_same_address_begins_with_what_its_likes_have() -> None:
    corrections = Corrections()
    for number in range(200):
        corrections.learn(measured(3.0), number)
        corrections.learn(measured(1.0, "d2"), number)
        corrections.learn(measured(1.0, "d3"), number)
    assert factor(corrections, 200) == pytest.approx(3.0, rel=0.1)
    assert factor(corrections, 200, incarnation="later") == factor(corrections, 200, "new")
    corrections.learn(measured(1.0, incarnation="later"), 200)
    assert factor(corrections, 200, incarnation="later") < 1.5


def test_what_was_measured_long_ago_gives_way_to_the_likes() -> None:
    corrections = taught(3.0, 100)
    for number in range(300):
        corrections.learn(measured(1.0, "d2"), 100 + number)
    day_s = 86_400.0
    early, late = (factor(corrections, 400 + wait_s) for wait_s in (0.0, day_s))
    assert early > 2.5
    assert late == pytest.approx(factor(corrections, 400 + day_s, "new"), rel=0.05)


def test_workers_and_likes_are_bounded() -> None:
    corrections = Corrections()
    for number in range(3 * WORKERS_KEPT):
        corrections.learn(measured(2.0, f"w{number}", f"p{number}/D/m"), number)
    rows = list(corrections.rows())
    assert sum(row.incarnation is None for row in rows) == LIKES_KEPT
    assert len(rows) <= LIKES_KEPT + 2 * WORKERS_KEPT
    assert len(corrections._told) <= LIKES_KEPT


def test_another_process_takes_all_of_it() -> None:
    ours, theirs = taught(2.5, 60), Corrections()
    theirs.adopt(ours.rows())
    assert factor(theirs, 60) == factor(ours, 60)
    ours.learn(measured(1.0), 61)
    assert factor(theirs, 61) != factor(ours, 61)


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -math.inf, -2.0, 1e9])
@pytest.mark.parametrize("name", ["log", "turns", "off"])
def test_what_another_process_cannot_have_learnt_is_not_taken(name: str, absurd: float) -> None:
    """It would stay: what is not finite is not moved by any turn."""
    corrections = Corrections()
    corrections.adopt([replace(row, learnt=replace(row.learnt, **{name: absurd})) for row in taught(2.5, 60).rows()])
    assert factor(corrections, 60.0) == 1.0
    assert spread(corrections, 60.0) == pytest.approx(USUAL_SPREAD)


def test_what_was_told_of_likes_goes_with_them_also_where_another_process_has_learnt() -> None:
    """They are named after what workers say of themselves."""
    ours, theirs = Corrections(), Corrections()
    for number in range(LIKES_KEPT):
        theirs.learn(measured(2.0, likes=f"theirs {number}"), 0.0)
    for number in range(3):
        ours.learn(measured(2.0, likes=f"ours {number}"), 0.0)
        ours.adopt(theirs.rows())
    assert ours._told.keys() <= ours._of_likes.keys()
