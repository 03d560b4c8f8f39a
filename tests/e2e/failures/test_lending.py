"""A session moves from a D or R that lends itself as P: the right text comes, whatever fails meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from ppd.proxy.config import Mode
from ppd.proxy.failures import Leg
from ppd.servers.sim.core.config import LoadFailurePolicy
from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, FaultPhase, Faults
from ppd.servers.sim.engine.engine import SimEngine
from tests.e2e.failures.fleet import HASTY, FaultFleet, Seen, Talk, order
from tests.support.fleet import crowded

HISTORY = "A long history that is dear to compute again. " * 300
LENDS: dict[str, Any] = {"mode": Mode.SLO, "profile": "h100-llama-3.1-8b", "moves_kv": True}
FAILED_LOAD = {"load_failure_policy": LoadFailurePolicy.FAIL}


@dataclass
class Moving:
    """A conversation whose worker, the `lender`, has too many streams for one more, and the `other` worker."""

    fleet: FaultFleet
    talk: Talk
    lender: str
    other: str

    @classmethod
    @asynccontextmanager
    async def on(cls, names: str = "D1 D2", *, stream: bool = True, **settings: Any) -> AsyncIterator[Moving]:
        async with FaultFleet.of(names, **{**LENDS, **settings}) as fleet:
            talk = Talk([{"role": "user", "content": HISTORY}])
            home, _ = await say(fleet, talk, stream)
            other = next(name for name in names.split() if name[0] != "P" and name != home)
            with crowded(fleet.proxy, fleet.worker(home)):
                yield cls(fleet, talk, home, other)
            for engine in fleet.engines.values():
                engine.faults = Faults()  # what hangs may end
            await fleet.until(fleet.at_rest)

    @property
    def engine(self) -> SimEngine:
        return self.fleet.engines[self.lender]

    @property
    def others_engine(self) -> SimEngine:
        return self.fleet.engines[self.other]

    def legs(self) -> list[tuple[Leg, str, str]]:
        return [(leg.kind, leg.worker, leg.error or "") for leg in self.fleet.newest().legs]


async def say(fleet: FaultFleet, talk: Talk, stream: bool = True) -> tuple[str, Seen]:
    """The next turn, whose text is right: who answered it."""
    body = talk.body(stream=stream)
    seen = await fleet.ask(body)
    assert seen.is_complete, seen
    assert seen.text == await fleet.right_text(body)
    talk.heard(seen.text, "And then?")
    return seen.headers["X-PPD-Decode"], seen


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("names", ["D1 D2", "R1 R2", "D1 R1", "P1 D1 D2"])
async def test_a_session_moves_and_is_at_home_where_it_was_answered(names: str, stream: bool) -> None:
    async with Moving.on(names, stream=stream) as it:
        fleet, counters = it.fleet, it.others_engine.counters
        computed = counters.local_compute_tokens
        home, seen = await say(fleet, it.talk, stream)
        assert (home, seen.headers["X-PPD-Route"]) == (it.other, "SPLIT")
        assert seen.headers["X-PPD-Prefill"] == it.lender
        assert it.legs() == [(Leg.PREFILL, it.lender, ""), (Leg.DECODE, it.other, "")]
        prompt = fleet.newest().prompt_tokens
        assert prompt is not None
        assert counters.external_kv_tokens >= prompt - it.others_engine.config.block_size
        assert counters.local_compute_tokens - computed <= 1, "the last token, for its logits"
        assert it.engine.counters.handoffs == 1 + (it.lender[0] == "P")
        fleet.proxy.state.laws.reset()  # these engines are far from their profile, and one turn taught it of each
        with crowded(fleet.proxy, fleet.worker(it.other)):  # both are: nothing is gained by moving back
            home, seen = await say(fleet, it.talk, stream)
        assert (home, seen.headers["X-PPD-Route"]) == (it.other, "REPLICA" if it.other[0] == "R" else "LOCAL")
        candidates = fleet.newest().candidates
        assert candidates is not None
        held = {name for by_name in candidates.held.values() for name in by_name}
        assert {it.lender, it.other} <= held, "the lender still holds what it computed"
    assert not fleet.outstanding()
    assert not fleet.pinned()


LEND, PULL, HEAD = FaultLeg.PREFILL, FaultLeg.DECODE, FaultPhase.HEAD
WHAT = {Leg.PREFILL: "lend", Leg.DECODE: "pull", Leg.LOCAL: "alone"}
Spoil = Callable[[Moving], None]


def lender(faults: Faults) -> Spoil:
    def spoil(it: Moving) -> None:
        it.engine.faults = faults

    return spoil


def other(faults: Faults) -> Spoil:
    def spoil(it: Moving) -> None:
        it.others_engine.faults = faults

    return spoil


def leap(it: Moving) -> None:
    """The handoff has become too old on its way."""
    it.fleet.uptime.leaps_s = [0.0, 30.0]


@pytest.mark.parametrize(
    ("spoil", "legs"),
    [
        pytest.param(lender(order(FaultKind.ERROR, LEND)), ["lend 5xx", "alone"], id="the lender fails"),
        pytest.param(lender(order(FaultKind.RESET, LEND, HEAD)), ["lend reset", "alone"], id="it ends the connection"),
        pytest.param(lender(order(FaultKind.ERROR, LEND, status=503)), ["lend overloaded", "alone"], id="it is full"),
        pytest.param(lender(order(FaultKind.HANG, LEND)), ["lend timeout", "alone"], id="it hangs"),
        pytest.param(lender(order(FaultKind.HANDOFF, LEND)), ["lend", "pull"], id="it has no connector"),
        pytest.param(
            other(order(FaultKind.ERROR, PULL, status=503)), ["lend", "pull overloaded", "alone"], id="D is full"
        ),
        pytest.param(other(order(FaultKind.ERROR, PULL)), ["lend", "pull 5xx", "alone"], id="D fails"),
        pytest.param(other(order(FaultKind.LOAD, PULL)), ["lend", "pull error_event", "alone"], id="the pull fails"),
        pytest.param(other(Faults(wedge=["*"])), ["lend", "pull timeout", "alone"], id="the pull hangs"),
        pytest.param(leap, ["lend", "pull stale_handoff", "alone"], id="the handoff is too old"),
    ],
)
async def test_a_move_that_fails_costs_time_but_no_turn(spoil: Spoil, legs: list[str]) -> None:
    async with Moving.on(engine=FAILED_LOAD, **HASTY) as it:
        spoil(it)
        await say(it.fleet, it.talk)
        assert [" ".join(filter(None, (WHAT[kind], why))) for kind, _, why in it.legs()] == legs


@pytest.mark.parametrize(
    ("names", "policy"), [("D1 D2", LoadFailurePolicy.RECOMPUTE), ("D1 D2 D3", LoadFailurePolicy.FAIL)]
)
async def test_a_lender_that_dies_before_its_kv_is_pulled_costs_a_prefill(
    names: str, policy: LoadFailurePolicy
) -> None:
    async with Moving.on(names, engine={"load_failure_policy": policy}, **HASTY) as it:
        for name in names.split():
            it.fleet.engines[name].faults = order(FaultKind.SLOW, PULL, delay_s=0.05)
        asking = asyncio.create_task(say(it.fleet, it.talk))
        await it.fleet.until(lambda: it.engine.pinned > 0)
        it.engine.kill()
        await asking
        assert it.legs()[0] == (Leg.PREFILL, it.lender, "")
        assert it.legs()[-1][1] != it.lender


@pytest.mark.parametrize("moment", ["the lender computes", "it has answered", "the other answers"])
async def test_a_client_that_leaves_a_move_leaves_nothing_behind(moment: str) -> None:
    async with Moving.on() as it:
        fleet, seen, lent = it.fleet, Seen(), it.engine.counters.handoffs
        if moment == "the lender computes":
            it.engine.faults = order(FaultKind.HANG, LEND)
        elif moment == "it has answered":
            it.others_engine.faults = order(FaultKind.HANG, PULL)
        asking = asyncio.create_task(fleet.ask(it.talk.body(stream=True, max_tokens=4000, ignore_eos=True), seen))
        whens: dict[str, Callable[[], bool]] = {
            "the lender computes": lambda: not it.engine.faults.orders[0].times,
            "it has answered": lambda: it.engine.counters.handoffs > lent,
            "the other answers": lambda: bool(seen.text) if seen.is_stream else False,
        }
        await fleet.until(whens[moment])
        asking.cancel()
        await asyncio.wait({asking})
        await fleet.until(lambda: not any(each.scheduler.sequences for each in fleet.engines.values()))
    fleet.end_leases()
    assert fleet.idle()
