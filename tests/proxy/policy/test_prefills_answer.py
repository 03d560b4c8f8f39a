"""P that may answer turns alone: which of them do, and which turns they take."""

from __future__ import annotations

from dataclasses import replace as replace_worker
from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy.config import Mode, StageOrder
from ppd.proxy.errors import AllBusy, AllDown
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.policy import Decision, Route, Rules, Turn, has_room
from ppd.proxy.policy.modes import PREDICTING
from ppd.proxy.policy.stage_order import OrderRules
from tests.proxy.policy.test_predicting_modes import BUSY, LATER, LONG, crowded, decided, queueing
from tests.support.decisions import D1, D2, P1, P2, R1, SameLaws, fleet_of, held, rules, run

ON_P1 = replace(LATER, held=held(P1, 20_000), decode=P1.id)
FULL = (crowded(D1), crowded(D2))


def with_worker(view: WorkerView, **changes: object) -> WorkerView:
    return replace(view, worker=replace_worker(view.worker, **changes))  # type: ignore[arg-type]


def answering(decision: Decision) -> str:
    """Who answers the turn alone; empty: it is split."""
    return "" if decision.prefill is not None else decision.decode.name


@pytest.mark.parametrize(
    ("turn", "fleet", "expected"),
    [
        (LONG, (P1, *FULL), {"P1"}),  # no D has room for one stream more
        (LONG, (P1, P2, *FULL, crowded(R1)), {"P1", "P2"}),
        (ON_P1, (P1, D1, D2), {"P1"}),  # its KV need not move
        (LATER, (P1, D1, D2), {"D2"}),  # it stays where it is held
        (ON_P1, (queueing(P1, 20.0), D1, D2), {"D1", "D2"}),  # all of it is computed elsewhere sooner
        (ON_P1, (crowded(P1), D1, D2), {"", "D1", "D2"}),  # P has too many streams itself
        (replace(ON_P1, single_engine="n"), (P1, D1), {"D1"}),  # what no mode is asked about
        (replace(ON_P1, stored_response=True, decode=D1.id, endpoint=Endpoint.RESPONSES), (P1, D1), {"D1"}),
    ],
)
def test_a_p_answers_where_that_may_be_and_pays(turn: Turn, fleet: tuple[WorkerView, ...], expected: set[str]) -> None:
    assert not answering(decided(turn, *fleet)).startswith("P")
    decision = decided(turn, *fleet, prefills_answer=True)
    assert answering(decision) in expected
    if answering(decision).startswith("P"):
        assert (decision.route, decision.lender) == (Route.REPLICA, None)
        assert decision.prediction is not None
        assert decision.prediction.transfer_s == 0.0
        assert decision.estimates(turn).new_on_prefill_tokens == 0, "all of it is booked as one leg"


@pytest.mark.parametrize(
    ("turn", "p", "decodes"),
    [
        (replace(LONG, endpoint=Endpoint.RESPONSES), P1, FULL),  # a later turn may name it
        (LONG, replace(P1, places=1, inflight=1), FULL),
        (LONG, replace(P1, draining=True), FULL),
        (LONG, replace(P1, up=False), FULL),
        (LONG, with_worker(P1, connector="p2p_nccl"), FULL),  # which reads all that P is asked for as a half
        (LONG, with_worker(P1, connector="mooncake"), FULL),
        (LONG, P1, tuple(with_worker(one, has_sidecar=True) for one in FULL)),
    ],
)
def test_no_p_answers_what_it_could_not(turn: Turn, p: WorkerView, decodes: tuple[WorkerView, ...]) -> None:
    decision = decided(turn, p, *decodes, prefills_answer=True)
    assert decision.decode.name in ("D1", "D2")
    assert not any(way.decode.name == "P1" and not way.excluded for way in decision.candidates)


@pytest.mark.parametrize("mode", sorted(PREDICTING))
def test_every_mode_that_predicts_judges_them(mode: Mode) -> None:
    decision = decided(LONG, P1, *BUSY, mode=mode, prefills_answer=True)
    assert any(way.route is Route.REPLICA and way.decode.name == "P1" for way in decision.candidates)
    assert all(way.prefill is not way.decode for way in decision.candidates)


@pytest.mark.parametrize("order", list(StageOrder))
def test_in_every_order(order: StageOrder) -> None:
    """Where D is chosen first it may turn out to be full, and P takes the turn."""
    decision = decided(LONG, P1, *FULL, prefills_answer=True, orders=OrderRules(usual=order))
    assert answering(decision) == "P1"


def test_where_kv_may_be_moved_too_a_p_neither_lends_itself_nor_pulls() -> None:
    decision = decided(ON_P1, P1, P2, *FULL, prefills_answer=True, moves_kv=True)
    for way in decision.candidates:
        assert way.prefill is None or way.decode.name[0] == "D"
    assert decision.lender is None


def test_an_engine_without_a_profile_does_not_answer() -> None:
    decision = decided(LONG, P1, *FULL, unknown=(P1,), prefills_answer=True)
    assert decision.decode.name in ("D1", "D2")


