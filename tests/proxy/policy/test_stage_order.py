"""Which worker of a SPLIT is chosen first, and what that changes; what it does not is in `test_decide`."""

from __future__ import annotations

from dataclasses import replace as replace_worker
from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy.beliefs.held import BeliefEvidence
from ppd.proxy.config import Mode, ProxyConfig, StageOrder
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.policy import Decision, Limits, Route, Rules, Turn
from ppd.proxy.policy.modes import PREDICTING
from ppd.proxy.policy.stage_order import SETTLED, OrderRules, order_rules
from ppd.proxy.settings import Settings
from tests.support.decisions import D1, D2, FIRST, FLEET, NEXT, P1, P2, R1, SameLaws, held, rules, run, view

BY_MODE, PREFILL_FIRST, DECODE_FIRST = StageOrder
SPLIT = rules(Mode.ALWAYS_SPLIT)
PROMPT = replace(FIRST, prompt_tokens=20_000)
SHARED = BeliefEvidence.SHARED_PREFIX
D3 = view("D", 3)


def of_version(version: str, *views: WorkerView) -> tuple[WorkerView, ...]:
    """Only engines of one version can hand over."""
    return tuple(replace(each, worker=replace_worker(each.worker, engine_version=version)) for each in views)


def queueing(view: WorkerView, tokens: int) -> WorkerView:
    return replace(view, queued_prefill_tokens=tokens, prefills=1, inflight=1)


def with_(view: WorkerView, **worker: Any) -> WorkerView:
    return replace(view, worker=replace_worker(view.worker, **worker))


def names(decision: Decision) -> tuple[str, str]:
    return "" if decision.prefill is None else decision.prefill.name, decision.decode.name


@pytest.mark.parametrize(
    ("order", "fleet", "workers"),
    [
        # P1 is idle and so is D2, but they cannot pair: who is first gets the idle one.
        *((o, (*of_version("1", P1, queueing(D1, 900)), *of_version("2", queueing(P2, 900), D2)), w) for o, w in (
            (BY_MODE, ("P2", "D2")), (DECODE_FIRST, ("P2", "D2")), (PREFILL_FIRST, ("P1", "D1"))
        )),
        # A P that no D can take from is never first.
        (PREFILL_FIRST, (*of_version("1", P1), *of_version("2", queueing(P2, 900), D2)), ("P2", "D2")),
        # Nor is a D to which no P can hand over.
        (DECODE_FIRST, (*of_version("1", P1, queueing(D1, 900)), *of_version("2", D2)), ("P1", "D1")),
    ],
)  # fmt: skip
def test_who_comes_first_is_chosen_freely_and_the_other_pairs_with_it(
    order: StageOrder, fleet: tuple[WorkerView, ...], workers: tuple[str, str]
) -> None:
    decision = run(FIRST, fleet, SPLIT, order=order)
    assert (decision.route, names(decision)) == (Route.SPLIT, workers)


@pytest.mark.parametrize(("held_tokens", "chosen"), [(800, "P1"), (1000, "P2")])
def test_a_p_that_comes_first_is_the_one_that_is_done_first(held_tokens: int, chosen: str) -> None:
    turn = replace(FIRST, prompt_tokens=1000, held=held(P2, held_tokens, SHARED))
    fleet = (P1, queueing(P2, 900), *FLEET[2:])
    assert run(turn, fleet, SPLIT, order=PREFILL_FIRST).prefill is {"P1": fleet[0], "P2": fleet[1]}[chosen]


@pytest.mark.parametrize("mode", [Mode.PREFIX_THRESHOLD, Mode.ISL_BOUNDING, Mode.CONDITIONAL])
def test_a_d_that_comes_first_is_the_one_that_is_judged(mode: Mode) -> None:
    """D1 holds the beginning, and no P can hand over to it: without an order it is judged, and computes the rest."""
    turn = replace(FIRST, prompt_tokens=1000, held=held(D1, 990, SHARED))
    fleet = (*of_version("1", P1, D2), *of_version("2", D1))
    by = rules(mode, limits=Limits(local_tokens=100))
    as_ever, first = (run(turn, fleet, by, order=order) for order in (BY_MODE, DECODE_FIRST))
    assert (as_ever.route, names(as_ever)) == (Route.LOCAL, ("", "D1"))
    assert (first.route, names(first), first.cached_tokens) == (Route.SPLIT, ("P1", "D2"), 0)


