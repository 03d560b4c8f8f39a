"""Hand-overs whose client left, and handoffs whose D was never reached: who takes the KV off P's hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ppd.proxy.assembly import Proxy, assemble
from ppd.proxy.config import ProxyConfig
from ppd.proxy.connectors.leg import Handoff
from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Leg, Phase
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.ledger import LegEstimates
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.leg_moves import LegOrder, Legs, LegsEvent
from ppd.proxy.openai.answer import AnswerObserver
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.routing.attempt import Attempt, OpenAnswer
from ppd.proxy.routing.split.handoff_release import GRACE_S
from ppd.proxy.settings import Settings
from ppd.proxy.upstream.call import Call, Expiry
from tests.support.attempts import decision, running
from tests.support.requests import parse

pytestmark = pytest.mark.slow

Opening = Callable[[Attempt], Awaitable[OpenAnswer]]


class Lab:
    """A proxy's parts without its server, a P that is only a name, and Ds that write down what they are asked."""

    def __init__(self, proxy: Proxy, stack: AsyncExitStack) -> None:
        self.proxy = proxy
        self.asked: dict[str, list[dict[str, Any]]] = {}
        self.closed: list[str] = []
        self._stack = stack
        self.p = self.join("P1", "p:1")

    def join(self, name: str, address: str, connector: str = "nixl", **changes: Any) -> WorkerView:
        registry = self.proxy.state.registry
        worker = Worker(
            role=Role(name[0]),
            address=address,
            models=("m",),
            connector=connector,
            has_sidecar=bool(changes.get("has_sidecar")),
        )
        registry.add_static(worker, 0.0)
        registry.probed(worker.id, worker, None, 0.0)
        registry.hold_back(worker.id, bool(changes.get("draining")))
        view = registry.view(worker.id)
        assert view is not None
        return view

    async def decode(self, name: str, *, status: int = 200, **changes: Any) -> WorkerView:
        asked = self.asked[name] = []

        async def answer(request: web.Request) -> web.Response:
            asked.append(await request.json())
            return web.json_response({}, status=status)

        app = web.Application()
        app.router.add_post("/{path:.*}", answer)
        server = await self._stack.enter_async_context(TestServer(app))
        return self.join(name, f"127.0.0.1:{server.port}", **changes)

    def running(self, decode: WorkerView, prefill: WorkerView | None = None) -> Attempt:
        made = running(decision(Leg.DECODE, prefill or self.p, decode), Leg.PREFILL)
        made.legs = Legs(LegOrder.P_THEN_D)
        made.on_close = lambda _: self.closed.append("given back")
        return made

    def announce(self, made: Attempt) -> None:
        """P has answered."""
        tell(made, LegsEvent.HANDED_OVER)
        made.handoff = Handoff({"remote_request_id": "kv"}, 10, None)
        self.proxy.state.ledger.open(made.attempt_id, self.proxy.state.now())

    def outstanding(self) -> int:
        return self.proxy.state.ledger.outstanding(self.proxy.state.now())

    async def leave(self, made: Attempt, opening: Opening, *, after_s: float = 0.0) -> None:
        """The client leaves while the attempt is under way; then all is wound up."""
        turn = asyncio.ensure_future(self.proxy.handoff_release.shielded(opening(made), made))  # type: ignore[arg-type]
        await asyncio.sleep(after_s)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        await self.wound_up()

    async def wound_up(self) -> None:
        await self.proxy.handoff_release.close()

    def fates(self) -> dict[str, float]:
        samples = (sample for metric in self.proxy.state.metrics.abandoned.collect() for sample in metric.samples)
        return {sample.labels["fate"]: sample.value for sample in samples if sample.name.endswith("_total")}


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    proxy = assemble(Settings(ProxyConfig(heartbeat_port=0)))
    async with AsyncExitStack() as stack:
        yield Lab(proxy, stack)
        await proxy.handoff_release.close()
        await proxy.upstream.close()
        proxy.listener.close()


def opened() -> OpenAnswer:
    reply = ReplyKey(parse())
    return OpenAnswer("text/event-stream", b"", AnswerObserver(Endpoint.CHAT, reply), reply, None)


def tell(made: Attempt, event: LegsEvent) -> None:
    assert made.legs is not None
    made.legs.take(event)


def asks_d(made: Attempt) -> None:
    made.call = Call(made.decision.decode.worker)
    made.call.phase = Phase.SENT


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
    monkeypatch.setattr("ppd.proxy.routing.split.handoff_release.READ_ON_S", 0.01)

    async def opening(made: Attempt) -> OpenAnswer:
        made.receipt.legs[-1].status = 200
        await forever()
        raise AssertionError

    await lab.leave(lab.running(await lab.decode("D1")), opening)
    assert (lab.fates(), lab.closed) == ({"aborted": 1}, ["given back"])


