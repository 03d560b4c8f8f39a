"""Two legs at once: the rules as a table, and what the tasks that run them leave behind."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import pytest

from ppd.proxy.upstream.two_legs import MOVES, LegsAction, LegsEvent, LegsState, TwoLegs

P_WELL, P_FAILS, D_BEGINS, D_FAILS, LEFT, CLOSED = LegsEvent
END_P, END_D, RAISE, TELL = LegsAction


@pytest.mark.parametrize(
    ("events", "state", "actions"),
    [
        ([P_WELL], LegsState.DECODE, []),
        ([P_WELL, D_BEGINS], LegsState.ANSWERED, []),
        ([P_WELL, D_FAILS], LegsState.OVER, [RAISE]),
        ([P_WELL, CLOSED], LegsState.OVER, [END_D]),
        ([P_FAILS], LegsState.OVER, [END_D, RAISE]),
        ([D_FAILS], LegsState.OVER, [END_P, RAISE]),
        ([D_BEGINS], LegsState.PREFILL, []),
        ([D_BEGINS, P_WELL], LegsState.ANSWERED, [TELL]),
        ([D_BEGINS, P_FAILS], LegsState.ANSWERED, [TELL]),
        ([D_BEGINS, CLOSED], LegsState.OVER, [END_P, TELL]),
        ([P_WELL, D_BEGINS, CLOSED, CLOSED], LegsState.OVER, []),
        ([CLOSED], LegsState.OVER, [END_P, END_D]),
        ([LEFT], LegsState.LEFT, []),
        ([LEFT, P_WELL], LegsState.OVER, [END_D]),
        ([LEFT, P_FAILS], LegsState.OVER, [END_D]),
        ([LEFT, D_BEGINS], LegsState.OVER, [END_P]),
        ([LEFT, D_FAILS], LegsState.OVER, [END_P]),
        ([LEFT, CLOSED], LegsState.OVER, [END_P, END_D]),
        ([P_WELL, LEFT], LegsState.OVER, [END_D]),
    ],
)
def test_what_follows_from_what_becomes_of_each_leg(
    events: list[LegsEvent], state: LegsState, actions: list[LegsAction]
) -> None:
    at, done = LegsState.BOTH, list[LegsAction]()
    for event in events:
        at, more = MOVES[at, event]
        done += more
    assert (at, done) == (state, actions)


def test_each_leg_ends_once_and_nothing_follows_the_end() -> None:
    over = {key for key in product(LegsState, LegsEvent) if key[0] is LegsState.OVER}
    assert MOVES.keys() & over == {(LegsState.OVER, CLOSED)}
    assert all((state, CLOSED) in MOVES for state in LegsState)
    for (state, event), (after, actions) in MOVES.items():
        ends_attempt = event in (P_FAILS, D_FAILS) and state not in (LegsState.PREFILL, LegsState.LEFT)
        assert (RAISE in actions) == ends_attempt
        assert after is LegsState.OVER or not {END_P, END_D} & set(actions)


@pytest.mark.parametrize(("decode_first", "begun"), [(False, ["P", "D"]), (True, ["D", "P"])])
async def test_d_begins_first_where_p_waits_for_it(decode_first: bool, begun: list[str]) -> None:
    seen = list[str]()

    async def run(name: str) -> str:
        seen.append(name)
        return name

    assert await TwoLegs(run("P"), run("D"), decode_first=decode_first).answer() == "D"
    assert seen == begun


class Legs:
    """Two legs that end as they are told, and note how."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.p, self.d = loop.create_future(), loop.create_future()
        self.ended: dict[str, str] = {}
        self.told: list[BaseException | None] = []
        self.both = TwoLegs(self._run("P", self.p), self._run("D", self.d))
        self.answer = asyncio.ensure_future(self._answer())

    async def _answer(self) -> str:
        answer = await self.both.answer()
        self.both.when_prefilled(self.told.append)
        return answer

    async def _run(self, name: str, what: asyncio.Future[str]) -> str:
        self.ended[name] = "open"
        try:
            result = await what
        except BaseException as exc:
            self.ended[name] = type(exc).__name__
            raise
        self.ended[name] = "well"
        return result