@pytest.mark.parametrize("order", StageOrder)
def test_a_session_stays_on_its_d_also_where_no_p_can_hand_over_to_it(order: StageOrder) -> None:
    fleet = (*of_version("1", P1, D1), *of_version("2", D2))
    assert names(run(NEXT, fleet, order=order)) == ("", "D2")


@pytest.mark.parametrize("order", StageOrder)
def test_without_a_p_the_d_is_one_that_computes_prompts(order: StageOrder) -> None:
    decodes_only = with_(D1, connector="sglang", engine="sglang")
    decision = run(FIRST, (decodes_only, replace(D2, inflight=9)), SPLIT, order=order)
    assert (decision.route, names(decision)) == (Route.LOCAL, ("", "D2"))


@pytest.mark.parametrize("mode", sorted(PREDICTING))
def test_modes_that_judge_ways_judge_those_over_the_one_that_is_first(mode: Mode) -> None:
    fleet = (queueing(P1, 900), P2, replace(D1, inflight=3), D2, R1)
    by = Rules(mode=mode, laws=SameLaws())
    ways = {
        order: {
            (way.route, "" if way.prefill is None else way.prefill.name, way.decode.name)
            for way in run(PROMPT, fleet, by, order=order).candidates
            if not way.excluded
        }
        for order in StageOrder
    }
    alone = {(Route.LOCAL, "", "D1"), (Route.LOCAL, "", "D2"), (Route.REPLICA, "", "R1")}
    splits = {(Route.SPLIT, p, d) for p in ("P1", "P2") for d in ("D1", "D2")}
    assert ways[BY_MODE] == alone | splits
    assert ways[PREFILL_FIRST] == alone | {way for way in splits if way[1] == "P2"}
    assert ways[DECODE_FIRST] == {way for way in alone | splits if way[2] != "D1"}


@pytest.mark.parametrize(
    ("order", "turn", "told"),
    [
        (BY_MODE, replace(PROMPT, held=held(P1, 500, SHARED)), []),
        (PREFILL_FIRST, replace(PROMPT, held=held(P1, 500, SHARED)), ["P1"]),
        (DECODE_FIRST, replace(PROMPT, held=held(D1, 500, SHARED)), ["D1"]),
    ],
)
def test_who_holds_some_of_it_and_is_passed_by_for_the_order_is_told(
    order: StageOrder, turn: Turn, told: list[str]
) -> None:
    fleet = (queueing(P1, 90_000), P2, queueing(D1, 90_000), D2)
    decision = run(turn, fleet, Rules(mode=Mode.LEAST_TTFT, laws=SameLaws()), order=order)
    passed = [way for way in decision.candidates if way.excluded == "order"]
    assert [(way.prefill or way.decode).name for way in passed] == told


def test_a_d_that_comes_first_may_be_lent_to_and_a_p_that_does_leaves_no_lender() -> None:
    turn = replace(NEXT, prompt_tokens=20_100, held_tokens=20_000, held=held(D2, 9_000), decode=D2.id)
    by, fleet = Rules(mode=Mode.LEAST_TTFT, laws=SameLaws(), moves_kv=True), (P1, D1, replace(D2, inflight=30), D3)
    lenders = {
        order: {way.prefill.name for way in run(turn, fleet, by, order=order).candidates if way.prefill}
        for order in StageOrder
    }
    assert lenders == {BY_MODE: {"P1", "D2"}, PREFILL_FIRST: {"P1"}, DECODE_FIRST: {"P1", "D2"}}


def test_a_d_behind_a_sidecar_lends_nothing() -> None:
    """The sidecar would take the handoff out."""
    turn = replace(NEXT, prompt_tokens=20_100, held_tokens=20_000, held=held(D2, 20_000), decode=D2.id)
    by = Rules(mode=Mode.LEAST_TTFT, laws=SameLaws(), moves_kv=True)
    lenders = [
        {way.prefill.name for way in run(turn, (D1, holder), by).candidates if way.prefill}
        for holder in (D2, with_(D2, has_sidecar=True))
    ]
    assert lenders == [{"D2"}, set()]


