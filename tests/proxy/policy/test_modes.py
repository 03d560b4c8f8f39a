"""What each mode wants for a turn, by what D holds of it and by what P and D have to do."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy.beliefs.held import BeliefEvidence
from ppd.proxy.config import Mode
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.laws.prediction import EngineLaws
from ppd.proxy.laws.step_time import EngineProfile
from ppd.proxy.policy import Limits, Route, Rules, Turn
from tests.support.decisions import D1, D2, EVICTED, FIRST, FLEET, NEXT, P1, P2, R1, Decide, by_table, held, rules, view

SHARED = BeliefEvidence.SHARED_PREFIX
PROMPT = replace(FIRST, prompt_tokens=1000)


def beginning(tokens: int) -> Turn:
    """A first turn of 1,000 tokens, of which D2 holds so many by the turns of other sessions."""
    return replace(PROMPT, held=held(D2, tokens, SHARED))


@pytest.mark.parametrize(
    ("mode", "turn", "route", "reason"),
    [
        (Mode.ALWAYS_LOCAL, beginning(499), Route.SPLIT, "first_turn"),
        (Mode.ALWAYS_LOCAL, beginning(500), Route.LOCAL, "mode_always_local"),
        (Mode.TABLE, beginning(500), Route.LOCAL, "no_table"),
        (Mode.TABLE, beginning(499), Route.SPLIT, "first_turn"),
        (Mode.FRACTION, beginning(500), Route.LOCAL, "fraction_local"),
        (Mode.ALWAYS_SPLIT, beginning(1000), Route.SPLIT, "mode_always_split"),
        (Mode.PREFIX_THRESHOLD, beginning(800), Route.LOCAL, "few_uncached"),
        (Mode.PREFIX_THRESHOLD, beginning(799), Route.SPLIT, "many_uncached"),
        (Mode.PREFIX_THRESHOLD, replace(FIRST, prompt_tokens=200), Route.LOCAL, "few_uncached"),
        (Mode.PREFIX_THRESHOLD, replace(FIRST, prompt_tokens=201), Route.SPLIT, "many_uncached"),
        (Mode.PREFIX_THRESHOLD, NEXT, Route.LOCAL, "few_uncached"),
        (Mode.ISL_BOUNDING, beginning(801), Route.LOCAL, "few_uncached"),
        (Mode.ISL_BOUNDING, beginning(800), Route.SPLIT, "many_uncached"),
        (Mode.ISL_BOUNDING, replace(FIRST, prompt_tokens=100), Route.SPLIT, "many_uncached"),  # all of it
        (Mode.CONDITIONAL, beginning(800), Route.LOCAL, "few_uncached"),
        (Mode.CONDITIONAL, beginning(799), Route.SPLIT, "many_uncached"),
        (Mode.PREFILL_LOAD, NEXT, Route.SPLIT, "prefill_idle"),
    ],
)
def test_a_turn_is_judged_by_what_a_d_holds_of_it(
    run: Decide, mode: Mode, turn: Turn, route: Route, reason: str
) -> None:
    decision = run(turn, by=rules(mode, x=1.0, limits=Limits(local_tokens=200)))
    assert (decision.route, decision.reason) == (route, reason)
    assert decision.decode.id == D2.id or not turn.held


BUSY = [replace(view, queued_prefill_tokens=8192, inflight=2) for view in (P1, P2)]


@pytest.mark.parametrize(
    ("mode", "prefills", "route", "reason"),
    [
        (Mode.PREFILL_LOAD, BUSY, Route.LOCAL, "prefill_busy"),
        (Mode.PREFILL_LOAD, [BUSY[0], P2], Route.SPLIT, "prefill_idle"),
        (Mode.ISL_OR_LOAD, BUSY, Route.LOCAL, "prefill_busy"),
        (Mode.ISL_OR_LOAD, [BUSY[0], P2], Route.SPLIT, "prefill_idle"),
        (Mode.CONDITIONAL, BUSY, Route.LOCAL, "prefill_busy"),
        (Mode.CONDITIONAL, [P1, BUSY[1]], Route.SPLIT, "many_uncached"),
        (Mode.ISL_BOUNDING, BUSY, Route.SPLIT, "many_uncached"),
        (Mode.PREFILL_LOAD, [], Route.LOCAL, "prefill_busy"),  # nobody else could compute it
        (Mode.CONDITIONAL, [], Route.LOCAL, "prefill_busy"),
        (Mode.ISL_BOUNDING, [], Route.LOCAL, "no_prefill_worker"),
    ],
)
def test_a_turn_with_much_to_compute_stays_on_d_while_every_p_is_busy(
    run: Decide, mode: Mode, prefills: list[WorkerView], route: Route, reason: str
) -> None:
    decision = run(replace(FIRST, prompt_tokens=50_000), (*prefills, D1, D2), rules(mode))
    assert (decision.route, decision.reason) == (route, reason)


@pytest.mark.parametrize("mode", [Mode.ISL_BOUNDING, Mode.PREFILL_LOAD, Mode.ISL_OR_LOAD])
@pytest.mark.parametrize(("inflight", "route"), [(7, Route.LOCAL), (8, Route.SPLIT)])
def test_a_busy_d_computes_no_prompts(run: Decide, mode: Mode, inflight: int, route: Route) -> None:
    fleet = (*BUSY, D1, replace(D2, inflight=inflight))
    decision = run(NEXT, fleet, rules(mode, limits=Limits(decode_busy_requests=8)))
    assert (decision.route, decision.decode.id) == (route, D2.id)
    assert decision.reason == ("decode_busy" if route is Route.SPLIT else decision.reason)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    ("changes", "route"),
    [
        ({"forced": Route.SPLIT}, Route.SPLIT),
        ({"single_engine": "n"}, Route.LOCAL),
        ({"stored_response": True}, Route.LOCAL),
    ],
)
def test_what_is_forced_or_needs_one_engine_is_no_modes_business(
    run: Decide, mode: Mode, changes: dict[str, Any], route: Route
) -> None:
    assert run(replace(NEXT, **changes), by=rules(mode)).route is (
        Route.REPLICA if mode is Mode.REPLICA and "single_engine" in changes else route
    )


def test_a_head_elsewhere_does_not_hide_that_the_engine_of_a_stored_response_is_down(run: Decide) -> None:
    turn = replace(NEXT, held=held(D1, 1000, SHARED), held_tokens=0, stored_response=True)
    assert run(turn, (P1, D1, replace(D2, up=False)), rules()).vetoes == ("decode_down",)


@pytest.mark.parametrize("mode", Mode)
def test_every_mode_does_with_what_is_left_of_the_fleet(run: Decide, mode: Mode) -> None:
    for fleet in [(D1,), (R1,), (P1, D1), (P1, D1, R1), FLEET]:
        for turn in (FIRST, NEXT, PROMPT):
            decision = run(turn, fleet, rules(mode))
            assert decision.decode in fleet
            assert (decision.prefill is not None) == (decision.route is Route.SPLIT)


def test_where_nothing_is_left_of_a_prefix_the_table_keeps_no_turn(run: Decide) -> None:
    decision = run(EVICTED, by=by_table(1, 1))
    assert decision.verdict is not None and decision.verdict.local
    assert (decision.wanted, decision.route, decision.reason) == (Route.LOCAL, Route.SPLIT, "evicted")


class Costs:
    """Of each engine its own."""

    version = "1"

    def __init__(self, costs: dict[WorkerId, EngineProfile]) -> None:
        self._costs = costs

    def of(self, view: WorkerView) -> EngineLaws:
        return EngineLaws(costs=self._costs[view.id])


def test_each_engine_is_judged_by_its_own_costs(run: Decide) -> None:
    """Whichever engines are looked at before it."""
    engines = [view("D", number) for number in (1, 2, 3, 4)]
    fast, slow = EngineProfile(), EngineProfile(prefill_token_s=1e-3, request_s=0.5, attention_pair_s=1e-7)
    laws = Costs({engine.id: costs for engine, costs in zip(engines, (fast, slow, fast, slow), strict=True)})
    begun, by = replace(PROMPT, prompt_tokens=8000), Rules(mode=Mode.LEAST_TTFT, laws=laws)
    for turn in (begun, replace(begun, held={**held(D1, 4000, SHARED), **held(D2, 4000, SHARED)})):
        alone = {one.id: run(turn, (one,), by).candidates[0].prediction for one in engines}
        for fleet in (engines, engines[::-1]):
            ways = run(turn, tuple(fleet), by).candidates
            judged = {way.decode.id: way.prediction for way in ways if way.prediction is not None}
            assert judged == {worker: alone[worker] for worker in judged}
