"""What a turn will take on a worker, and what it takes from those that decode there."""

from __future__ import annotations

import pytest

from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.ledger import LegEstimates
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.laws.prediction import EngineLaws, Outlook, TurnSize, on_one, work_on
from ppd.proxy.laws.step_time import EngineProfile
from tests.support.decisions import D1

COSTS = EngineProfile(attention_pair_s=0.0)
SHORT = TurnSize(150, 50, 125)
NOW_S = 100.0


def outlook(view: WorkerView = D1, size: TurnSize = SHORT, now_s: float = NOW_S) -> Outlook:
    return Outlook.of(view, EngineLaws(costs=COSTS), size, now_s)


@pytest.mark.parametrize(("new_tokens", "steps"), [(1, 1), (25, 1), (8192, 1), (8193, 2), (20_000, 3)])
def test_the_steps_of_a_prompt_belong_to_those_that_decode_too(new_tokens: int, steps: int) -> None:
    size = TurnSize(new_tokens + 100, 50, 100)
    predicted = on_one(outlook(size=size), work_on(outlook(size=size), size, 100))
    assert predicted.prefill_s == pytest.approx(steps * COSTS.step_s + new_tokens * COSTS.prefill_token_s)
    assert predicted.beside_s == pytest.approx(new_tokens * COSTS.prefill_token_s)


def test_many_short_prompts_hardly_slow_those_that_decode() -> None:
    """90 turns a second that add 25 tokens each take 3 % of the time, though each is computed in a step of 8 ms."""
    registry = Registry()
    registry.add_static(D1.worker, 0.0)
    now_s = 0.0
    idle_s = outlook(registry.views()[0], now_s=now_s).tpot_s
    for number in range(9000):
        now_s = number / 90
        work = on_one(outlook(registry.views()[0], now_s=now_s), work_on(outlook(now_s=now_s), SHORT, 125))
        estimates = LegEstimates(
            prompt_tokens=150, new_tokens=25, output_tokens=50, prefill_s=work.prefill_s, beside_s=work.beside_s
        )
        booking = LegBooking(registry, D1.id, None, estimates)
        booking.reserve(now_s)
        booking.release(now_s)
    assert outlook(registry.views()[0], now_s=now_s).tpot_s == pytest.approx(1.033 * idle_s, rel=0.01)
