"""The failure table with every connector: each failure of a leg of a SPLIT, before the strict engines of its protocol.

What is the same whatever moves the KV is held against each row in `test_fault_matrix`, with NIXL's pull mode; clients
leave in `test_cancel_matrix`. Here a row's worth of what the client gets, of who is asked again, of whom it is held
against, and of what stays, is looked at for each connector, in both forms of an answer where legs run together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from ppd.proxy.connectors import CONNECTORS
from ppd.proxy.failures import Cause, ClientGets, Leg, Phase
from ppd.proxy.health import worker_health
from ppd.proxy.leg_moves import LegOrder
from tests.e2e.failures.faults import PROVOCATIONS, Case, Provocation
from tests.e2e.failures.outcomes import (
    GETS,
    Outcome,
    answered,
    check_health,
    check_receipt,
    check_residency,
    held_against,
    strike,
    told,
)
from tests.e2e.fleet.connector_fleets import ConnectorFleet, ConnectorFleets

pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHERS = [name for name in CONNECTORS if name != "nixl"]
IN_BOTH_FORMS = ("nixl_push", "sglang")  # both legs at once; and P waits for D
ELSEWHERE = (Cause.CLIENT_GONE, Cause.NO_HANDOFF)  # `test_cancel_matrix`, and each protocol's own parameters
STICKY = {"sglang": ",prefix_cache=true"}  # so that a session's next turn goes to the D that its last one went to
ANOTHER = (ClientGets.ANOTHER, ClientGets.ANOTHER_OR_QUEUE, ClientGets.AFRESH)


def is_of(connector: str, case: Case, provocation: Provocation) -> bool:
    if case.cause is Cause.STALE_HANDOFF:
        return CONNECTORS[connector].needs_handoff
    return case.cause not in ELSEWHERE and provocation.variant != "wedged"


def tries() -> list[Any]:
    """Every failure with every connector: in both forms of an answer where it is said above, else in turns in one."""
    found = []
    legs = [case for case in PROVOCATIONS if case.leg in (Leg.PREFILL, Leg.DECODE)]
    for place, connector in enumerate(OTHERS):
        for at, case in enumerate(legs):
            has_other_form = any(other.failure == case.failure and other.stream != case.stream for other in legs)
            is_turn = connector in IN_BOTH_FORMS or not has_other_form or (place + at // 2) % 2 == case.stream
            for provocation in PROVOCATIONS[case] if is_turn else ():
                if is_of(connector, case, provocation):
                    name = "-".join(filter(None, (connector, str(case), provocation.variant)))
                    found.append(pytest.param(connector, case, provocation, id=name))
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleets() -> AsyncIterator[ConnectorFleets]:
    async with AsyncExitStack() as stack:
        yield ConnectorFleets(stack, told=STICKY)


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held against a worker is looked at before it is over, on a busy machine too."""
    monkeypatch.setattr(worker_health, "OVERLOAD_S", 60.0)


@pytest.mark.parametrize(("connector", "case", "provocation"), tries())
async def test_what_happens_with_each_connector(
    fleets: ConnectorFleets, connector: str, case: Case, provocation: Provocation
) -> None:
    fleet = await fleets.of(connector)
    field = fleet.field
    out = await strike(field, fleet.talk(), case, provocation, alone=False)
    try:
        check_turn(fleet, out)
    finally:
        await fleet.rest()
    assert not any(out.traps.values())
    assert not fleet.used_twice()
    again = await field.ask({**out.body, "stream": False})
    assert (again.is_complete, again.text) == (True, out.right), "the next turn succeeds at once"
    assert [leg.error for leg in field.newest().legs if leg.error] == []
    await fleet.rest()


def is_found_in_pair(fleet: ConnectorFleet, case: Case) -> bool:
    """P waits for D, and is late: nobody can tell which of them hangs, so both are asked again, each beside another."""
    phases = (Phase.SENT, Phase.CONNECT) if case.leg is Leg.DECODE else (Phase.SENT,)
    return fleet.connector.order is LegOrder.D_FIRST and case.phase in phases and case.cause is Cause.TIMEOUT


def is_only_noted(fleet: ConnectorFleet, out: Outcome) -> bool:
    """P has computed the prompt before it fails, so that D may have begun its answer by then: nothing ends that."""
    is_late = out.case.leg is Leg.PREFILL and out.case.phase in (Phase.HEADERS, Phase.FIRST_EVENT)
    return fleet.connector.order.is_joint and is_late and out.legs[1].first_event_s is not None


def check_turn(fleet: ConnectorFleet, out: Outcome) -> None:
    """What the client got, who was asked for it, and of whom something is held, or held against."""
    gets, is_joint = out.case.row.client_gets(stream=out.case.stream), fleet.connector.order.is_joint
    if is_found_in_pair(fleet, out.case):
        answered(out)
        unreached = {out.field.worker(out.name)} if out.case.phase is Phase.CONNECT else set()
        assert all(isinstance(key, tuple) or key in unreached for key in held_against(out.field)), "no other worker"
        return
    if is_only_noted(fleet, out):
        answered(out)
        return
    if gets in ANOTHER and is_joint:
        answered(out)
        told(out)
        assert out.name not in {leg.worker for leg in out.legs if leg.error is None and leg.kind is out.case.leg}
        assert out.kinds == [Leg.PREFILL, Leg.DECODE] * (len(out.kinds) // 2)
    else:
        GETS[gets](out)
    check_residency(out)
    check_health(out)
    check_receipt(out)
