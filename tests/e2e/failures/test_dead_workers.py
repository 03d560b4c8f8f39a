"""What clients notice of workers that die, hang, are busy, or come back without their caches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ppd.proxy.config import Mode, ProxyConfig
from ppd.proxy.failures import Leg, Phase, ResidencyEffect
from ppd.proxy.policy import Route
from ppd.servers.sim.core.fault_orders import FaultKind, FaultPhase, Faults, Order
from tests.e2e.failures.faults import PROVOCATIONS, Case, Provocation, Strike
from tests.e2e.failures.fleet import HASTY, PATIENT, FaultFleet, Seen, Talk

WORDS = "Some words, so that there are blocks to move. " * 3


def talk(number: int = 0) -> Talk:
    return Talk([{"role": "user", "content": f"{number} {WORDS}"}])


async def turns(field: FaultFleet, talks: list[Talk], **body: Any) -> None:
    """One turn of each, all at once, and each as it should be."""
    bodies = [each.body(**body) for each in talks]
    answers = await asyncio.gather(*(field.ask(each) for each in bodies))
    for each, asked, seen in zip(talks, bodies, answers, strict=True):
        assert (seen.is_complete, seen.text) == (True, await field.right_text(asked))
        each.heard(seen.text, WORDS)


@pytest.mark.parametrize("name", ["P1", "D1"])
@pytest.mark.parametrize("stream", [True, False])
async def test_one_dead_worker_of_two_costs_no_client_anything(name: str, stream: bool) -> None:
    async with FaultFleet.of("P1 P2 D1 D2", breaker_open_s=60.0) as field:
        talks = [talk(number) for number in range(12)]
        await turns(field, talks, stream=stream)
        field.engines[name].faults = Faults([Order(FaultKind.KILL)])
        await turns(field, talks, stream=stream)
        assert field.engines[name].is_dead
        await turns(field, talks, stream=stream)  # those that were sent off together may still have found out together
        for number in range(ProxyConfig().breaker_failures + 1):  # so many opened its breaker, if they had not before
            await turns(field, [talk(len(talks) + number)], stream=stream)
        assert field.newest().legs[0].error is None, "by now nobody asks it"
        await field.until(field.at_rest)


async def test_with_every_p_dead_d_alone_answers() -> None:
    async with FaultFleet.of("P1 P2 D1 D2") as field:
        talks = [talk(number) for number in range(4)]
        await turns(field, talks)
        for name in ("P1", "P2"):
            field.engines[name].kill()
        await turns(field, talks)
        await turns(field, [*talks, talk(99)])
        assert [leg.kind for leg in field.newest().legs] == [Leg.LOCAL]
        await field.until(field.idle)


@pytest.mark.parametrize("mode", [Mode.ALWAYS_SPLIT, Mode.ALWAYS_LOCAL])
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
async def test_after_a_worker_dies_the_sessions_next_turn_succeeds_at_the_first_try(mode: Mode, is_known: bool) -> None:
    async with FaultFleet.of("P1 D1 D2", mode=mode) as field:
        one = talk()
        await turns(field, [one])
        dead = field.newest().decode
        field.engines[dead].kill()
        if is_known:
            field.proxy.prober.nudge()
            await field.until(lambda: field.states()[dead] == "down")
        await turns(field, [one])
        receipt = field.newest()
        assert receipt.decode != dead
        assert len([leg for leg in receipt.legs if leg.error]) == (0 if is_known else 1)
        await field.until(field.idle)


@pytest.mark.parametrize("stream", [True, False])
async def test_turns_do_not_wait_for_a_worker_that_is_found_dead(stream: bool) -> None:
    """Its connections stay open and silent, as when its host loses power; only the probes tell."""
    async with FaultFleet.of("R1 R2", mode=Mode.REPLICA, probe_interval_s=0.05, **PATIENT) as field:
        one = talk()
        await turns(field, [one])
        engine = field.engines[field.newest().decode]
        engine.faults = Faults(hang=1)
        asking = asyncio.create_task(turns(field, [one], stream=stream))
        await field.until(lambda: not engine.faults.hang)
        engine.is_dead = True
        async with asyncio.timeout(60):
            await asking
        first, second = field.newest().legs
        assert (first.phase, first.error, second.error) == (Phase.SENT, "worker_gone", None)
        await field.until(field.at_rest)


async def test_a_wedged_pair_is_found_out_and_passed_over() -> None:
    async with FaultFleet.of("P1 D1", **HASTY) as field:
        field.engines["D1"].faults = Faults(wedge=["*"])
        for number in range(2):  # that many failures open a breaker here
            await turns(field, [talk(number)], stream=True)
            kinds = [leg.kind for leg in field.newest().legs]
            assert kinds == [Leg.PREFILL, Leg.DECODE, Leg.LOCAL], "D alone computes it"
        await turns(field, [talk(2)], stream=True)
        assert [leg.kind for leg in field.newest().legs] == [Leg.LOCAL], "nobody waits for that pair any more"
        field.engines["D1"].faults = Faults()
        await field.until(field.at_rest)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_handoff_that_a_d_has_refused_is_nobody_elses(stream: bool) -> None:
    """An engine that turns a request away tells P at once that its blocks are free: another D would find others there.

    Wrong KV stays in that D's prefix cache, for whoever sends the same prompt next.
    """
    async with FaultFleet.of("P1") as field:
        await field.add("D1", max_model_len=64)
        await field.add("D2")
        statuses = set()
        for number in range(12):  # the first turns of sessions, spread over both
            seen = await field.ask(talk(number).body(stream=stream))
            statuses.add(seen.status)
            await field.until(lambda: field.at_rest() and not field.pinned())
        assert statuses == {200, 400}
        assert not any(engine.counters.traps for engine in field.engines.values())


@pytest.mark.parametrize("names", ["P1 D1", "R1"])
async def test_a_turn_for_busy_workers_waits_until_they_take_it(names: str) -> None:
    mode = Mode.REPLICA if names == "R1" else Mode.ALWAYS_SPLIT
    async with FaultFleet.of(names, mode=mode, queue_timeout_s=20.0) as field:
        field.engines[names.rsplit(maxsplit=1)[-1]].faults = Faults(refuse=1, refuse_status=429)
        asking = asyncio.create_task(turns(field, [talk()]))
        await field.until(lambda: field.proxy.state.admission.waiting == 1)
        await asking
        assert [leg.error for leg in field.newest().legs if leg.error] == ["overloaded"]
        await field.until(field.at_rest)
        assert not field.proxy.state.health.breakers.states(field.proxy.state.now())


async def test_an_answer_is_over_with_its_last_event() -> None:
    """A worker that does not end its answer then keeps neither the client nor its place."""
    async with FaultFleet.of("R1", mode=Mode.REPLICA, **PATIENT) as field:
        field.engines["R1"].faults = Faults([Order(FaultKind.HANG, phase=FaultPhase.END)])
        async with asyncio.timeout(60):
            await turns(field, [talk()], stream=True)
            await field.until(field.at_rest)
        assert field.newest().outcome == "completed"


async def test_every_session_of_a_d_that_dies_goes_on_elsewhere() -> None:
    async with FaultFleet.of("P1 D1 D2", mode=Mode.ALWAYS_LOCAL) as field:
        talks = [talk(number) for number in range(10)]
        await turns(field, talks)
        field.engines["D1"].kill()
        for _ in range(2):
            await turns(field, talks)
        routes = {receipt.route for receipt in field.proxy.state.receipts.newest(10)}
        assert routes == {Route.LOCAL}, "they have settled on the D that is left"
        assert {receipt.decode for receipt in field.proxy.state.receipts.newest(10)} == {"D2"}
        await field.until(field.idle)


FALLS = [
    (case, provocations[0])
    for case, provocations in PROVOCATIONS.items()
    if case.row.residency is ResidencyEffect.FALLS and case.leg is not Leg.PREFILL and case.stream
]
# What a P holds of a session decides only which P is asked: see `residency.stale_reason` and the policy's tests.


@pytest.mark.parametrize(("case", "provocation"), FALLS, ids=lambda given: str(given) if type(given) is Case else "")
@pytest.mark.parametrize("returns", ["another incarnation", "the same"])
async def test_what_a_worker_held_is_believed_until_it_returns_as_another(
    case: Case, provocation: Provocation, returns: str
) -> None:
    names, mode = ("R1", Mode.REPLICA) if case.leg is Leg.REPLICA else ("P1 D1", Mode.ALWAYS_SPLIT)
    async with FaultFleet.of(names, mode=mode) as field:
        one, name = talk(), names.split()[-1]
        await turns(field, [one])
        forced = Route.LOCAL if case.leg is Leg.LOCAL else None
        async with provocation.arm(field.engines[name]):
            before, seen = field.newest(), Seen()
            received = len(field.engines[name].received)
            asking = asyncio.create_task(field.ask(one.body(stream=True), seen, forced))
            under_way = Strike(field, case, name, asking, seen, received)
            if provocation.moment is not None and provocation.act is not None:
                moment = provocation.moment
                await field.until(lambda: field.newest() is not before and moment(under_way))
                await provocation.act(under_way)
            await asking
            assert not seen.is_complete
        field.forgive()
        if returns != "the same":
            await field.restart(name)
        await turns(field, [one])
        receipt = field.newest()
        assert [leg.error for leg in receipt.legs if leg.error] == []
        assert (receipt.estimated_cached_tokens > 0) == (returns == "the same")