async def test_a_d_that_was_just_asked_is_ended_and_has_the_kv(lab: Lab) -> None:
    async def opening(made: Attempt) -> OpenAnswer:
        lab.announce(made)
        asks_d(made)
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


@pytest.mark.parametrize("fails", [True, False], ids=["refused", "connecting"])
async def test_a_d_that_cannot_be_reached_leaves_the_kv_to_another(lab: Lab, fails: bool) -> None:
    async def opening(made: Attempt) -> OpenAnswer:
        lab.announce(made)
        made.call = Call(made.decision.decode.worker)
        if not fails:
            await forever()
        tell(made, LegsEvent.UNREACHED)
        raise LegError("", worker="", phase=Phase.CONNECT, cause=Cause.REFUSED)

    d1, _ = await lab.decode("D1"), await lab.decode("D2")
    made = lab.running(d1)
    turn = asyncio.ensure_future(lab.proxy.handoff_release.shielded(opening(made), made))
    await asyncio.sleep(0)
    turn.cancel()
    await asyncio.wait({turn})
    await lab.wound_up()
    assert [len(lab.asked[name]) for name in ("D1", "D2")] == [0, 1]
    assert (lab.outstanding(), lab.fates()) == (0, {"taken": 1})


async def released(lab: Lab, made: Attempt) -> int:
    lab.announce(made)
    made.call = Call(made.decision.decode.worker)
    lab.proxy.handoff_release.release(made)
    await lab.wound_up()
    return lab.outstanding()


async def test_a_handoff_is_released_to_the_least_loaded_d(lab: Lab) -> None:
    d1, d2, _ = await lab.decode("D1"), await lab.decode("D2"), await lab.decode("D3")
    lab.proxy.state.registry.reserve(d2.id, 0)
    assert await released(lab, lab.running(d1)) == 0
    assert [len(lab.asked[name]) for name in ("D1", "D2", "D3")] == [0, 0, 1]
    assert all(view.inflight == (view.id == d2.id) for view in lab.proxy.state.registry.views())


async def test_a_handoff_that_is_too_old_is_left_to_its_lease(lab: Lab) -> None:
    """A D that reads blocks of others keeps them in its cache as those of this prompt."""
    d1, _ = await lab.decode("D1"), await lab.decode("D2")
    made = lab.running(d1)
    made.expiry = Expiry.of(lab.proxy.upstream.uptime() - 20.0, 20.0)
    assert await released(lab, made) == 1
    assert lab.asked["D2"] == []


@pytest.mark.parametrize(
    ("lender", "own", "other", "taken"),
    [("D1", "D2", "D3", True), ("D1", "D2", "R1", False), ("D1", "R1", "R2", True), ("R1", "R2", "D1", True)],
)
async def test_what_a_lender_pins_is_released_by_another(
    lab: Lab, lender: str, own: str, other: str, taken: bool
) -> None:
    """An R that no turn has proved to pull is not asked, nor ever the lender itself."""
    first, second, _ = [await lab.decode(name) for name in (lender, own, other)]
    assert await released(lab, lab.running(second, first)) == (not taken)
    assert [len(lab.asked[name]) for name in (lender, own, other)] == [0, 0, int(taken)]


@pytest.mark.parametrize(
    "other",
    [{"draining": True}, {"connector": "p2p_nccl"}, {"status": 500}, {"has_sidecar": True}],
    ids=["draining", "unlike", "failing", "behind a sidecar"],
)
async def test_a_handoff_that_no_d_takes_waits_for_its_lease(lab: Lab, other: dict[str, Any]) -> None:
    d1 = await lab.decode("D1")
    await lab.decode("D2", **other)
    assert await released(lab, lab.running(d1)) == 1


async def test_a_d_that_is_gone_keeps_no_handoff_from_waiting_for_its_lease(lab: Lab) -> None:
    d1 = await lab.decode("D1")
    lab.join("D2", "127.0.0.1:1")
    assert await released(lab, lab.running(d1)) == 1
    assert not any(view.inflight for view in lab.proxy.state.registry.views())


async def test_a_connector_that_pins_nothing_has_nothing_to_release(lab: Lab) -> None:
    p, d1 = lab.join("P2", "p:2", connector="none"), await lab.decode("D1", connector="none")
    await lab.decode("D2", connector="none")
    made = lab.running(d1, p)
    made.handoff = Handoff({}, 10, None)
    made.call = Call(d1.worker)
    lab.proxy.handoff_release.release(made)
    await lab.wound_up()
    assert lab.asked["D2"] == []


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
