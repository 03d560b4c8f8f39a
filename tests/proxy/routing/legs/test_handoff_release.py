"""Hand-overs whose client left, and handoffs whose D was never reached: who takes the KV off P's hands."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ppd.proxy.connectors.leg import Handoff
from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Phase
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.ledger import LegEstimates
from ppd.proxy.leg_moves import LegOrder, Legs, LegsEvent, LegsState
from ppd.proxy.openai.answer import AnswerObserver
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.routing.attempt import Attempt, OpenAnswer
from ppd.proxy.routing.legs.handoff_release import GRACE_S, HandoffRelease
from ppd.proxy.upstream.call import Call
from ppd.proxy.upstream.two_legs import TwoLegs
from tests.proxy.routing.legs.release_lab import Lab, tell, unreached
from tests.support.clock import LeapingTime, scenario
from tests.support.requests import parse

pytestmark = pytest.mark.slow


def opened() -> OpenAnswer:
    reply = ReplyKey(parse())
    return OpenAnswer("text/event-stream", b"", AnswerObserver(Endpoint.CHAT, reply), reply, None)


def asks_d(made: Attempt) -> Call:
    made.call = Call(made.decision.decode.worker, once=True)
    made.call.sent(asyncio.get_running_loop().time())
    return made.call


async def forever() -> None:
    await asyncio.Event().wait()


async def test_an_attempt_whose_client_stays_is_its_own_result(lab: Lab) -> None:
    made, result = lab.running(await lab.decode("D1")), opened()

    async def opening() -> OpenAnswer:
        return result

    assert await lab.proxy.handoff_release.shielded(opening(), made) is result
    assert (lab.closed, made.is_left) == ([], False)


async def test_a_failure_reaches_who_waits_for_it(lab: Lab) -> None:
    made, failure = lab.running(await lab.decode("D1")), LegError("", worker="", phase=Phase.SENT, cause=Cause.RESET)

    async def opening() -> OpenAnswer:
        raise failure

    with pytest.raises(LegError) as raised:
        await lab.proxy.handoff_release.shielded(opening(), made)
    assert raised.value is failure


async def test_a_p_that_computes_is_told_to_abort(lab: Lab) -> None:
    ended: list[bool] = []

    async def opening(made: Attempt) -> OpenAnswer:
        try:
            await forever()
        finally:
            ended.append(True)
        raise AssertionError

    d = await lab.decode("D1")
    await lab.leave(lab.running(d), opening)
    assert (ended, lab.closed, lab.asked["D1"]) == ([True], ["given back"], [])
    assert lab.fates() == {"aborted": 1}


async def test_a_p_that_answers_as_its_client_leaves_is_relieved_by_d(lab: Lab) -> None:
    async def opening(made: Attempt) -> OpenAnswer:
        await asyncio.sleep(0.02)  # P's answer is on the wire
        lab.announce(made)
        assert made.is_left, "so that D is not asked for the answer"
        raise asyncio.CancelledError

    d1, _ = await lab.decode("D1"), await lab.decode("D2")
    await lab.leave(lab.running(d1), opening)
    (body,) = lab.asked["D1"]
    assert body["kv_transfer_params"] == {"remote_request_id": "kv"}
    assert (body["max_tokens"], body["stream"]) == (1, False)
    assert lab.asked["D2"] == []
    assert (lab.outstanding(), lab.fates()) == (0, {"taken": 1})


async def test_a_d_that_computes_alone_is_ended_as_its_client_leaves(lab: Lab) -> None:
    """At once: it may begin to answer in the same round of the loop."""
    made, begins, ended = lab.running(await lab.decode("D1")), asyncio.Event(), list[str]()

    async def opening() -> OpenAnswer:
        tell(made, LegsEvent.NOTHING)
        try:
            await begins.wait()
        except asyncio.CancelledError:
            ended.append("told so")
            raise
        tell(made, LegsEvent.BEGAN)
        return opened()

    turn = asyncio.ensure_future(lab.proxy.handoff_release.shielded(opening(), made))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    turn.cancel()
    begins.set()
    await asyncio.wait({turn})
    await lab.wound_up()
    assert (ended, made.legs and made.legs.state, lab.closed) == (["told so"], LegsState.OVER, ["given back"])


async def test_what_p_has_sent_when_the_time_is_up_is_still_read(lab: Lab) -> None:
    async def opening(made: Attempt) -> OpenAnswer:
        await asyncio.sleep(GRACE_S)
        for _ in range(5):  # turns of the loop, from the socket to here
            await asyncio.sleep(0)
        lab.announce(made)
        raise asyncio.CancelledError

    await lab.leave(lab.running(await lab.decode("D1")), opening)
    assert (lab.outstanding(), lab.fates()) == (0, {"taken": 1})


async def test_an_answer_of_p_that_has_begun_is_read_to_its_end(lab: Lab) -> None:
    """With nothing reserved meanwhile."""
    d = await lab.decode("D1")
    made, registry = lab.running(d), lab.proxy.state.registry
    made.booking = LegBooking(registry, d.id, lab.p.id, LegEstimates(prompt_tokens=10, new_tokens=1))
    made.booking.reserve(0.0)
    inflight = list[int]()

    async def opening(made: Attempt) -> OpenAnswer:
        made.receipt.legs[-1].status = 200
        await asyncio.sleep(3 * GRACE_S)
        inflight.extend(view.inflight for view in registry.views())
        lab.announce(made)
        raise asyncio.CancelledError

    await lab.leave(made, opening)
    assert inflight == [0, 0]
    assert (lab.outstanding(), lab.fates()) == (0, {"taken": 1})


@pytest.mark.parametrize("status", [None, 500], ids=["no head", "an error"])
async def test_what_announces_no_handoff_is_not_waited_for(lab: Lab, status: int | None) -> None:
    async def opening(made: Attempt) -> OpenAnswer:
        made.receipt.legs[-1].status = status
        await asyncio.sleep(3 * GRACE_S)
        lab.announce(made)
        raise AssertionError

    await lab.leave(lab.running(await lab.decode("D1")), opening)
    assert lab.fates() == {"aborted": 1}


async def test_an_answer_of_p_that_does_not_end_is_given_up(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppd.proxy.routing.legs.handoff_release.READ_ON_S", 0.01)

    async def opening(made: Attempt) -> OpenAnswer:
        made.receipt.legs[-1].status = 200
        await forever()
        raise AssertionError

    await lab.leave(lab.running(await lab.decode("D1")), opening)
    assert (lab.fates(), lab.closed) == ({"aborted": 1}, ["given back"])


async def test_a_d_that_has_read_its_leg_is_ended_and_has_the_kv(lab: Lab) -> None:
    async def opening(made: Attempt) -> OpenAnswer:
        lab.announce(made)
        asks_d(made).has_arrived = True
        await forever()
        raise AssertionError

    await lab.leave(lab.running(await lab.decode("D1")), opening)
    assert (lab.outstanding(), lab.fates(), lab.closed) == (0, {"taken": 1}, ["given back"])
    assert lab.asked["D1"] == []


async def test_an_answer_that_began_as_the_client_left_is_closed_and_its_d_has_the_prompt(lab: Lab) -> None:
    made, told = lab.running(await lab.decode("D1")), list[str]()
    made.touches = cast(Any, SimpleNamespace(answering=lambda: told.append("answering")))

    async def opening(made: Attempt) -> OpenAnswer:
        lab.announce(made)
        asks_d(made)
        tell(made, LegsEvent.BEGAN)
        return opened()

    await lab.leave(made, opening)
    assert (lab.outstanding(), lab.fates(), lab.closed) == (0, {"taken": 1}, ["given back"])
    assert told == ["answering"]


async def test_a_d_that_fails_as_the_client_leaves_may_have_the_kv_or_not(lab: Lab) -> None:
    async def opening(made: Attempt) -> OpenAnswer:
        lab.announce(made)
        asks_d(made)
        await asyncio.sleep(0.01)
        tell(made, LegsEvent.DECODE_FAILED)
        raise LegError("", worker="", phase=Phase.SENT, cause=Cause.RESET)

    await lab.decode("D2")
    await lab.leave(lab.running(await lab.decode("D1")), opening)
    assert (lab.outstanding(), lab.fates(), lab.asked["D2"]) == (1, {"left": 1}, []), "nobody uses it a second time"


@pytest.mark.parametrize(
    ("fails", "ds", "asked"),
    [
        pytest.param(True, "D1 D2", [0, 1], id="refused"),
        pytest.param(True, "D1", [0], id="refused, and there is no other"),
        pytest.param(False, "D1 D2", [0, 1], id="connecting"),
        pytest.param(False, "D1", [1], id="connecting, and there is no other"),
    ],
)
async def test_a_d_that_cannot_be_reached_leaves_the_kv_to_another(
    lab: Lab, fails: bool, ds: str, asked: list[int]
) -> None:
    """One that is slow to let the proxy in, as in a TLS handshake, may still be reached."""

    async def opening(made: Attempt) -> OpenAnswer:
        lab.announce(made)
        if not fails:
            made.call = Call(made.decision.decode.worker)
            await forever()
        exc = unreached(made)
        tell(made, LegsEvent.UNREACHED)
        raise exc

    d1, *_ = [await lab.decode(name) for name in ds.split()]
    made = lab.running(d1)
    turn = asyncio.ensure_future(lab.proxy.handoff_release.shielded(opening(made), made))
    await asyncio.sleep(0)
    turn.cancel()
    await asyncio.wait({turn})
    await lab.wound_up()
    assert [len(lab.asked[name]) for name in ds.split()] == asked
    fate = "taken" if any(asked) else "left"
    assert (lab.outstanding(), lab.fates()) == (fate == "left", {fate: 1})


class AtOnce:
    """P and D of one attempt, asked at once: P's leg ends after `p_s`, and D's first event comes after `d_s`.

    head_s: when something comes that shows that D has read its leg.
    """

    def __init__(self, lab: Lab, made: Attempt, p_s: float, d_s: float, head_s: float = math.inf) -> None:
        made.legs, made.handoff = Legs(LegOrder.TOGETHER), Handoff({}, 10, None)
        lab.proxy.state.handoffs.open(made.attempt_id, lab.proxy.state.now())
        made.both = TwoLegs(made.legs, self._prefill(p_s), self._decode(d_s))
        self.lab, self.made, self.fate_of_d = lab, made, ""
        if head_s < math.inf:
            asyncio.get_running_loop().call_later(head_s, self._heard)

    def _heard(self) -> None:
        if self.made.call is not None:
            self.made.call.has_arrived = True

    async def _prefill(self, after_s: float) -> LegsEvent:
        await asyncio.sleep(after_s)
        return LegsEvent.HANDED_OVER

    async def _decode(self, after_s: float) -> OpenAnswer:
        try:
            await asyncio.sleep(after_s)
        except asyncio.CancelledError:
            self.fate_of_d = "ended"
            raise
        self.fate_of_d = "began"
        return opened()

    async def leave(self, after_s: float) -> None:
        async def opening(made: Attempt) -> OpenAnswer:
            assert made.both is not None
            return cast(OpenAnswer, await made.both.answer())

        await self.lab.leave(self.made, opening, after_s=after_s)


@dataclass(frozen=True)
class LegOnD:
    """How D takes its leg, as of `AtOnce`, and what becomes of it and of P's KV."""

    begins_s: float
    fate: str
    head_s: float = math.inf
    stream: bool = True
    is_asked: bool = True
    kv: str = "taken"


