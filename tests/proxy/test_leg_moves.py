"""What becomes of the two legs of a SPLIT, as a table: every event in every state."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from ppd.proxy.leg_moves import BEGINNINGS, MOVES, LegOrder, Legs, LegsAction, LegsEvent, LegsState

HANDED_OVER, NOTHING, WHOLE, P_FAILED, BEGAN, D_FAILED, UNREACHED, LEFT, CLOSED = LegsEvent
ASK_P, ASK_D, COMPUTE, ANSWER, END_P, END_D, FAIL, MOVED, UNMOVED, NOTE_FAILED, ENDED = LegsAction
S = LegsState

OF_P, OF_D = {HANDED_OVER, NOTHING, WHOLE, P_FAILED}, {BEGAN, D_FAILED, UNREACHED}
NOTES = {MOVED, UNMOVED, NOTE_FAILED, ENDED}

# The legs that are awaited: P's end, and D's first event.
AWAITED = {
    S.PREFILL: "P",
    S.PULL: "D",
    S.BOTH: "PD",
    S.DECODE: "D",
    S.BESIDE: "P",
    S.ALONE: "D",
    S.ANSWERED: "",
    S.LEFT_PREFILL: "P",
    S.LEFT_PULL: "D",
    S.LEFT_BOTH: "PD",
    S.OVER: "",
    S.TAKEN: "",
    S.UNTAKEN: "",
}
GONE = {S.LEFT_PREFILL, S.LEFT_PULL, S.LEFT_BOTH}  # the client has, and it is not over
ENDS = {S.OVER, S.TAKEN, S.UNTAKEN}


def is_possible(state: LegsState, event: LegsEvent) -> bool:
    if event is UNREACHED:  # only where P keeps its KV for D does it matter whether D was sent its leg
        return state in (S.PULL, S.LEFT_PULL)
    if event in OF_P | OF_D:
        return ("P" if event in OF_P else "D") in AWAITED[state]
    if event is LEFT:
        return state not in GONE
    return state not in (S.PREFILL, S.PULL)  # a client that leaves there has LEFT


@pytest.mark.parametrize(("state", "event"), list(product(LegsState, LegsEvent)))
def test_what_can_happen_has_a_move_and_what_cannot_raises(state: LegsState, event: LegsEvent) -> None:
    legs = Legs(LegOrder.P_THEN_D)
    legs.state = state
    if not is_possible(state, event):
        with pytest.raises(KeyError):
            legs.take(event)
        assert legs.state is state
        return
    actions = legs.take(event)
    awaited = set(AWAITED[state])
    is_given_up = (state, event) == (S.LEFT_PULL, UNREACHED)
    if event in OF_P | OF_D and not is_given_up:
        awaited.remove("P" if event in OF_P else "D")
    for action, leg in ((END_P, "P"), (END_D, "D")):
        if action in actions:
            awaited.remove(leg)
    if ASK_D in actions or COMPUTE in actions:
        awaited.add("D")
    assert set(AWAITED[legs.state]) == awaited, "none is ended twice, forgotten, or awaited though never asked"
    fails = event in (P_FAILED, D_FAILED, UNREACHED) and state not in GONE | {S.BESIDE}
    assert (FAIL in actions) == fails, "nobody else waits for it, and an answer that has begun goes on"


@pytest.mark.parametrize("order", LegOrder)
def test_each_order_asks_its_legs(order: LegOrder) -> None:
    legs = Legs(order)
    asked = {LegOrder.P_THEN_D: (ASK_P,), LegOrder.TOGETHER: (ASK_P, ASK_D), LegOrder.D_FIRST: (ASK_D, ASK_P)}
    assert (legs.state, legs.asked_first) == BEGINNINGS[order]
    assert legs.asked_first == asked[order]
    assert len(AWAITED[legs.state]) == len(legs.asked_first)


@pytest.mark.parametrize(("state", "event"), list(product(sorted(ENDS), (LEFT, CLOSED))))
def test_what_is_over_stays_as_it_ended(state: LegsState, event: LegsEvent) -> None:
    legs = Legs(LegOrder.P_THEN_D)
    legs.state = state
    assert (legs.take(event), legs.state) == ((), state)


IN_TURN = {
    "P hands over, and D answers": ([HANDED_OVER, BEGAN], S.ANSWERED, [ASK_D, MOVED]),
    "the answer is at its end": ([HANDED_OVER, BEGAN, CLOSED, CLOSED], S.OVER, [ASK_D, MOVED]),
    "P hands nothing over: D computes": ([NOTHING, BEGAN], S.ANSWERED, [COMPUTE, UNMOVED]),
    "P's first token was the last one": ([WHOLE], S.ANSWERED, [ANSWER]),
    "P fails": ([P_FAILED], S.OVER, [FAIL]),
    "D fails with the handoff": ([HANDED_OVER, D_FAILED], S.OVER, [ASK_D, FAIL]),
    "D cannot be reached, so P keeps its KV": ([HANDED_OVER, UNREACHED], S.UNTAKEN, [ASK_D, FAIL]),
    "D fails alone": ([NOTHING, D_FAILED], S.OVER, [COMPUTE, FAIL]),
    "the client leaves while P computes": ([LEFT, CLOSED], S.OVER, [END_P]),
    "P announces its KV after the client has left": ([LEFT, HANDED_OVER, CLOSED], S.UNTAKEN, []),
    "P has nothing for the client that left": ([LEFT, NOTHING], S.OVER, []),
    "P has all of the answer for it": ([LEFT, WHOLE], S.OVER, []),
    "P fails after it has left": ([LEFT, P_FAILED], S.OVER, []),
    "it leaves as D takes the KV": ([HANDED_OVER, LEFT, CLOSED], S.TAKEN, [ASK_D, END_D]),
    "D begins after it has left": ([HANDED_OVER, LEFT, BEGAN, CLOSED], S.TAKEN, [ASK_D]),
    "it leaves while D is connected to": ([HANDED_OVER, LEFT, UNREACHED], S.UNTAKEN, [ASK_D, END_D]),
    "D fails after it has left": ([HANDED_OVER, LEFT, D_FAILED], S.OVER, [ASK_D]),
    "D cannot be reached, and it leaves": ([HANDED_OVER, UNREACHED, LEFT, CLOSED], S.UNTAKEN, [ASK_D, FAIL]),
    "all is closed while D computes alone": ([NOTHING, CLOSED], S.OVER, [COMPUTE, END_D]),
    "it leaves while D computes alone": ([NOTHING, LEFT, CLOSED], S.OVER, [COMPUTE, END_D]),
    "it leaves as D begins": ([HANDED_OVER, BEGAN, LEFT, CLOSED], S.TAKEN, [ASK_D, MOVED]),
}
AT_ONCE = {
    "P is done first": ([HANDED_OVER, BEGAN], S.ANSWERED, [MOVED]),
    "D begins first": ([BEGAN, HANDED_OVER], S.ANSWERED, [MOVED]),
    "P fails": ([P_FAILED], S.OVER, [END_D, FAIL]),
    "D fails": ([D_FAILED], S.OVER, [END_P, FAIL]),
    "D fails after P is done": ([HANDED_OVER, D_FAILED], S.OVER, [FAIL]),
    "D would wait for nothing, and computes": ([NOTHING, BEGAN], S.ANSWERED, [END_D, COMPUTE, UNMOVED]),
    "D fails alone": ([NOTHING, D_FAILED], S.OVER, [END_D, COMPUTE, FAIL]),
    "the client leaves between both legs of D": ([NOTHING, LEFT], S.OVER, [END_D, COMPUTE, END_D]),
    "P's first token was the last one": ([WHOLE], S.ANSWERED, [END_D, ANSWER]),
    "P has all of an answer that D has begun": ([BEGAN, WHOLE], S.ANSWERED, [UNMOVED]),
    "P has nothing for a D that has begun": ([BEGAN, NOTHING], S.ANSWERED, [UNMOVED]),
    "P fails beside the answer": ([BEGAN, P_FAILED], S.ANSWERED, [NOTE_FAILED]),
    "the answer ends before P": ([BEGAN, CLOSED], S.OVER, [END_P, ENDED]),
    "the client leaves": ([CLOSED], S.OVER, [END_P, END_D]),
    "it leaves after P is done": ([HANDED_OVER, CLOSED], S.OVER, [END_D]),
    "it leaves, and P goes on writing": ([LEFT, HANDED_OVER, CLOSED], S.TAKEN, [END_D]),
    "and then fails": ([LEFT, P_FAILED], S.OVER, [END_D]),
    "and then hands nothing over": ([LEFT, NOTHING], S.OVER, [END_D]),
    "and then has all of the answer": ([LEFT, WHOLE], S.OVER, [END_D]),
    "and D begins": ([LEFT, BEGAN, CLOSED], S.TAKEN, [END_P]),
    "and D fails": ([LEFT, D_FAILED], S.OVER, [END_P]),
    "and the proxy stops": ([LEFT, CLOSED], S.OVER, [END_P, END_D]),
    "it leaves after P has written": ([HANDED_OVER, LEFT, CLOSED], S.TAKEN, [END_D]),
    "it leaves as D begins": ([BEGAN, LEFT, CLOSED], S.TAKEN, [END_P, ENDED]),
    "it leaves as P fails": ([P_FAILED, LEFT, CLOSED], S.OVER, [END_D, FAIL]),
}
RUNS = [
    *(pytest.param(LegOrder.P_THEN_D, *run, id=f"P, then D: {name}") for name, run in IN_TURN.items()),
    *(pytest.param(LegOrder.TOGETHER, *run, id=f"both: {name}") for name, run in AT_ONCE.items()),
]


@pytest.mark.parametrize(("order", "events", "state", "actions"), RUNS)
def test_what_follows_from_what_becomes_of_each_leg(
    order: LegOrder, events: list[LegsEvent], state: LegsState, actions: list[LegsAction]
) -> None:
    legs, done = Legs(order), list[LegsAction]()
    for event in events:
        done += legs.take(event)
    assert (legs.state, done) == (state, actions)


@pytest.mark.parametrize(
    ("order", "first", "again"),
    [
        (LegOrder.TOGETHER, P_FAILED, D_FAILED),
        (LegOrder.TOGETHER, D_FAILED, P_FAILED),
        (LegOrder.TOGETHER, P_FAILED, P_FAILED),
        (LegOrder.P_THEN_D, P_FAILED, HANDED_OVER),
        (LegOrder.P_THEN_D, HANDED_OVER, P_FAILED),
    ],
)
def test_a_leg_ends_once_and_what_was_ended_says_nothing_more(
    order: LegOrder, first: LegsEvent, again: LegsEvent
) -> None:
    legs = Legs(order)
    legs.take(first)
    with pytest.raises(KeyError):
        legs.take(again)


@pytest.mark.parametrize("order", LegOrder)
def test_every_run_ends_with_one_outcome(order: LegOrder) -> None:
    """A failure, or an answer beside which P's leg is noted once; never both, and nothing after it is over."""
    rng, seen = Random(order.value), set[LegsState]()
    for _ in range(2000):
        legs, done = Legs(order), list[LegsAction]()
        while legs.state not in ENDS:
            seen.add(legs.state)
            done += legs.take(rng.choice(list(MOVES[legs.state])))
        seen.add(legs.state)
        outcomes = [action for action in done if action in NOTES | {FAIL, ANSWER}]
        assert len(outcomes) <= 1
        assert done.count(ASK_D) + done.count(COMPUTE) <= 1
    assert seen == (
        set(AWAITED) - {S.BOTH, S.DECODE, S.BESIDE, S.LEFT_BOTH}
        if order is LegOrder.P_THEN_D
        else set(AWAITED) - {S.PREFILL, S.PULL, S.LEFT_PREFILL}
    )
