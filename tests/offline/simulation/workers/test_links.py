"""Transfers that use the same ends wait for each other."""

from __future__ import annotations

import pytest

from ppd.offline.simulation.workers.links import Port, transfer
from ppd.proxy.laws.step_time import EngineProfile

# 1 s for the bytes of a token, 10 s that hold the sender up, 100 s that hold up nobody.
PROFILE = EngineProfile(kv_bytes_per_token=1000, transfer_bytes_per_s=1000.0, send_s=10.0, transfer_s=100.0)


@pytest.mark.parametrize(
    ("pairs", "arrivals"),
    [
        ([("P1", "D1")], [115]),
        ([("P1", "D1"), ("P2", "D2")], [115, 115]),  # nothing in common
        ([("P1", "D1"), ("P1", "D2")], [115, 130]),  # the sender's fixed cost and bytes
        ([("P1", "D1"), ("P2", "D1")], [115, 120]),  # the receiver takes one transfer's bytes at a time
        ([("P1", "D1"), ("P1", "D1"), ("P2", "D1")], [115, 130, 135]),
    ],
)
def test_transfers_of_five_tokens_asked_for_at_once(pairs: list[tuple[str, str]], arrivals: list[float]) -> None:
    sends, receives = {"P1": Port(), "P2": Port()}, {"D1": Port(), "D2": Port()}
    assert [transfer(sends[p], receives[d], PROFILE, 5, 0.0) for p, d in pairs] == pytest.approx(arrivals)
    assert sum(port.bytes for port in sends.values()) == 5000 * len(pairs)


def test_an_idle_end_is_free_and_nothing_takes_no_time() -> None:
    sender, receiver = Port(), Port()
    transfer(sender, receiver, PROFILE, 5, 0.0)
    assert transfer(sender, receiver, PROFILE, 5, 50.0) == pytest.approx(165)
    assert transfer(sender, receiver, PROFILE, 0, 60.0) == 60.0
