"""A P that D takes for one that is gone gets no turn in any process, one that has just started included."""

from __future__ import annotations

import pytest

from ppd.proxy.fleet.worker import Load, Role, Worker
from tests.proxy.peers.test_lessons import heard, pair_of, succeeded
from tests.support.processes import Pair

pytestmark = pytest.mark.slow


def found(pair: Pair, address: str, role: Role, incarnation: str) -> None:
    """By the process that asks the workers how they are."""
    coordinates = {"engine_id": "one"} if role is Role.PREFILL else {}
    worker = Worker(role=role, address=address, connector="nixl_push", coordinates=coordinates, incarnation=incarnation)
    registry = pair.ones[0].state.registry
    registry.add_static(worker, 0.0)
    registry.probed(worker.id, worker, Load(), 0.0)
    heard(pair)


async def test_every_process_knows_the_pairs_that_never_work() -> None:
    async with pair_of() as pair:
        found(pair, "d:1", Role.DECODE, "x")
        for incarnation in ("1.5", "2.5"):
            found(pair, "p:1", Role.PREFILL, incarnation)
        strange = {("p:1", "d:1")}
        assert [one.state.health.strangers.pairs for one in pair.ones] == [strange, strange]
        newcomer = await succeeded(pair)
        assert newcomer.health.strangers.pairs == strange
        found(pair, "d:1", Role.DECODE, "y")
        assert [one.state.health.strangers.pairs for one in pair.ones] == [set(), set()]
