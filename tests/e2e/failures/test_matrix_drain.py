"""The rows of the failure table in which the proxy is stopped: turns go on until the limit, and are cut then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import groupby

import aiohttp
import pytest

from benchmarks.network.fault_link import FaultLink, Way
from ppd.proxy.config import Mode
from ppd.proxy.failures import ClientGets, HandoffEffect, HealthEffect, Leg, OtherLeg, Phase, ResidencyEffect
from ppd.proxy.policy import Route
from ppd.proxy.routing.legs import handoff_release
from ppd.proxy.upstream import call
from ppd.servers.sim.core.fault_orders import FaultKind, FaultPhase, Faults, Order
from tests.e2e.failures.faults import DRAINED, Case, Strike, done, first_bytes, head
from tests.e2e.failures.fleet import PATH, FaultFleet, Seen, Talk
from tests.e2e.failures.outcomes import held_against, held_by
from tests.support.fleet import start_engine
from tests.support.proxy import ADMIN_KEY

WORDS = "Some words, so that there are blocks to move. " * 3
LIMIT_S = 0.2  # of a drain that cuts
EVENT_S = 0.15  # between two events of a stream that is held: half of it is the machine's to be late in


@dataclass(slots=True)
class Draining:
    """A turn that stands at some phase, in a proxy that is told to stop."""

    case: Case
    field: FaultFleet
    proxy: AsyncExitStack
    link: FaultLink
    name: str
    talk: Talk
    session: aiohttp.ClientSession
    goes_on: bool

    @property
    def is_whole(self) -> bool:
        """The turn ends as if nothing were."""
        return self.goes_on or self.case.phase is Phase.AFTER


async def silent(draining: Draining, struck: Strike) -> None:
    """The worker is asked, and nothing comes back."""
    await draining.link.partition(Way.BACK, accepts=True)


async def unreachable(draining: Draining, struck: Strike) -> None:
    draining.link.reset()
    await asyncio.sleep(0.01)
    await draining.link.partition()


async def at_a_trickle(draining: Draining, struck: Strike) -> None:
    draining.field.engines[draining.name].faults = Faults([Order(FaultKind.SLOW, delay_s=EVENT_S, times=99)])


async def half_a_body(draining: Draining, struck: Strike) -> None:
    draining.field.engines[draining.name].faults = Faults([Order(FaultKind.HANG, phase=FaultPhase.EVENTS, times=99)])


async def without_end(draining: Draining, struck: Strike) -> None:
    draining.field.engines[draining.name].faults = Faults([Order(FaultKind.HANG, phase=FaultPhase.END, times=99)])


Hold = Callable[[Draining, Strike], Awaitable[None]]


def hold(case: Case) -> Hold:
    """How the turn is kept at its phase."""
    if case.phase is Phase.CONNECT:
        return unreachable
    if case.phase is Phase.SENT:
        return silent
    if case.phase is Phase.AFTER:
        return without_end
    # The rest of a body cannot be held back and sent later: such a turn is only cut.
    return at_a_trickle if case.stream and case.leg is not Leg.PREFILL else half_a_body


@asynccontextmanager
async def drainable(case: Case, *, goes_on: bool) -> AsyncIterator[Draining]:
    """A fleet of its own, whose target is behind a link, after a first turn."""
    names = "R1" if case.leg is Leg.REPLICA else "P1 D1"
    target = {Leg.REPLICA: "R1", Leg.PREFILL: "P1", Leg.DECODE: "D1", Leg.LOCAL: "D1"}[case.leg]
    mode = Mode.REPLICA if case.leg is Leg.REPLICA else Mode.ALWAYS_SPLIT
    async with AsyncExitStack() as outer, AsyncExitStack() as proxy:
        session = await outer.enter_async_context(aiohttp.ClientSession())
        limit_s = 20.0 if goes_on else LIMIT_S
        field = await proxy.enter_async_context(FaultFleet.of("", mode=mode, shutdown_timeout_s=limit_s))
        for name in names.split():  # which outlive the proxy
            engine = await start_engine(outer, name, now=field.clock, shutdown_s=0.05)
            address = engine.address
            if name == target:
                host, _, port = address.partition(":")
                link = await outer.enter_async_context(FaultLink(host, int(port)))
                address = link.address
            await field.join(name, engine, address)
        talk = Talk([{"role": "user", "content": WORDS}])
        talk.heard((await field.ask(talk.body())).text, WORDS)
        yield Draining(case, field, proxy, link, target, talk, session, goes_on)


async def ask(draining: Draining, seen: Seen) -> Seen:
    """By a connection that the end of the test's own proxy does not end."""
    headers = {"X-Admin-Key": ADMIN_KEY}
    if draining.case.leg is Leg.LOCAL:
        headers["X-PPD-Force-Route"] = Route.LOCAL
    body, url = draining.talk.body(stream=draining.case.stream), draining.field.base_url + PATH
    async with draining.session.post(url, json=body, headers=headers) as answer:
        seen.status, seen.headers = answer.status, answer.headers
        try:
            while data := await answer.content.readany():
                seen.body += data
            seen.is_whole = True
        except aiohttp.ClientError:
            pass
    return seen


