"""What a process learns of how long items take to encode."""

from __future__ import annotations

import math

import pytest

from ppd.proxy.encoders.choosing import ItemDecision, ItemSeconds
from ppd.proxy.encoders.item_times import FRESH_S, LEAST_SAMPLES, MODELS_KEPT, SAMPLES, ItemTimes, tells

UNKNOWN = ItemSeconds()


def test_a_time_is_known_from_enough_samples_on_for_each_model() -> None:
    times = ItemTimes()
    for number in range(LEAST_SAMPLES):
        assert times.of("m", 0.0) == UNKNOWN
        times.encoded("m", 0.1 * (number + 1), number + 1, 0.0)  # as many came before it
        times.computed("m", 0.4, 2, 0.0)
    known = times.of("m", 0.0)
    assert known.on_encoder == pytest.approx(0.1)
    assert known.in_place == 0.2
    assert times.of("other", 0.0) == UNKNOWN


def test_a_few_turns_that_took_otherwise_change_nothing() -> None:
    times = ItemTimes()
    for number in range(SAMPLES):
        took_s = (60.0, -9.0, math.nan, math.inf)[number // 3 % 4] if number % 3 == 0 else 0.1
        times.encoded("m", took_s, 1, 0.0)
        times.computed("m", took_s, 1, 0.0)
    assert times.of("m", 0.0) == ItemSeconds(0.1, 0.1)


def test_what_has_become_slower_or_faster_is_known_after_half_as_many_as_are_kept() -> None:
    times = ItemTimes()
    for number in range(10 * SAMPLES):
        times.encoded("m", 0.1, 1, float(number))
    for number in range(1 + SAMPLES // 2):
        times.encoded("m", 0.5, 1, 10.0 * SAMPLES + number)
    assert times.of("m", 11.0 * SAMPLES).on_encoder == 0.5


def test_without_new_turns_a_time_is_forgotten() -> None:
    """Else an E that was once slow, as at its start, would be found busy for ever."""
    times = ItemTimes()
    for _ in range(LEAST_SAMPLES):
        times.encoded("m", 9.0, 1, 0.0)
    assert times.of("m", FRESH_S).on_encoder == 9.0
    assert times.of("m", FRESH_S + 1).on_encoder is None
    for _ in range(LEAST_SAMPLES):
        times.encoded("m", 0.1, 1, FRESH_S + 1)
    assert times.of("m", FRESH_S + 1).on_encoder == 0.1


def test_no_time_is_below_nothing() -> None:
    """Where the laws say more than turns take."""
    times = ItemTimes()
    for _ in range(LEAST_SAMPLES):
        times.computed("m", -0.5, 1, 0.0)
    assert times.of("m", 0.0).in_place == 0.0


def test_few_models_are_kept() -> None:
    times = ItemTimes()
    for model in range(10 * MODELS_KEPT):
        for _ in range(LEAST_SAMPLES):
            times.encoded(f"{model}", 0.1, 1, 0.0)
            times.computed(f"{model}", 0.1, 1, 0.0)
    known = [model for model in range(10 * MODELS_KEPT) if times.of(f"{model}", 0.0) != UNKNOWN]
    assert known == list(range(9 * MODELS_KEPT, 10 * MODELS_KEPT))


D = ItemDecision


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [
        ([D.BUSY], True),
        ([D.ABSENT, D.HELD, D.PREFIX], True),
        ([D.UNNAMED], True),
        ([D.BUSY, D.ENCODED], False),
        ([D.FAILED], False),
        ([D.BUSY, D.SMALL], False),
        ([D.NEVER], False),
        ([D.LEFT], False),
    ],
)
def test_turns_without_an_encoder_tell_what_their_own_items_took(decisions: list[ItemDecision], expected: bool) -> None:
    assert tells(decisions) is expected
