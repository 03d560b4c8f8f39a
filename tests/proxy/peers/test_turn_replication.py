"""What changes at every turn is told soon, however often it changes, and again once it was told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ppd.proxy.assembly import new_state
from ppd.proxy.config import ProxyConfig
from ppd.proxy.fleet.ledger import LegWork
from ppd.proxy.peers.channels import Member
from ppd.proxy.peers.turn_replication import TurnReplication
from ppd.proxy.routing.state import State
from tests.support.processes import R1, worker


class Sender:
    """Counts the flushes that were asked for."""

    def __init__(self) -> None:
        self.soon = self.at_once = 0

    def queue(self, event: object) -> None:
        raise AssertionError(f"{event} was queued")

    def flush(self) -> None:
        self.at_once += 1

    async def flushed(self) -> None:
        self.flush()

    def schedule_flush(self) -> None:
        self.soon += 1

    def drain(self) -> None: ...


def enters(state: State) -> None:
    assert state.admission.replicated is not None
    state.admission.replicated.changed()


def arrives(state: State) -> None:
    assert state.arrivals.replicated is not None
    state.arrivals.replicated.changed(True)


def begins(state: State) -> None:
    state.registry.begin(R1, LegWork(prefill_tokens=1), 0.0)


@pytest.mark.parametrize("change", [enters, arrives, begins])
def test_every_round_with_a_change_is_told(change: Callable[[State], None]) -> None:
    state, sender = new_state(ProxyConfig(), Member(), lambda: 0.0), Sender()
    worker(state.registry, R1)
    replication = TurnReplication(Member(), state, lambda: 1000)
    replication.attach(sender)
    for number in range(1, 4):
        change(state)
        change(state)
        assert (sender.soon, sender.at_once) == (number, 0)
        assert len(replication.pending()) == 1
        assert replication.pending() == []