LEGS_ON_D = {
    "D begins in time": LegOnD(GRACE_S / 2, "began"),
    "D has read it": LegOnD(3 * GRACE_S, "ended", head_s=0.0),
    "D reads it late": LegOnD(5 * GRACE_S, "began"),
    "D reads it late, and computes": LegOnD(15 * GRACE_S, "ended", head_s=3 * GRACE_S),
    "D is not heard of": LegOnD(15 * GRACE_S, "ended"),
    "D reads it late, and its answer is no stream": LegOnD(3 * GRACE_S, "began", stream=False),
    "D is not heard of, and its answer is no stream": LegOnD(5.5 * GRACE_S, "ended", stream=False),
    "D is not reached": LegOnD(3 * GRACE_S, "ended", is_asked=False, kv="left"),
}


@pytest.mark.parametrize("leaves_s", [0.0, 0.015], ids=["while P computes", "once P is done"])
@pytest.mark.parametrize("leg", LEGS_ON_D.values(), ids=LEGS_ON_D)
async def test_once_p_is_done_a_d_gets_time_to_take_what_p_holds(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, leaves_s: float, leg: LegOnD
) -> None:
    """Of a D that was asked at the same time, and whose engine may not know the request yet."""
    monkeypatch.setattr("ppd.proxy.routing.legs.handoff_release.READ_ON_S", 6 * GRACE_S)
    monkeypatch.setattr("ppd.proxy.routing.attempt.READ_BY_S", 4 * GRACE_S)
    made = lab.running(await lab.decode("D1"), lab.join("P2", "p:2", connector="mooncake"))
    made.request = replace(made.request, stream=leg.stream)
    made.receipt.legs[-1].status = 200  # P's, which has answered
    if leg.is_asked:
        asks_d(made)
    at_once = AtOnce(lab, made, 0.01, leg.begins_s, leg.head_s)
    await at_once.leave(leaves_s)
    assert (at_once.fate_of_d, lab.fates(), lab.closed) == (leg.fate, {leg.kv: 1}, ["given back"])


