"""A P that answers turns alone, beside the prompts that it computes for others: the right text, whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ppd.proxy.config import Mode
from ppd.proxy.failures import Leg
from ppd.proxy.policy import Route
from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, FaultPhase, Faults, Order
from tests.e2e.failures.fleet import HASTY, FaultFleet, Seen, Talk
from tests.support.fleet import crowded

HISTORY = "A long history that is dear to compute again. " * 300
ANSWERS: dict[str, Any] = {"mode": Mode.SLO, "profile": "h100-llama-3.1-8b", "prefills_answer": True}
PLAIN = FaultLeg.PLAIN


@asynccontextmanager
async def without_room(**settings: Any) -> AsyncIterator[FaultFleet]:
    """One P and one D, which has too many streams for one more."""
    async with FaultFleet.of("P1 D1", **{**ANSWERS, **settings}) as fleet:
        with crowded(fleet.proxy, fleet.worker("D1")):
            yield fleet
        fleet.engines["P1"].faults = Faults()  # what hangs may end
        await fleet.until(fleet.at_rest)
    assert not fleet.outstanding()
    assert not fleet.pinned(), "P keeps for nobody what it answers itself"


async def say(fleet: FaultFleet, talk: Talk, **changes: Any) -> tuple[str, str]:
    """The next turn, whose text is right: its route and who answered it."""
    body = talk.body(**changes)
    seen = await fleet.ask(body)
    assert seen.is_complete, seen
    assert seen.text == await fleet.right_text(body)
    talk.heard(seen.text, "And then?")
    return seen.headers["X-PPD-Route"], seen.headers["X-PPD-Decode"]


def talk() -> Talk:
    return Talk([{"role": "user", "content": HISTORY}])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_session_that_p_answers_is_at_home_there_and_can_leave(stream: bool) -> None:
    async with FaultFleet.of("P1 D1", **ANSWERS) as fleet:
        one, counters = talk(), fleet.engines["P1"].counters
        with crowded(fleet.proxy, fleet.worker("D1")):
            assert await say(fleet, one, stream=stream) == ("REPLICA", "P1")
            computed = counters.local_compute_tokens
        # D has room again, and P what D would have to get.
        assert await say(fleet, one, stream=stream) == ("REPLICA", "P1")
        assert counters.local_compute_tokens - computed < 100, "its KV is in P's cache"
        assert fleet.newest().candidates is not None
        with crowded(fleet.proxy, fleet.worker("P1")):
            route, worker = await say(fleet, one, stream=stream)
        assert worker == "D1"
        assert (route, fleet.engines["P1"].counters.handoffs) in (("SPLIT", 1), ("LOCAL", 0))
        await fleet.until(fleet.at_rest)
    assert not fleet.outstanding()


async def test_p_answers_and_computes_for_others_at_once() -> None:
    async with FaultFleet.of("P1 D1", **ANSWERS) as fleet:
        with crowded(fleet.proxy, fleet.worker("D1")):
            fleet.engines["P1"].faults = Faults([Order(FaultKind.SLOW, leg=PLAIN, delay_s=0.05)])
            streaming = asyncio.create_task(say(fleet, talk(), stream=True))
            await fleet.until(lambda: fleet.view("P1").decoding == 1)
            other = Talk([{"role": "user", "content": f"Another. {HISTORY}"}])
            body = other.body(stream=True)
            seen = await fleet.ask(body, forced=Route.SPLIT)
            assert (seen.headers["X-PPD-Route"], seen.text) == ("SPLIT", await fleet.right_text(body))
            assert await streaming == ("REPLICA", "P1")
        await fleet.until(fleet.at_rest)


@pytest.mark.parametrize(
    ("kind", "phase", "rest"),
    [
        (FaultKind.ERROR, FaultPhase.REQUEST, {}),
        (FaultKind.ERROR, FaultPhase.REQUEST, {"status": 503}),
        (FaultKind.RESET, FaultPhase.HEAD, {}),
        (FaultKind.KILL, FaultPhase.REQUEST, {}),
    ],
)
async def test_where_p_cannot_answer_another_one_does(kind: FaultKind, phase: FaultPhase, rest: Any) -> None:
    async with without_room(**HASTY) as fleet:
        fleet.engines["P1"].faults = Faults([Order(kind, leg=PLAIN, phase=phase, **rest)])
        route, worker = await say(fleet, talk())
        assert worker == "D1"
        first, *others = fleet.newest().legs
        assert (first.kind, first.worker, bool(first.error)) == (Leg.REPLICA, "P1", True)
        assert others
        assert all(leg.error is None for leg in others), route


async def test_a_p_that_breaks_its_answers_is_avoided_though_its_prompts_are_well() -> None:
    """Two failures in a row open a breaker, and a prompt between them proves nothing."""
    async with without_room() as fleet:
        fleet.engines["P1"].faults = Faults(
            [Order(FaultKind.BODY, leg=PLAIN, phase=FaultPhase.EVENTS, after_events=2, times=9, body="data: {\n\n")]
        )
        for number in range(2):
            seen = await fleet.ask(Talk([{"role": "user", "content": f"{number} {HISTORY}"}]).body(stream=True))
            assert (seen.headers["X-PPD-Decode"], seen.is_complete) == ("P1", False)
            body = Talk([{"role": "user", "content": f"{number} between. {HISTORY}"}]).body(stream=True)
            seen = await fleet.ask(body, forced=Route.SPLIT)
            assert seen.is_complete
        assert await say(fleet, talk(), stream=True) == ("LOCAL", "D1")


@pytest.mark.parametrize("moment", ["it computes", "it answers"])
async def test_a_client_that_leaves_leaves_nothing_on_p(moment: str) -> None:
    async with without_room() as fleet:
        if moment == "it computes":
            fleet.engines["P1"].faults = Faults([Order(FaultKind.HANG, leg=PLAIN)])
        seen, engine = Seen(), fleet.engines["P1"]
        asking = asyncio.create_task(fleet.ask(talk().body(stream=True, max_tokens=4000, ignore_eos=True), seen))
        whens: dict[str, Callable[[], bool]] = {
            "it computes": lambda: not engine.faults.orders[0].times,
            "it answers": lambda: bool(seen.text) if seen.is_stream else False,
        }
        await fleet.until(whens[moment])
        asking.cancel()
        await asyncio.wait({asking})
        await fleet.until(lambda: not any(each.scheduler.sequences for each in fleet.engines.values()))
