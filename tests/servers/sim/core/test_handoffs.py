from __future__ import annotations

from array import array
from typing import Any

import pytest

from ppd.servers.sim.core.block_pool import Block, BlockPool
from ppd.servers.sim.core.counters import Counters, Trap
from ppd.servers.sim.core.handoffs import HandoffLedger


class Ledger:
    """A ledger over a pool of four blocks of two tokens, of which two are pinned for `r1`."""

    def __init__(self, clock: Any) -> None:
        self.pool = BlockPool(4, 2)
        self.counters = Counters()
        self.handoffs = HandoffLedger(self.pool, self.counters, lease_s=30.0, now=clock)
        self.blocks: list[Block] = self.pool.allocate(2) or []
        self.ids = [block.id for block in self.blocks]
        for block, content in zip(self.blocks, ([1, 2], [3, 4]), strict=True):
            block.content[:] = array("I", content)
        self.handoffs.pin("r1", self.blocks)


@pytest.fixture
def ledger(clock: Any) -> Ledger:
    return Ledger(clock)


def test_a_handoff_is_read_and_then_freed(ledger: Ledger) -> None:
    assert ledger.handoffs.read("r1", ledger.ids) == [[1, 2], [3, 4]]
    assert ledger.pool.used == ledger.handoffs.pinned_blocks == 2
    ledger.handoffs.close("r1")
    assert (ledger.pool.used, len(ledger.handoffs)) == (0, 0)
    assert not ledger.counters.traps
    assert ledger.counters.notifications_after_expiry == 0


def test_a_lease_ends_at_its_deadline_and_not_before(ledger: Ledger, clock: Any) -> None:
    assert ledger.handoffs.next_deadline == clock() + 30
    clock.advance(29.9)
    assert ledger.handoffs.expire() == 0
    clock.advance(0.1)
    assert ledger.handoffs.expire() == 1
    assert (ledger.pool.used, ledger.counters.expired_handoffs, ledger.handoffs.next_deadline) == (0, 1, None)


@pytest.mark.parametrize(("at", "ends_at"), [(5.0, 30.0), (25.0, 45.0)])
def test_a_heartbeat_gives_two_thirds_of_a_lease_and_takes_nothing(
    ledger: Ledger, clock: Any, at: float, ends_at: float
) -> None:
    begun = clock()
    clock.advance(at)
    ledger.handoffs.extend("r1")
    ledger.handoffs.extend("never pinned")
    assert ledger.handoffs.next_deadline == begun + ends_at


def late(ledger: Ledger, clock: Any) -> str:
    clock.advance(31)
    return "r1"


def twice(ledger: Ledger, clock: Any) -> str:
    ledger.handoffs.close("r1")
    return "r1"


def unknown(ledger: Ledger, clock: Any) -> str:
    return "r2"


@pytest.mark.parametrize(
    ("misuse", "trap"),
    [(late, Trap.EXPIRED_HANDOFF), (twice, Trap.USED_HANDOFF), (unknown, Trap.UNKNOWN_HANDOFF)],
)
def test_a_read_without_a_lease_succeeds_and_brings_wrong_kv(
    ledger: Ledger, clock: Any, misuse: Any, trap: Trap
) -> None:
    contents = ledger.handoffs.read(misuse(ledger, clock), ledger.ids)
    assert len(contents) == 2
    assert all(wrong != right for wrong, right in zip(contents, ([1, 2], [3, 4]), strict=True))
    assert ledger.counters.traps == {trap: 1}
    assert [list(block.content) for block in ledger.blocks] == [[1, 2], [3, 4]]  # P's own cache is not harmed


@pytest.mark.parametrize("misuse", [late, twice, unknown])
def test_a_notification_without_a_lease_is_counted(ledger: Ledger, clock: Any, misuse: Any) -> None:
    ledger.handoffs.close(misuse(ledger, clock))
    assert ledger.counters.notifications_after_expiry == 1


def test_blocks_of_others_are_read_as_they_are(ledger: Ledger) -> None:
    (foreign,) = ledger.pool.allocate(1) or []
    foreign.content[:] = array("I", (8, 9))
    assert ledger.handoffs.read("r1", [foreign.id]) == [[8, 9]]
    assert ledger.counters.traps == {Trap.FOREIGN_BLOCKS: 1}


@pytest.mark.parametrize("block_id", [-1, 4])
def test_a_block_that_does_not_exist_cannot_be_read(ledger: Ledger, block_id: int) -> None:
    with pytest.raises(IndexError):
        ledger.handoffs.read("r1", [block_id])