async def test_closing_waits_for_as_long_as_it_may(lab: Lab) -> None:
    made = lab.running(await lab.decode("D1"))
    asks_d(made)
    at_once = AtOnce(lab, made, 29.5, 60.0)
    leaving = asyncio.create_task(at_once.leave(0.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(lab.proxy.handoff_release.close(30.0))
    await LeapingTime.of(asyncio.get_running_loop()).leap_over(29.0)
    assert not closing.done() and not lab.closed
    await closing
    await leaving
    assert made.legs is not None and made.legs.state is LegsState.TAKEN


async def test_closing_waits_for_what_is_under_way_and_ends_it(lab: Lab) -> None:
    async def opening() -> OpenAnswer:
        await forever()
        raise AssertionError

    made = lab.running(await lab.decode("D1"))
    turn = asyncio.ensure_future(lab.proxy.handoff_release.shielded(opening(), made))
    await asyncio.sleep(0)
    turn.cancel()
    await asyncio.wait({turn})
    async with asyncio.timeout(60):
        await lab.proxy.handoff_release.close()
    assert lab.closed == ["given back"]


@pytest.mark.parametrize(("lasts_s", "limit_s", "ends"), [(0.5, 0.0, True), (5.0, 0.0, False), (5.0, 10.0, True)])
def test_what_is_under_way_gets_its_time_when_all_ends(lasts_s: float, limit_s: float, ends: bool) -> None:
    """And no more: what never ends must not keep the process."""
    ended = list[bool]()

    @scenario
    async def work() -> None:
        names = ("registry", "handoffs", "health", "admission", "metrics", "now")
        release = HandoffRelease(cast(Any, SimpleNamespace(**dict.fromkeys(names))), cast(Any, None))

        async def take() -> None:
            await asyncio.sleep(lasts_s)
            ended.append(True)

        release._own(take())
        await asyncio.sleep(0)
        await release.close(limit_s)
        assert not release._tasks

    work()
    assert bool(ended) == ends
