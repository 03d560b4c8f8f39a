"""Every row of the failure table, provoked through real sockets, and held against the row's own data."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from ppd.proxy.config import Mode
from ppd.proxy.failures import ClientGets, Leg, ResidencyEffect
from ppd.proxy.health import worker_health
from tests.e2e.failures.faults import (
    DRAINED,
    EVERY_CASE,
    KILLED,
    PROVOCATIONS,
    QUEUED,
    Case,
    Provocation,
    not_provoked,
    revive,
    wedged,
)
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

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Fields:
    """Fleets by the names of their workers, each started once."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._fields: dict[str, FaultFleet] = {}
        self._talks = 0

    async def of(self, names: str) -> FaultFleet:
        if names not in self._fields:
            mode = Mode.REPLICA if names.startswith("R") else Mode.ALWAYS_SPLIT
            self._fields[names] = await self._stack.enter_async_context(FaultFleet.of(names, mode=mode))
            await self._fields[names].settle()
        return self._fields[names]

    def talk(self) -> Talk:
        """A conversation that no other case has."""
        self._talks += 1
        return Talk([{"role": "user", "content": f"{self._talks} {WORDS}"}])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fields() -> AsyncIterator[Fields]:
    async with AsyncExitStack() as stack:
        yield Fields(stack)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def returning() -> AsyncIterator[Fields]:
    """Fleets whose workers return: at which the proxy forgets, sooner or later, what it held against them."""
    async with AsyncExitStack() as stack:
        yield Fields(stack)


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held against a worker is looked at before it is over, on a busy machine too."""
    monkeypatch.setattr(worker_health, "OVERLOAD_S", 60.0)


async def test_every_failure_is_provoked_or_says_why_it_cannot_be() -> None:
    ways = (PROVOCATIONS, QUEUED, DRAINED)
    for case in EVERY_CASE:
        assert sum(case in way for way in ways) + (not_provoked(case) is not None) == 1, str(case)


def tries() -> list[Any]:
    """Each variant of each case, with another worker there and, where one is asked for, without."""
    found = []
    for case, provocations in PROVOCATIONS.items():
        needs = case.row.client_gets(stream=case.stream) in (ClientGets.ANOTHER, ClientGets.ANOTHER_OR_QUEUE)
        for provocation in provocations:
            # From a P that is wedged no KV comes: a D that is alone answers alone, see `test_dead_workers`.
            has_choice = needs and provocation.arm is not wedged
            for alone in (False, True) if has_choice else (False,):
                name = "-".join(filter(None, (str(case), provocation.variant, "alone" if alone else "")))
                found.append(pytest.param(case, provocation, alone, id=name))
    return found


@pytest.mark.parametrize(("case", "provocation", "alone"), tries())
async def test_what_happens_is_what_the_table_says(
    fields: Fields, case: Case, provocation: Provocation, alone: bool
) -> None:
    field = await fields.of(topology(case, alone=alone))
    out = await strike(field, fields.talk(), case, provocation, alone=alone)
    try:
        GETS[case.row.client_gets(stream=case.stream)](out)
        check_other_leg(out)
        check_receipt(out)
        check_residency(out)
        if not alone:
            check_health(out)
        await check_handoff(out)
    finally:
        field.forgive()
    if not provocation.is_death:
        check_belief(out, case.row.residency)
    again = await field.ask({**out.body, "stream": False})
    assert (again.is_complete, again.text) == (True, out.right), "the next turn succeeds at once"
    await field.until(field.idle)


DEATHS = [
    (case, provocation)
    for case, provocations in PROVOCATIONS.items()
    for provocation in provocations
    if provocation.is_death and case.stream
]
KILLS = [(case, provocation) for case, provocation in KILLED.items() if not case.stream]


@pytest.mark.parametrize(
    ("case", "provocation"), DEATHS + KILLS, ids=lambda given: str(given) if type(given) is Case else ""
)
async def test_what_is_believed_of_a_worker_that_returns_is_what_the_table_says(
    returning: Fields, case: Case, provocation: Provocation
) -> None:
    """Nobody else could answer, so that the session stays where it was."""
    field = await returning.of(topology(case, alone=True))
    out = await strike(field, returning.talk(), case, provocation, alone=True)
    GETS[case.row.client_gets(stream=case.stream)](out)
    check_receipt(out)
    field.forgive()
    check_belief(out, ResidencyEffect.UNCHANGED)
    if field.engines[out.name].is_dead:
        await revive(field, out.name)
        check_belief(out, ResidencyEffect.FALLS)  # a reset alone says nothing of that
    else:
        await field.restart(out.name)
        check_belief(out, case.row.residency)
    again = await field.ask({**out.body, "stream": False})
    assert (again.is_complete, again.text) == (True, out.right)
    assert [leg.error for leg in field.newest().legs if leg.error] == []
    if case.leg is not Leg.PREFILL:
        assert field.newest().estimated_cached_tokens == 0
    await field.until(field.idle)