async def until_there(draining: Draining, struck: Strike) -> None:
    field, case = draining.field, draining.case
    await field.until(struck.is_at_work)
    match case.phase:
        case Phase.SENT:
            await field.until(lambda: len(struck.engine.received) > struck.received)
        case Phase.HEADERS:
            await field.until(lambda: head(struck))
        case Phase.FIRST_EVENT:
            await field.until(lambda: head(struck))
            await asyncio.sleep(1.5 * EVENT_S)  # the opening is there, and no token
        case Phase.STREAM:
            await field.until(lambda: first_bytes(struck))
        case Phase.AFTER:
            await field.until(lambda: done(struck))
    if hold(case) is at_a_trickle:
        await draining.link.partition(Way.BACK, accepts=True)


async def drained(case: Case, *, goes_on: bool) -> None:
    async with drainable(case, goes_on=goes_on) as draining:
        field, seen = draining.field, Seen()
        right = await field.right_text(draining.talk.body())
        received = len(field.engines[draining.name].received)
        struck = Strike(field, case, draining.name, asyncio.current_task(), seen, received)  # type: ignore[arg-type]
        await hold(case)(draining, struck)
        before = field.newest()
        believed = held_by(field, before.session, case.leg)[1]
        asking = asyncio.create_task(ask(draining, seen))
        await field.until(lambda: field.newest() is not before)
        await until_there(draining, struck)
        if case.leg is Leg.DECODE and case.phase is Phase.CONNECT:
            await field.add("D2")  # to take what the session's own D cannot
        admission = field.proxy.state.admission
        stopping = asyncio.create_task(draining.proxy.aclose())
        await field.until(lambda: field.proxy.drain.is_draining)
        if goes_on:
            draining.link.heal()
        await asking
        await stopping
        check_client(case, seen, right, goes_on=goes_on)
        check_receipt(draining)
        check_residency(draining, believed)
        check_health(draining)
        await check_handoff(draining)
        assert (admission.inside, admission.waiting) == (0, 0)
        assert not any(view.inflight for view in field.proxy.state.registry.views())


def check_client(case: Case, seen: Seen, right: str, *, goes_on: bool) -> None:
    if case.row.client_gets(stream=case.stream) is ClientGets.NOTHING or goes_on:
        assert (seen.is_complete, seen.text) == (True, right), seen
        return
    assert case.row.client_gets(stream=case.stream) is ClientGets.UNTIL_LIMIT
    if case.phase is not Phase.STREAM:
        assert (seen.status, seen.headers["X-PPD-Refused"]) == (503, "draining")
        assert int(seen.headers["Retry-After"]) >= 1
        return
    *others, last = seen.events
    assert (seen.status, "[DONE]" in others) == (200, False)
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert right.startswith(seen.text)


