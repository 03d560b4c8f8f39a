"""Engines that compute several long prompts side by side, so that a short one does not wait for them there."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ppd.proxy.config import Mode
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.laws.prediction import EngineLaws
from ppd.proxy.laws.step_time import EngineProfile
from ppd.proxy.policy import Rules
from tests.proxy.policy.test_predicting_modes import LATER, LONG, hurried, queueing
from tests.support.decisions import D1, D2, run


class Capped:
    """Of all engines."""

    version = "1"

    def __init__(self, long_prefill_tokens: int) -> None:
        self._costs = EngineProfile(long_prefill_tokens=long_prefill_tokens)

    def of(self, view: WorkerView) -> EngineLaws:
        return EngineLaws(costs=self._costs)


def rules(cap: int) -> Rules:
    return Rules(mode=Mode.SLO, laws=Capped(cap))


@pytest.mark.parametrize(("cap", "home"), [(0, "D1"), (8192, "D1"), (1024, "D2")])
def test_a_short_turn_stays_where_its_history_is(cap: int, home: str) -> None:
    """A cap as large as a step leaves no room beside the long prompt."""
    fleet = (D1, replace(queueing(D2, 9.0), queued_prefill_tokens=300_000))
    assert run(LATER, fleet, rules(cap)).decode.name == home


def test_a_long_prompt_makes_few_late_that_come_while_it_is_computed() -> None:
    (whole,), (capped,) = (run(LONG, (hurried(D1),), rules(cap)).candidates for cap in (0, 1024))
    assert 0 < capped.terms["queue"] < whole.terms["queue"] / 4
