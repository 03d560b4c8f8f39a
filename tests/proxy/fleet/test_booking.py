"""What legs and handoffs hold of workers, at every moment of a turn."""

from __future__ import annotations

import pytest

from ppd.proxy.fleet.booking import LEASE_S, Ledger, LegBooking
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import Role, Worker, WorkerId

P, D = WorkerId("p:1"), WorkerId("d:1")


@pytest.fixture
def registry() -> Registry:
    made = Registry()
    for role, address in ((Role.PREFILL, P), (Role.DECODE, D)):
        made.add_static(Worker(role=role, address=address), 0.0)
    return made


def held(registry: Registry) -> list[tuple[int, int, int]]:
    """On P and on D: legs, prompt tokens to compute, tokens placed."""
    return [(view.inflight, view.queued_prefill_tokens, view.placed_tokens) for view in registry.views()]


def test_a_split_holds_p_until_it_has_prefilled_and_d_until_the_end(registry: Registry) -> None:
    booking = LegBooking(registry, D, P, prompt_tokens=100, new_tokens=40)
    booking.reserve()
    assert held(registry) == [(1, 100, 100), (1, 0, 100)]
    booking.free_prefill()
    assert held(registry) == [(0, 0, 100), (1, 0, 100)]
    booking.computed()
    assert held(registry) == [(0, 0, 100), (1, 0, 100)]
    booking.release()
    assert held(registry) == [(0, 0, 100), (0, 0, 100)]


def test_a_local_turn_queues_its_new_tokens_on_d_until_it_answers(registry: Registry) -> None:
    other, booking = (LegBooking(registry, D, None, prompt_tokens=100, new_tokens=40) for _ in range(2))
    other.reserve()
    booking.reserve()
    assert held(registry) == [(0, 0, 0), (2, 80, 200)]
    booking.computed()
    assert held(registry) == [(0, 0, 0), (2, 40, 200)]
    booking.release()
    assert held(registry) == [(0, 0, 0), (1, 40, 200)], "what another turn has queued stays"


def test_what_ends_early_or_twice_is_given_back_once(registry: Registry) -> None:
    other, booking = (LegBooking(registry, D, P, prompt_tokens=100, new_tokens=40) for _ in range(2))
    booking.release()  # nothing was reserved yet
    other.reserve()
    booking.reserve()
    for _ in range(2):
        booking.free_prefill()
        booking.release()
    assert held(registry) == [(1, 100, 200), (1, 0, 200)]


def test_a_local_turn_that_never_answers_leaves_no_tokens_queued(registry: Registry) -> None:
    booking = LegBooking(registry, D, None, prompt_tokens=100, new_tokens=40)
    booking.reserve()
    booking.release()
    assert held(registry) == [(0, 0, 0), (0, 0, 100)]


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
