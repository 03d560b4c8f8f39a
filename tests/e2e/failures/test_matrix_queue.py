"""The rows of the failure table at which no worker was asked yet: the fleet is full, and a turn waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from ppd.proxy.config import Mode
from ppd.proxy.failures import Cause, ClientGets, Leg, ResidencyEffect
from ppd.proxy.policy import Route
from tests.e2e.failures.faults import QUEUED, Case
from tests.e2e.failures.fleet import FaultFleet, Seen, Talk

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORDS = "Some words, so that there are blocks to move. " * 3
REASONS = {Cause.OVERLOADED: "queue_full", Cause.TIMEOUT: "queue_timeout", Cause.DRAINING: "draining"}


class Fleets:
    """Fleets with room for one turn, each started once; one that is to drain is nobody else's."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._fields: dict[tuple[bool, int], FaultFleet] = {}
        self.talks = 0

    async def of(self, case: Case) -> FaultFleet:
        is_replica, limit = case.leg is Leg.REPLICA, 0 if case.cause is Cause.OVERLOADED else 10
        key = (is_replica, limit)
        if key not in self._fields or case.cause is Cause.DRAINING:
            mode, names = (Mode.REPLICA, "R1 R2") if is_replica else (Mode.ALWAYS_SPLIT, "P1 P2 D1 D2")
            settings: dict[str, Any] = {"max_inflight": 1, "queue_limit": limit, "queue_timeout_s": 0.4}
            field = await self._stack.enter_async_context(FaultFleet.of(names, mode=mode, **settings))
            if case.cause is Cause.DRAINING:
                return field
            self._fields[key] = field
        return self._fields[key]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleets() -> AsyncIterator[Fleets]:
    async with AsyncExitStack() as stack:
        yield Fleets(stack)


@dataclass(slots=True)
class Waiting:
    field: FaultFleet
    asking: asyncio.Task[Seen]
    name: str  # the worker that the session would have had


async def bring_about(case: Case, waiting: Waiting) -> None:
    """Happens to a turn in the queue."""
    field, admission = waiting.field, waiting.field.proxy.state.admission
    if case.cause is not Cause.OVERLOADED:  # that one never waits
        await field.until(lambda: admission.waiting == 1)
    if case.cause is Cause.CLIENT_GONE:
        waiting.asking.cancel()
        await field.until(lambda: admission.waiting == 0)
    elif case.cause is Cause.DRAINING:
        field.proxy.drain.begin()
    elif case.cause is Cause.WORKER_GONE:
        assert (await field.admin("DELETE", f"/workers/{field.worker(waiting.name)}"))[0] == 200


@pytest.mark.parametrize("case", QUEUED, ids=str)
async def test_what_happens_to_a_turn_that_waits(fleets: Fleets, case: Case) -> None:
    field = await fleets.of(case)
    fleets.talks += 1
    talk = Talk([{"role": "user", "content": f"{fleets.talks} {WORDS}"}])
    talk.heard((await field.ask(talk.body())).text, WORDS)
    before = field.newest()
    name = before.prefill if case.leg is Leg.PREFILL else before.decode
    body = talk.body(stream=case.stream)
    forced = Route.LOCAL if case.leg is Leg.LOCAL else None
    async with field.full():
        received = {each: len(engine.received) for each, engine in field.engines.items()}
        asking = asyncio.create_task(field.ask(body, forced=forced))
        await bring_about(case, Waiting(field, asking, name))
        if case.row.client_gets(stream=case.stream) is not ClientGets.GOES_ON:
            with suppress(asyncio.CancelledError):
                await asking
            assert received == {each: len(engine.received) for each, engine in field.engines.items()}
    receipt = field.newest() if asking.cancelled() else None
    match case.row.client_gets(stream=case.stream):
        case ClientGets.REFUSED:
            seen = await asking
            assert (seen.status, seen.headers["X-PPD-Refused"]) == (503, REASONS[case.cause])
            assert int(seen.headers["Retry-After"]) >= 1
            assert set(seen.json["error"]) == {"message", "type", "param", "code"}
        case ClientGets.NOTHING:
            assert receipt is not None
            assert (receipt.outcome, receipt.legs) == ("cancelled", [])
        case ClientGets.GOES_ON:
            seen = await asking
            assert (seen.is_complete, seen.text) == (True, await field.right_text(body))
            assert name not in {leg.worker for leg in field.newest().legs}
        case other:
            raise AssertionError(f"{other} is not checked here")
    await field.until(field.idle)
    assert not field.proxy.state.health.breakers.states(field.proxy.state.now())
    await check_residency(field, case, before.session, name)
    if case.cause is Cause.DRAINING:
        return
    again = await field.ask({**body, "stream": False})
    assert (again.is_complete, again.text) == (True, await field.right_text(body))
    await field.until(field.idle)


async def check_residency(field: FaultFleet, case: Case, session: str, name: str) -> None:
    summary = field.proxy.state.sessions.summary(session)
    assert summary is not None
    if case.row.residency is ResidencyEffect.UNCHANGED:
        assert summary.turn == 1
        return
    assert summary.turn == 2, "it went on elsewhere"
    engine = field.engines.pop(name)
    before = {view.id for view in field.proxy.state.registry.views()}
    engine.started_at += 100.0
    await field.join(name, engine, engine.address)
    assert {view.id for view in field.proxy.state.registry.views()} - before == {engine.address}
