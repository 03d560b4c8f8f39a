"""A P that answers turns alone, beside the prompts that it computes for others: the right text, whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ppd.proxy.admission.gate import Permit
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
        await fleet.until(lambda: fleet.newest().outcome == "cancelled")
        assert [(leg.kind, leg.worker) for leg in fleet.newest().legs] == [(Leg.REPLICA, "P1")]


@pytest.mark.parametrize("mode", [Mode.SLO, Mode.ALWAYS_SPLIT])
async def test_while_no_d_has_a_place_p_answers_and_responses_wait(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    async def again(*_: object, **__: object) -> None:
        pytest.fail("a turn that finds no worker must not be let in, again and again")

    monkeypatch.setattr(Permit, "wait_again", again)
    async with FaultFleet.of(
        "P1 D1", **{**ANSWERS, "mode": mode}, max_worker_inflight=1, queue_timeout_s=60.0
    ) as fleet:
        fleet.engines["D1"].faults = Faults([Order(FaultKind.HANG, leg=PLAIN)])
        # One engine has to compute it: P has no part in it.
        blocking = asyncio.create_task(fleet.ask(Talk([{"role": "user", "content": "I hang"}]).body(n=2)))
        await fleet.until(lambda: not fleet.engines["D1"].faults.orders[0].times)
        one = talk()
        assert await say(fleet, one, stream=True) == ("REPLICA", "P1")
        assert await say(fleet, one) == ("REPLICA", "P1")
        response = {"model": "sim", "input": "hello", "max_output_tokens": 3}
        waiting = asyncio.create_task(fleet.session.post(f"{fleet.base_url}/v1/responses", json=response))
        await fleet.until(lambda: fleet.proxy.state.admission.waiting == 1)
        assert await say(fleet, one) == ("REPLICA", "P1")
        assert fleet.proxy.state.admission.waiting == 1, "nor does it keep others from P"
        blocking.cancel()
        answer = await waiting
        assert (answer.status, answer.headers["X-PPD-Decode"]) == (200, "D1")
        route, worker = await say(fleet, one, stream=True)
        assert worker in ("D1", "P1"), route
        await fleet.until(fleet.at_rest)
    assert not fleet.outstanding()


@pytest.mark.parametrize("mode", [Mode.SLO, Mode.ALWAYS_LOCAL, Mode.TABLE])
async def test_while_every_d_is_down_p_answers_until_another_comes(mode: Mode) -> None:
    async with FaultFleet.of("P1 D1", **{**ANSWERS, "mode": mode}) as fleet:
        one = talk()
        with crowded(fleet.proxy, fleet.worker("P1")):
            assert (await say(fleet, one, stream=True))[1] == "D1"
        fleet.engines["D1"].kill()
        assert await say(fleet, one, stream=True) == ("REPLICA", "P1")
        fleet.proxy.prober.nudge()
        await fleet.until(lambda: not fleet.view("D1").up)
        assert await say(fleet, one) == ("REPLICA", "P1")
        async with fleet.session.get(f"{fleet.base_url}/ready") as answer:
            told = await answer.json()
            assert (answer.status, told["local"], told["replica"]) == (200, False, True)
        await fleet.add("D2")
        with crowded(fleet.proxy, fleet.worker("P1")):  # in mode slo the session would stay where its KV is
            assert (await say(fleet, one, stream=True))[1] == "D2"