TAKEN, GONE = replace(D1, inflight=2, places=2), replace(D1, up=False)
NEW = replace(LONG, single_engine="n")


@pytest.mark.parametrize("mode", sorted({*Mode} - {Mode.PROFILES}))
@pytest.mark.parametrize("nobody", [(TAKEN,), (GONE,), ()], ids=["full", "down", "none"])
def test_in_every_mode_p_answer_in_place_of_d_and_r_that_are_all_full_or_down(
    mode: Mode, nobody: tuple[WorkerView, ...]
) -> None:
    asked: dict[str, Any] = {"mode": mode, "laws": SameLaws(), "prefills_answer": True}
    for turn in (LONG, ON_P1, NEW, replace(LONG, forced=Route.SPLIT)):
        for order in StageOrder:
            by = replace(rules(mode), **asked, moves_kv=order is StageOrder.MODE)
            decision = run(turn, (P1, replace(P2, inflight=3, places=3), *nobody), by, order=order)
            assert (decision.route, decision.decode, decision.prefill) == (Route.REPLICA, P1, None)
            assert sum(way.decode is P1 for way in decision.candidates) <= 1, "it is judged once"
        assert has_room(fleet_of((P1, *nobody)), by)


@pytest.mark.parametrize(
    ("turn", "fleet", "avoid"),
    [
        (replace(LONG, endpoint=Endpoint.RESPONSES), (P1, TAKEN), ()),
        (LONG, (P1, TAKEN), (P1.id,)),
        (LONG, (replace(P1, inflight=1, places=1), TAKEN), ()),
        (LONG, (with_worker(P1, connector="p2p_nccl"), TAKEN), ()),
        (LONG, (P1, with_worker(TAKEN, has_sidecar=True)), ()),
        (LONG, (P1, with_worker(GONE, has_sidecar=True)), ()),
        (LONG, (replace(P1, draining=True), GONE), ()),
    ],
)
def test_no_p_stands_in_where_it_could_not_answer(
    turn: Turn, fleet: tuple[WorkerView, ...], avoid: tuple[WorkerId, ...]
) -> None:
    with pytest.raises((AllBusy, AllDown)):
        run(turn, fleet, replace(rules(), prefills_answer=True), avoid)


def test_no_p_stands_in_unless_the_operator_says_so_or_while_another_has_room() -> None:
    for by in (rules(), replace(rules(Mode.PROFILES), prefills_answer=True)):
        assert not has_room(fleet_of((P1, TAKEN)), by)
        with pytest.raises(AllBusy):
            run(LONG, (P1, TAKEN), by)
    answers = replace(rules(), prefills_answer=True)
    assert not has_room(fleet_of((P1, TAKEN)), answers, is_response=True), "it waits in the queue"
    assert not has_room(fleet_of((P1, TAKEN)), answers, lambda: (P1.id,)), "it failed other turns"
    assert run(LONG, (P1, TAKEN, D2), answers).decode is D2
    assert run(replace(LATER, held=held(TAKEN, 20_000)), (P1, TAKEN), answers).decode is TAKEN, "it waits at home"
    assert not has_room(fleet_of((replace(P1, inflight=3), replace(D1, inflight=3))), replace(answers, worker_limit=3))


@pytest.mark.parametrize(
    ("answering", "legs", "has_place"),
    [
        ((replace(D1, inflight=16, places=16),), 15, True),
        ((replace(D1, inflight=16, places=16),), 16, False),  # no more than a D may have
        ((replace(D1, inflight=16, places=16), replace(R1, inflight=24, places=24)), 16, True),
        ((replace(D1, inflight=16, places=16, up=False),), 100, True),  # nobody else is there
    ],
)
def test_a_p_that_stands_in_has_as_many_places_as_those_for_whom_it_does(
    answering: tuple[WorkerView, ...], legs: int, has_place: bool
) -> None:
    answers, fleet = replace(rules(), prefills_answer=True), (replace(P1, inflight=legs), *answering)
    assert has_room(fleet_of(fleet), answers) is has_place
    if has_place:
        assert run(LONG, fleet, answers).decode.id == P1.id
    else:
        with pytest.raises(AllBusy):
            run(LONG, fleet, answers)


def test_no_p_that_stands_in_lends_itself_to_another() -> None:
    answers = Rules(mode=Mode.SLO, laws=SameLaws(), prefills_answer=True, moves_kv=True)
    decision = run(ON_P1, (crowded(P1), P2, TAKEN), answers)
    assert (decision.route, decision.prefill) == (Route.REPLICA, None)
    assert not any(way.prefill for way in decision.candidates)


def test_a_turn_that_its_only_d_has_failed_goes_to_p() -> None:
    decision = run(LONG, (P1, D1), replace(rules(), prefills_answer=True), avoid=(D1.id,))
    assert (decision.route, decision.decode) == (Route.REPLICA, P1)
