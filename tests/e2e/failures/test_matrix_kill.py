"""The rows of the failure table that `kill -9` of a worker brings about: it dies, and returns without its memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import groupby

import pytest

from ppd.proxy.config import Mode
from ppd.proxy.failures import Leg, ResidencyEffect
from ppd.proxy.fleet.worker import WorkerId
from tests.e2e.failures.faults import KILLED, Case, revive
from tests.e2e.failures.fleet import FaultFleet, Talk
from tests.e2e.failures.outcomes import (
    GETS,
    WORDS,
    check_belief,
    check_handoff,
    check_health,
    check_other_leg,
    check_receipt,
    check_residency,
    strike,
    topology,
)

NOBODY = WorkerId("127.0.0.1:9")


@asynccontextmanager
async def known(names: str) -> AsyncIterator[FaultFleet]:
    """A fleet of its own, after the proxy has noted its workers: at that it forgets what it held against them.

    It has when it has also noted one that came later, against whom something was held before.
    """
    mode = Mode.REPLICA if names.startswith("R") else Mode.ALWAYS_SPLIT
    async with FaultFleet.of(names, mode=mode) as field:
        breakers, now = field.proxy.state.health.breakers, field.proxy.state.now
        breakers.failed(NOBODY, now(), began_s=now(), at_once=True)
        assert (await field.admin("POST", "/workers", {"worker": f"P={NOBODY}"}))[0] == 201
        await field.until(lambda: NOBODY not in breakers.states(now()))
        assert (await field.admin("DELETE", f"/workers/{NOBODY}"))[0] == 200
        yield field


async def killed(case: Case) -> None:
    async with known(topology(case, alone=False)) as field:
        talk = Talk([{"role": "user", "content": WORDS}])
        out = await strike(field, talk, case, KILLED[case], alone=False)
        assert field.engines[out.name].is_dead
        GETS[case.row.client_gets(stream=case.stream)](out)
        check_other_leg(out)
        check_receipt(out)
        check_residency(out)
        check_health(out)
        await check_handoff(out)
        field.forgive()
        await revive(field, out.name)
        if out.receipt.outcome != "completed":
            check_belief(out, ResidencyEffect.FALLS)
        again = await field.ask({**out.body, "stream": False})
        assert (again.is_complete, again.text) == (True, out.right)
        await field.until(field.idle)


STREAMED = [case for case in sorted(KILLED, key=str) if case.stream]  # for the rest see `test_fault_matrix`
TOGETHER = {leg: tuple(cases) for leg, cases in groupby(STREAMED, lambda case: case.leg)}


@pytest.mark.parametrize("leg", Leg)
async def test_what_happens_when_a_worker_is_killed_is_what_the_table_says(leg: Leg) -> None:
    async with asyncio.TaskGroup() as group:
        for case in TOGETHER[leg]:
            group.create_task(killed(case), name=str(case))