def check_receipt(draining: Draining) -> None:
    """With it what the row says of the other leg: P was done before its D is cut, and where P goes on so does D."""
    case, receipt, is_whole = draining.case, draining.field.newest(), draining.is_whole
    kinds = [leg.kind for leg in receipt.legs]
    struck = next(leg for leg in receipt.legs if leg.kind is case.leg)
    assert (struck.worker, struck.phase, struck.error) == (draining.name, None, None)
    assert all(leg.ended_s is not None for leg in receipt.legs)
    if is_whole:
        assert (receipt.outcome, receipt.error) == ("completed", None)
    elif case.phase is Phase.STREAM:
        assert (receipt.outcome, receipt.status, receipt.error) == ("broken", 200, "draining")
    else:
        assert (receipt.outcome, receipt.status, receipt.error) == ("failed", 503, "draining")
    match case.row.other_leg:
        case OtherLeg.NONE:
            assert kinds == [case.leg]
        case OtherLeg.DONE:
            assert kinds == [Leg.PREFILL, Leg.DECODE]
        case OtherLeg.GOES_ON:
            assert kinds == ([Leg.PREFILL, Leg.DECODE] if is_whole else [Leg.PREFILL])
        case other:
            raise AssertionError(f"{other} is not checked here")


def check_health(draining: Draining) -> None:
    assert draining.case.row.health is HealthEffect.UNTOUCHED
    assert held_against(draining.field) == {}, "the proxy's own end is nobody's failure"


def check_residency(draining: Draining, believed: int) -> None:
    case, receipt = draining.case, draining.field.newest()
    _, tokens = held_by(draining.field, receipt.session, case.leg)
    prompt, completion = receipt.prompt_tokens or 0, receipt.completion_tokens or 0
    learnt = prompt if case.leg is Leg.PREFILL else prompt + completion
    if draining.is_whole and case.phase is not Phase.AFTER:
        assert tokens == learnt > believed, "as after any turn"
    else:
        assert (
            tokens
            == {ResidencyEffect.UNCHANGED: believed, ResidencyEffect.LEARNT: learnt, ResidencyEffect.FALLS: 0}[
                case.row.residency
            ]
            > 0
        )


async def check_handoff(draining: Draining) -> None:
    """A D that has pulled it may tell P so after the proxy's end."""
    case, field = draining.case, draining.field
    has_prefill = any(leg.kind is Leg.PREFILL for leg in field.newest().legs)
    assert case.row.handoff is (HandoffEffect.TAKEN if has_prefill else HandoffEffect.NONE)
    assert field.outstanding() == 0
    # What P has pinned without having been heard is nobody's to free: only its lease does.
    is_known = draining.is_whole or case.leg is not Leg.PREFILL or case.phase is Phase.CONNECT
    if is_known:
        await field.until(lambda: field.pinned() == 0)
    field.end_leases()
    assert field.pinned() == 0
    assert not any(sum(engine.counters.traps.values()) for engine in field.engines.values())


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too, a stream that is over is caught at its end, and another D is reached for what P keeps."""
    monkeypatch.setattr(call, "END_S", 4.0)
    monkeypatch.setattr(handoff_release, "REACHED_S", 10.0)


TOGETHER = [tuple(cases) for _, cases in groupby(DRAINED, lambda case: (case.leg, case.phase))]


@pytest.mark.parametrize("cases", TOGETHER, ids=lambda cases: f"{cases[0].leg}-{cases[0].phase}")
async def test_a_drain_lets_turns_end_until_its_limit(cases: tuple[Case, ...]) -> None:
    async with asyncio.TaskGroup() as group:
        for case in cases:
            if hold(case) is not half_a_body:
                group.create_task(drained(case, goes_on=True), name=f"{case} goes on")
            if case.phase is not Phase.AFTER:
                group.create_task(drained(case, goes_on=False), name=f"{case} is cut")
