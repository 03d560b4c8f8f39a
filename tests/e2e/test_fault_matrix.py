"""Every row of the failure table, provoked through real sockets, and held against the row's own data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from failure_faults import (
    DRAINED,
    EVERY_CASE,
    ODD_TEXT,
    PROVOCATIONS,
    QUEUED,
    Case,
    Provocation,
    Strike,
    not_provoked,
)
from fault_field import Field, Seen, Talk, field_of
from ppd.proxy.config import Mode
from ppd.proxy.policy import Route
from ppd.proxy.receipts import LegRecord, Receipt
from ppd.proxy.resilience.failures import Belief, Cause, ClientGets, Fate, Leg, OtherLeg, Phase, Standing
from ppd.proxy.workers import PairId, Role, WorkerId

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORDS = "Some words, so that there are blocks to move. " * 3
NO_LEG_ERROR = (Cause.CLIENT_GONE, Cause.NO_HANDOFF, Cause.DRAINING)


class Fields:
    """Fleets by the names of their workers, each started once."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._fields: dict[str, Field] = {}
        self._talks = 0

    async def of(self, names: str) -> Field:
        if names not in self._fields:
            mode = Mode.REPLICA if names.startswith("R") else Mode.ALWAYS_SPLIT
            field = self._fields[names] = await self._stack.enter_async_context(field_of(names, mode=mode))
            await field.until_known()
        return self._fields[names]

    def talk(self) -> Talk:
        """A conversation that no other case has."""
        self._talks += 1
        return Talk([{"role": "user", "content": f"{self._talks} {WORDS}"}])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fields() -> AsyncIterator[Fields]:
    async with AsyncExitStack() as stack:
        yield Fields(stack)


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
            for alone in (False, True) if needs else (False,):
                name = "-".join(filter(None, (str(case), provocation.variant, "alone" if alone else "")))
                found.append(pytest.param(case, provocation, alone, id=name))
    return found


@pytest.mark.parametrize(("case", "provocation", "alone"), tries())
async def test_what_happens_is_what_the_table_says(
    fields: Fields, case: Case, provocation: Provocation, alone: bool
) -> None:
    out = await strike(fields, case, provocation, alone=alone)
    try:
        GETS[case.row.client_gets(stream=case.stream)](out)
        check_other_leg(out)
        check_receipt(out)
        check_residency(out)
        if not alone:
            check_standing(out)
        await check_handoff(out)
    finally:
        out.field.forgive()
    again = await out.field.ask({**out.body, "stream": False})
    assert (again.is_complete, again.text) == (True, out.right), "the next turn succeeds at once"
    await out.field.until(out.field.idle, 5)
