"""What one process finds of a P and a D that may not know each other holds in all, a new one included."""

from __future__ import annotations

import pytest

from ppd.proxy.fleet.worker import Load, Role, Worker, WorkerId
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


async def test_every_process_waits_for_the_same_pairs_to_be_proven() -> None:
    async with pair_of() as pair:
        found(pair, "d:1", Role.DECODE, "1.5")
        found(pair, "p:1", Role.PREFILL, "99.5")
        known = WorkerId("p:1"), WorkerId("d:1")
        assert [one.state.health.strangers.unproven for one in pair.ones] == [{known}, {known}]
        assert (await succeeded(pair)).health.strangers.unproven == {known}
        leader = pair.ones[0]
        leader.state.health.succeeded(known)
        assert leader.canary.replicated is not None
        leader.canary.replicated.changed(leader.canary.left_to_turns)
        heard(pair)
        assert [one.state.health.strangers.unproven for one in pair.ones] == [set(), set()]
