"""Mode `slo` judges each turn by its own targets, and what it does to others by the usual ones."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from ppd.proxy.fleet.view import RecentPrompts, WorkerView
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.laws.targets import USUAL, SloTargets, TargetRules
from ppd.proxy.policy import Route
from ppd.proxy.policy.returns import Recomputed, Returns
from tests.support.decisions import D1, D2, P1

from .test_predicting_modes import LONG, NOW_S, decided, queueing, streaming

IN_NO_HURRY = SloTargets(ttft_s=3600.0, tpot_s=60.0)
HOPELESS = SloTargets(ttft_s=1e-9, ttft_factor=1e-9, tpot_s=1e-9)
OTHERS = ("streams", "batch", "queue", "evicted", "work", "moved")


class Asked(Returns):
    """Notes by which targets those that come back are judged."""

    def __init__(self) -> None:
        self.targets = set[SloTargets]()

    def within(self, seconds: float, worker: WorkerId, model: str, now_s: float) -> float:
        return seconds

    def lost(self, worker: WorkerId, model: str, tokens: int, now_s: float, recomputed: Recomputed) -> float:
        self.targets.add(recomputed.targets)
        return 1e-6 * tokens


def near_the_limit(view: WorkerView) -> WorkerView:
    """Its streams are nearly too slow, and prompts come."""
    return replace(streaming(view, 110), recent_prompts=RecentPrompts(NOW_S, 0.1, 1.0, 1.0 / 0.2))


@pytest.mark.parametrize("targets", [IN_NO_HURRY, HOPELESS], ids=["loose", "tight"])
def test_no_turns_targets_change_what_it_does_to_others(targets: SloTargets) -> None:
    fleet, asked = (P1, near_the_limit(D1), near_the_limit(D2)), Asked()
    usual = decided(LONG, *fleet, returns=asked)
    decision = decided(replace(LONG, slo=targets), *fleet, returns=asked)
    by_way = [
        {(way.route, way.decode.id): [way.terms[name] for name in OTHERS] for way in one.candidates}
        for one in (usual, decision)
    ]
    assert by_way[0] == by_way[1]
    assert asked.targets == {USUAL}
    assert any(way.terms["streams"] > 0.1 for way in usual.candidates)


def test_targets_of_the_turn_decide_for_itself() -> None:
    """A first token that may be late can wait in P's queue."""
    fleet = (queueing(P1, 3.0), streaming(D1, 5), streaming(D2, 5))
    hasty, patient = SloTargets(ttft_s=2.0, ttft_factor=1.0), SloTargets(ttft_s=30.0)
    assert decided(replace(LONG, slo=hasty), *fleet).route is Route.LOCAL
    assert decided(replace(LONG, slo=patient), *fleet).route is Route.SPLIT


def test_a_turn_in_no_hurry_stops_no_streams() -> None:
    fleet = (queueing(P1, 3.0), streaming(D1, 30), streaming(D2, 30))
    assert decided(replace(LONG, slo=IN_NO_HURRY), *fleet).route is Route.SPLIT


def test_the_operator_says_what_is_usual() -> None:
    """Where streams may be slow, a first token that may not be late need not wait in P's queue."""
    fleet = (queueing(P1, 3.0), streaming(D1, 30), streaming(D2, 30))
    hasty = replace(LONG, slo=SloTargets(ttft_s=2.0, ttft_factor=1.0))
    slow_streams = TargetRules(usual=SloTargets(tpot_s=1.0))
    assert decided(hasty, *fleet).route is Route.SPLIT
    assert decided(hasty, *fleet, targets=slow_streams).route is Route.LOCAL


def test_a_prompt_that_is_late_in_any_case_urges_nobody() -> None:
    """Else those whose targets nothing meets would keep others from their workers."""
    assert decided(replace(LONG, slo=HOPELESS), P1, D1).patience_s == math.inf
    assert 0 < decided(LONG, P1, D1).patience_s < 10