@pytest.mark.parametrize("mode", sorted(set(Mode) - set(SETTLED) - PREDICTING))
@pytest.mark.parametrize("turn", [FIRST, NEXT], ids=["first", "next"])
@pytest.mark.parametrize("order", StageOrder)
def test_a_decision_names_its_order(mode: Mode, turn: Turn, order: StageOrder) -> None:
    assert run(turn, by=rules(mode), order=order).order is order


def test_the_order_is_its_models() -> None:
    orders = order_rules(ProxyConfig(order=PREFILL_FIRST, order_by_model=("m:decode_first", "org/a:7b:mode")))
    fleet = tuple(with_(each, models=("m", "n", "org/a:7b")) for each in FLEET)
    named = [run(replace(FIRST, model=model), fleet, order=orders.of(model)).order for model in ("m", "n", "org/a:7b")]
    assert named == [DECODE_FIRST, PREFILL_FIRST, BY_MODE]


def test_profiles_have_the_order_of_their_file() -> None:
    assert run(FIRST, by=rules(Mode.PROFILES), order=PREFILL_FIRST).order is DECODE_FIRST
    schedule = rules(Mode.PROFILES).schedule
    assert schedule is not None
    first = rules(Mode.PROFILES, schedule=replace(schedule, is_prefill_first=True))
    assert run(FIRST, by=first).order is PREFILL_FIRST


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"order": "prefill"}, "order = 'prefill': must be one of mode, prefill_first, decode_first"),
        ({"order_by_model": ("m:first",)}, "order_by_model = 'm:first': must be MODEL:ORDER, with one of mode, pre"),
        ({"order_by_model": (":mode",)}, "order_by_model = ':mode': must be MODEL:ORDER"),
        ({"order_by_model": ("mode",)}, "order_by_model = 'mode': must be MODEL:ORDER"),
        ({"order_by_model": ("m:mode", "m:decode_first")}, "'m:decode_first': must be of a model that is named once"),
        ({"order": PREFILL_FIRST, "mode": Mode.PROFILES}, "order = 'prefill_first': must be mode where"),
        ({"order": DECODE_FIRST, "mode": Mode.PROFILES}, "order = 'decode_first': must be mode where"),
        ({"order_by_model": ("m:decode_first",), "mode": Mode.PROFILES}, "'m:decode_first': must be mode where"),
        ({"order": PREFILL_FIRST, "mode": Mode.FREE_KV}, "order = 'prefill_first': must be mode or decode_first where"),
        ({"order_by_model": ("m:prefill_first",), "mode": Mode.SESSION_HASH}, "must be mode or decode_first where"),
    ],
)  # fmt: skip
def test_an_order_that_cannot_be_had_is_told_with_what_can(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match="must be") as caught:
        order_rules(ProxyConfig(**wrong))
    assert told in caught.value.message
    assert caught.value.param == next(name for name in wrong if name != "mode")


@pytest.mark.parametrize("mode", [Mode.SESSION_HASH, Mode.FREE_KV])
def test_modes_that_place_sessions_choose_d_first(mode: Mode) -> None:
    assert order_rules(ProxyConfig(order=DECODE_FIRST, mode=mode)) == OrderRules(usual=DECODE_FIRST)
    decisions = {order: run(FIRST, by=rules(mode), order=order) for order in (BY_MODE, DECODE_FIRST)}
    assert names(decisions[BY_MODE]) == names(decisions[DECODE_FIRST])
    assert decisions[DECODE_FIRST].order is DECODE_FIRST


def test_the_order_changes_while_the_proxy_runs() -> None:
    settings = Settings(ProxyConfig(mode=Mode.ALWAYS_SPLIT))
    settings.change(order=PREFILL_FIRST, order_by_model=("m:decode_first",))
    assert [settings.rules().orders.of(model) for model in ("m", "n")] == [DECODE_FIRST, PREFILL_FIRST]
    with pytest.raises(ConfigError, match="order = 'prefill_first'"):
        settings.change(mode=Mode.FREE_KV)
    assert settings.config.mode is Mode.ALWAYS_SPLIT
