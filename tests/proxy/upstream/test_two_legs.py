"""Two legs at once: what the tasks that run them leave behind, in every order of events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import pytest

from ppd.proxy.leg_moves import LegOrder, Legs, LegsAction, LegsEvent
from ppd.proxy.upstream.two_legs import TwoLegs

MOVED, UNMOVED, NOTE_FAILED, ENDED = (
    LegsAction.NOTE_MOVED,
    LegsAction.NOTE_UNMOVED,
    LegsAction.NOTE_FAILED,
    LegsAction.NOTE_ENDED,
)


@pytest.mark.parametrize(("order", "begun"), [(LegOrder.TOGETHER, ["P", "D"]), (LegOrder.D_FIRST, ["D", "P"])])
async def test_d_begins_first_where_p_waits_for_it(order: LegOrder, begun: list[str]) -> None:
    seen = list[str]()

    async def prefill() -> LegsEvent:
        seen.append("P")
        return LegsEvent.HANDED_OVER

    async def decode() -> str:
        seen.append("D")
        return "D"

    assert await TwoLegs(Legs(order), prefill(), decode()).answer() == "D"
    assert seen == begun


class Both:
    """Two legs that end as they are told, and note how."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.p: asyncio.Future[LegsEvent] = loop.create_future()
        self.d: asyncio.Future[str] = loop.create_future()
        self.ended: dict[str, str] = {}
        self.noted: list[LegsAction] = []
        self.complaints: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: self.complaints.append(context))
        self.legs = Legs(LegOrder.TOGETHER)
        self.both = TwoLegs(self.legs, self._run("P", self.p), self._run("D", self.d), self._note)
        self.answer = asyncio.ensure_future(self.both.answer())

    def _note(self, action: LegsAction, answer: str, error: BaseException | None) -> None:
        assert answer == "answer"
        assert (error is not None) == (action is NOTE_FAILED)
        self.noted.append(action)

    async def _run(self, name: str, what: asyncio.Future[Any]) -> Any:
        self.ended[name] = "open"
        try:
            result = await what
        except BaseException as exc:
            self.ended[name] = type(exc).__name__
            raise
        self.ended[name] = "well"
        return result

    def act(self, step: str) -> None:
        """What has come about already stays."""
        match step:
            case "p" | "n" | "w" if not self.p.done():
                events = {"p": LegsEvent.HANDED_OVER, "n": LegsEvent.NOTHING, "w": LegsEvent.WHOLE}
                self.p.set_result(events[step])
            case "P" if not self.p.done():
                self.p.set_exception(OSError("P failed"))
            case "d" if not self.d.done():
                self.d.set_result("answer")
            case "D" if not self.d.done():
                self.d.set_exception(OSError("D failed"))
            case "x":
                self.answer.cancel()
            case "c":
                self.both.close()
            case "u":
                self.both.close(is_unreached=True)
            case "l":
                try:
                    self.both.leave()
                except KeyError:  # a client leaves once
                    assert self.legs.state.startswith("left")

    async def play(self, steps: str) -> None:
        await rounds()
        for step in steps.split():
            for each in step:
                self.act(each)
            await rounds()

    def result(self) -> str:
        if not self.answer.done():
            return "awaited"
        if self.answer.cancelled():
            return "cancelled"
        error = self.answer.exception()
        return str(error) if error is not None else self.answer.result() or self.legs.state


async def rounds() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


CANCELLED, FAILED = "CancelledError", "OSError"


