"""When a profile or a table is stale."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from ppd.proxy.laws.accuracy import KEPT, TURNS, Accuracy, Basis, Errors, Subject
from ppd.proxy.laws.corrections import Figure

SUBJECT: Subject = (Basis.PROFILE, "h100", Figure.TTFT)


def noted(*runs: tuple[float, int]) -> Accuracy:
    """Errors, each so many times."""
    accuracy = Accuracy()
    for error, times in runs:
        for _ in range(times):
            accuracy.note(SUBJECT, error)
    return accuracy


def is_stale(accuracy: Accuracy) -> bool:
    (judged,) = accuracy.judged()
    return judged.stale


@pytest.mark.parametrize(
    ("runs", "stale"),
    [
        ([(0.31, TURNS)], True),
        ([(-0.31, TURNS)], True),
        ([(0.31, TURNS - 1)], False),
        ([(0.30, TURNS)], False),
        ([(100.0, TURNS // 2 - 1), (0.1, TURNS // 2 + 1)], False),
        ([(100.0, TURNS // 2 + 1), (0.1, TURNS // 2 - 1)], True),
        ([(0.9, TURNS), (0.28, TURNS)], True),
        ([(0.28, TURNS)], False),
        ([(0.9, TURNS), (0.2, TURNS)], False),
        ([(math.nan, TURNS), (0.1, 1)], False),
        ([(math.inf, TURNS)], True),
    ],
)
def test_a_median_that_leaves_30_percent_is_stale_until_it_is_well_within(
    runs: list[tuple[float, int]], stale: bool
) -> None:
    assert is_stale(noted(*runs)) is stale


def test_errors_keep_the_median_of_the_newest() -> None:
    draw, errors, all_of_them = random.Random(1), Errors(21), list[float]()
    for _ in range(300):
        all_of_them.append(draw.choice([draw.random(), 0.5]))
        errors.add(all_of_them[-1])
        newest = all_of_them[-21:]
        assert list(errors) == newest
        assert errors.median == statistics.median(newest)


def test_what_is_judged_is_bounded() -> None:
    accuracy = Accuracy()
    for number in range(3 * KEPT):
        for _ in range(TURNS):
            accuracy.note((Basis.TABLE, f"t{number}", Figure.TPOT), 1.0)
    assert len(list(accuracy.judged())) == KEPT
    assert len([one for one in accuracy.judged() if one.stale]) == len(accuracy._stale) == KEPT


def test_what_is_only_noted_is_known_to_whoever_asks() -> None:
    draw, asked, noted_only = random.Random(4), Accuracy(), Accuracy()
    for number in range(3 * TURNS + 5):
        subject = (Basis.TABLE, f"t{number % (KEPT + 1) if number < TURNS else 0}", Figure.TTFT)
        error = draw.choice([0.0, 0.9, 0.28])
        for accuracy in (asked, noted_only):
            accuracy.note(subject, error)
        before = list(asked.judged())
    assert noted_only._noted
    assert list(noted_only.judged()) == before


def test_another_process_judges_alike() -> None:
    ours, theirs = noted((0.1, 50), (0.5, 170)), Accuracy()
    theirs.adopt(ours.rows())
    assert list(theirs.judged()) == list(ours.judged())