async def rounds() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("steps", "result", "ended", "told"),
    [
        ("p d", "answer", {"P": "well", "D": "well"}, 1),
        ("d p", "answer", {"P": "well", "D": "well"}, 1),
        ("pd", "answer", {"P": "well", "D": "well"}, 1),
        ("P", "P failed", {"P": "OSError", "D": "CancelledError"}, 0),
        ("D", "D failed", {"P": "CancelledError", "D": "OSError"}, 0),
        ("PD", "P failed", {"P": "OSError", "D": "OSError"}, 0),
        ("p D", "D failed", {"P": "well", "D": "OSError"}, 0),
        ("pD", "D failed", {"P": "well", "D": "OSError"}, 0),
        ("Pd", "answer", {"P": "OSError", "D": "well"}, 1),
        ("d P", "answer", {"P": "OSError", "D": "well"}, 1),
        ("x", "cancelled", {"P": "CancelledError", "D": "CancelledError"}, 0),
        ("p x", "cancelled", {"P": "well", "D": "CancelledError"}, 0),
        ("d c", "answer", {"P": "CancelledError", "D": "well"}, 1),
        ("d c c", "answer", {"P": "CancelledError", "D": "well"}, 1),
        ("p d c", "answer", {"P": "well", "D": "well"}, 1),
        ("l p", "cancelled", {"P": "well", "D": "CancelledError"}, 0),
        ("l P", "cancelled", {"P": "OSError", "D": "CancelledError"}, 0),
        ("l l p", "cancelled", {"P": "well", "D": "CancelledError"}, 0),
        ("lp", "cancelled", {"P": "well", "D": "CancelledError"}, 0),
        ("pl", "cancelled", {"P": "well", "D": "CancelledError"}, 0),
        ("p l", "cancelled", {"P": "well", "D": "CancelledError"}, 0),
        ("l x", "cancelled", {"P": "CancelledError", "D": "CancelledError"}, 0),
        ("l c", "cancelled", {"P": "CancelledError", "D": "CancelledError"}, 0),
        ("l d c", "answer", {"P": "CancelledError", "D": "well"}, 1),
        ("l D", "D failed", {"P": "CancelledError", "D": "OSError"}, 0),
        ("dl c", "answer", {"P": "CancelledError", "D": "well"}, 1),
        ("Dl", "D failed", {"P": "CancelledError", "D": "OSError"}, 0),
        ("d l c", "answer", {"P": "CancelledError", "D": "well"}, 1),
    ],
)
async def test_no_order_of_events_leaves_a_leg_open(steps: str, result: str, ended: dict[str, str], told: int) -> None:
    """p, d: it ends well; P, D: it fails; x: the client leaves; c: the answer is over; l: it is left.

    What has no space is at once.
    """
    legs = Legs()
    await rounds()
    acts: dict[str, Any] = {
        "p": lambda: legs.p.set_result("handoff"),
        "d": lambda: legs.d.set_result("answer"),
        "P": lambda: legs.p.set_exception(OSError("P failed")),
        "D": lambda: legs.d.set_exception(OSError("D failed")),
        "x": legs.answer.cancel,
        "c": legs.both.close,
        "l": legs.both.leave,
    }
    for step in steps.split():
        for each in step:
            acts[each]()
        await rounds()
    assert legs.ended == ended
    assert len(legs.told) == told
    assert len(asyncio.all_tasks()) == 1, "this test alone runs"
    assert legs.both.has_handed_over == ("well" in ended.values())
    if result == "cancelled":
        assert legs.answer.cancelled()
    elif result == "answer":
        assert legs.answer.result() == "answer"
    else:
        assert str(legs.answer.exception()) == result