@pytest.mark.parametrize(
    ("steps", "result", "p", "d", "noted"),
    [
        ("p d", "answer", "well", "well", [MOVED]),
        ("d p", "answer", "well", "well", [MOVED]),
        ("pd", "answer", "well", "well", [MOVED]),
        ("P", "P failed", FAILED, CANCELLED, []),
        ("D", "D failed", CANCELLED, FAILED, []),
        ("PD", "P failed", FAILED, FAILED, []),
        ("DP", "P failed", FAILED, FAILED, []),
        ("p D", "D failed", "well", FAILED, []),
        ("pD", "D failed", "well", FAILED, []),
        ("Pd", "answer", FAILED, "well", [NOTE_FAILED]),
        ("d P", "answer", FAILED, "well", [NOTE_FAILED]),
        ("d P c", "answer", FAILED, "well", [NOTE_FAILED]),
        ("n", "alone", "well", CANCELLED, []),
        ("nD", "alone", "well", FAILED, []),
        ("nd", "answer", "well", "well", [UNMOVED]),
        ("d n", "answer", "well", "well", [UNMOVED]),
        ("w", "answered", "well", CANCELLED, []),
        ("wD", "answered", "well", FAILED, []),
        ("d w", "answer", "well", "well", [UNMOVED]),
        ("nl", "cancelled", "well", CANCELLED, []),
        ("nx", "cancelled", "well", CANCELLED, []),
        ("x", "cancelled", CANCELLED, CANCELLED, []),
        ("p x", "cancelled", "well", CANCELLED, []),
        ("d c", "answer", CANCELLED, "well", [ENDED]),
        ("d c c", "answer", CANCELLED, "well", [ENDED]),
        ("p d c", "answer", "well", "well", [MOVED]),
        ("l p c", "cancelled", "well", CANCELLED, []),
        ("l n", "cancelled", "well", CANCELLED, []),
        ("l P", "cancelled", FAILED, CANCELLED, []),
        ("lp c", "cancelled", "well", CANCELLED, []),
        ("pl c", "cancelled", "well", CANCELLED, []),
        ("p l c", "cancelled", "well", CANCELLED, []),
        ("l p d", "answer", "well", "well", []),
        ("p l d", "answer", "well", "well", []),
        ("p l D", "D failed", "well", FAILED, []),
        ("p l u", "cancelled", "well", CANCELLED, []),
        ("l p x", "cancelled", "well", CANCELLED, []),
        ("l x", "cancelled", CANCELLED, CANCELLED, []),
        ("l c", "cancelled", CANCELLED, CANCELLED, []),
        ("l d c", "answer", CANCELLED, "well", []),
        ("l D", "D failed", CANCELLED, FAILED, []),
        ("dl c", "answer", CANCELLED, "well", []),
        ("Dl", "D failed", CANCELLED, FAILED, []),
        ("d l c", "answer", CANCELLED, "well", [ENDED]),
    ],
)
async def test_no_order_of_events_leaves_a_leg_open(
    steps: str, result: str, p: str, d: str, noted: list[LegsAction]
) -> None:
    """p, d: it ends well; n, w: P hands nothing over, or has all of the answer; P, D: it fails.

    x: who awaits the answer is cancelled; c: the answer is over; l: it is left; u: D, not sent its leg, is given up.
    What has no space is at once.
    """
    run = Both()
    await run.play(steps)
    assert run.result() == result
    assert (run.ended, run.noted) == ({"P": p, "D": d}, noted)
    assert len(asyncio.all_tasks()) == 1, "this test alone runs"
    assert run.complaints == []


def plays(others: int) -> Iterator[str]:
    """Each end of P, each of D, and so much of what comes from without, in every order, at once or one by one."""
    for of_p, of_d, *more in product("pnwP", "dD", *[("", "x", "c", "l")] * others):
        for order in sorted(set(permutations(f"{of_p}{of_d}{''.join(more)}"))):
            for spaces in product(("", " "), repeat=len(order) - 1):
                yield "".join(map("".join, zip(order, (*spaces, ""), strict=True)))


@pytest.mark.parametrize("others", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_whatever_comes_at_once_ends_both_legs_and_counts_once(others: int) -> None:
    """As above, in all orders: nothing raises where nobody sees it, and no leg outlives the end."""
    for steps in dict.fromkeys(plays(others)):
        run = Both()
        await run.play(f"{steps} c")
        assert run.complaints == [], steps
        assert run.result() != "awaited", steps
        assert len(asyncio.all_tasks()) == 1, steps
        assert "open" not in run.ended.values(), steps
        assert len(run.noted) <= (run.result() == "answer" or "x" in steps), steps
