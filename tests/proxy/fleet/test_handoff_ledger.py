"""The ledger of handoffs that wait on a P."""

from __future__ import annotations

from ppd.proxy.fleet.booking import LEASE_S, Ledger


def samples(ledger: Ledger, now_s: float) -> list[float]:
    return [sample.value for gauge in ledger.gauges(now_s) for sample in gauge.samples]


def test_it_counts_what_is_open_and_how_old_the_oldest_is() -> None:
    ledger = Ledger()
    assert samples(ledger, 5.0) == [0, 0]
    ledger.open("a", 10.0)
    ledger.open("b", 12.0)
    assert samples(ledger, 13.0) == [2, 3.0]
    ledger.close("a")
    ledger.close("a")
    assert samples(ledger, 13.0) == [1, 1.0]


def test_what_nobody_pulled_is_counted_until_its_lease_ends() -> None:
    ledger = Ledger()
    ledger.open("a", 0.0)
    ledger.open("b", 10.0)
    assert ledger.outstanding(LEASE_S) == 2
    assert ledger.outstanding(LEASE_S + 1) == 1
    assert ledger.outstanding(LEASE_S + 11) == 0
