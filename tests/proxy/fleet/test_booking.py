"""What legs and handoffs hold of workers, at every moment of a turn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy.fleet.booking import LEASE_S, LegBooking, OpenHandoffs
from ppd.proxy.fleet.ledger import LegEstimates, prefill_left_s
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import Role, Worker, WorkerId

P, D, R = WorkerId("p:1"), WorkerId("d:1"), WorkerId("r:1")


@pytest.fixture
def registry() -> Registry:
    made = Registry()
    for role, address in ((Role.PREFILL, P), (Role.DECODE, D)):
        made.add_static(Worker(role=role, address=address), 0.0)
    return made


ESTIMATES = LegEstimates(
    prompt_tokens=100, new_tokens=40, output_tokens=20, new_on_prefill_tokens=90, prefill_s=2.0, link_s=0.5
)


def booked(registry: Registry, prefill: WorkerId | None = P, **changes: Any) -> LegBooking:
    return LegBooking(registry, D, prefill, replace(ESTIMATES, **changes))


def held(registry: Registry) -> list[tuple[int, int, int]]:
    """On P and on D: legs, prompt tokens to compute, tokens placed."""
    return [(view.inflight, view.queued_prefill_tokens, view.placed_tokens) for view in registry.views()]


def decoded(registry: Registry) -> list[tuple[int, int, int]]:
    """On P and on D: sequences, their context, KV reserved."""
    return [(view.decoding, view.context_tokens, view.reserved_tokens) for view in registry.views()]


def prefilled(registry: Registry) -> list[tuple[int, float, float]]:
    """On P and on D: prompts, their seconds, and when the first of them began."""
    return [(view.prefills, view.queued_prefill_s, view.prefills_since_s) for view in registry.views()]


def links(registry: Registry) -> tuple[float, float]:
    """When P's is free to send, and D's to receive."""
    p, d = registry.views()
    return p.sends_free_s, d.receives_free_s


NOTHING = [(0, 0, 0), (0, 0, 0)]


def test_a_split_holds_p_until_it_has_prefilled_and_d_until_the_end(registry: Registry) -> None:
    booking = booked(registry)
    booking.reserve(1.0)
    assert held(registry) == [(1, 90, 0), (1, 0, 40)]
    assert decoded(registry) == [(0, 0, 90), (1, 110, 60)], "with half of the answer, and with all of it"
    assert prefilled(registry) == [(1, 2.0, 1.0), (0, 0.0, 0.0)]
    booking.free_prefill(3.0)
    assert held(registry) == [(0, 0, 0), (1, 0, 40)]
    assert decoded(registry) == [(0, 0, 0), (1, 110, 60)]
    booking.computed(3.5)
    assert held(registry) == [(0, 0, 0), (1, 0, 40)]
    assert decoded(registry) == [(0, 0, 0), (1, 110, 60)], "until the end"
    booking.release(9.0)
    assert held(registry) == [(0, 0, 0), (0, 0, 40)]
    assert (decoded(registry), prefilled(registry)) == (NOTHING, NOTHING)


def test_a_local_turn_queues_its_new_tokens_on_d_until_it_answers(registry: Registry) -> None:
    other, booking = (booked(registry, None) for _ in range(2))
    other.reserve(1.0)
    booking.reserve(2.0)
    assert held(registry) == [(0, 0, 0), (2, 80, 80)]
    assert prefilled(registry)[1] == (2, 4.0, 1.0)
    assert decoded(registry)[1] == (2, 220, 120)
    booking.computed(5.0)
    assert held(registry) == [(0, 0, 0), (2, 40, 80)]
    assert prefilled(registry)[1] == (1, 2.0, 5.0), "since then the next is computed"
    booking.release(6.0)
    assert held(registry) == [(0, 0, 0), (1, 40, 80)], "what another turn has queued stays"
    assert decoded(registry)[1] == (1, 110, 60)


@pytest.mark.parametrize("prefill", [P, None])
@pytest.mark.parametrize("steps", [*permutations(("free_prefill", "computed", "release")), ("release",)])
def test_whatever_comes_in_whatever_order_and_twice_is_given_back_once(
    registry: Registry, prefill: WorkerId | None, steps: tuple[str, ...]
) -> None:
    other, booking = (booked(registry, prefill) for _ in range(2))
    booking.release(0.0)  # nothing was reserved yet
    other.reserve(1.0)
    alone = (decoded(registry), [one[:2] for one in prefilled(registry)], held(registry)[0])
    booking.reserve(2.0)
    for step in (*steps, *steps):
        getattr(booking, step)(3.0)
    assert (decoded(registry), [one[:2] for one in prefilled(registry)], held(registry)[0]) == alone
    other.release(4.0)
    assert (decoded(registry), prefilled(registry), held(registry)[0]) == (NOTHING, NOTHING, (0, 0, 0))
    assert max(links(registry)) <= 4.0, "nothing is to be moved"


@pytest.mark.parametrize("prefill", [P, None])
def test_a_turn_on_a_worker_that_left_takes_nothing_from_it_once_it_is_back(
    registry: Registry, prefill: WorkerId | None
) -> None:
    old, new = (booked(registry, prefill) for _ in range(2))
    old.reserve(1.0)
    for role, address in ((Role.PREFILL, P), (Role.DECODE, D)):
        registry.remove(address)
        registry.add_static(Worker(role=role, address=address), 2.0)
    new.reserve(3.0)
    now = (held(registry), decoded(registry), prefilled(registry), links(registry))
    old.release(4.0)
    assert (held(registry), decoded(registry), prefilled(registry), links(registry)) == now
    new.release(5.0)
    assert (decoded(registry), prefilled(registry)) == (NOTHING, NOTHING)


def test_a_turn_on_workers_that_have_left_books_nothing(registry: Registry) -> None:
    registry.remove(D)
    booking = booked(registry)
    booking.reserve(1.0)
    booking.computed(2.0)
    booking.release(3.0)
    assert registry.views()[0].inflight == 0


@pytest.mark.parametrize(
    ("changes", "prefill_s", "context", "free_s"),
    [
        ({"prefill_s": math.nan}, 0.0, 110, 1.5),
        ({"prefill_s": math.inf}, 0.0, 110, 1.5),
        ({"prefill_s": -1.0}, 0.0, 110, 1.5),
        ({"prefill_s": 1e300}, 0.0, 110, 1.5),
        ({"link_s": math.nan}, 2.0, 110, 0.0),
        ({"link_s": -1.0}, 2.0, 110, 0.0),
        ({"prompt_tokens": -5}, 2.0, 10, 3.5),
        ({"output_tokens": 10**30}, 2.0, 100 + (1 << 39), 3.5),
    ],
)
def test_an_absurd_estimate_spoils_no_sum(
    registry: Registry, changes: Mapping[str, Any], prefill_s: float, context: int, free_s: float
) -> None:
    booking = booked(registry, **changes)
    booking.reserve(1.0)
    p, d = registry.views()
    assert (p.queued_prefill_s, d.context_tokens, p.sends_free_s) == (prefill_s, context, free_s)
    booking.release(2.0)
    assert (decoded(registry), prefilled(registry)) == (NOTHING, NOTHING)


def test_of_a_whole_answer_the_prompt_is_computed_when_it_should_be(registry: Registry) -> None:
    """Its first event is its end, and until then D would seem to compute all prompts of the turns that it decodes."""
    bookings = [booked(registry, None, shows_first_token=False) for _ in range(2)]
    for booking in bookings:
        booking.reserve(1.0)
    d = registry.views()[1]
    assert (d.prefills, [prefill_left_s(d, now_s) for now_s in (1.0, 2.5, 9.0)]) == (0, [4.0, 2.5, 0.0])
    for booking in bookings:
        booking.computed(20.0)
        booking.release(20.0)
    assert (decoded(registry), prefilled(registry), registry.views()[1].inflight) == (NOTHING, NOTHING, 0)


# -- links


def test_a_link_is_taken_from_when_p_should_be_done_until_d_answers(registry: Registry) -> None:
    first, second = booked(registry), booked(registry)
    first.reserve(1.0)
    assert links(registry) == (3.5, 1.5), "D's may serve another P until this one is done"
    second.reserve(2.0)
    assert links(registry) == (5.5, 2.5), "P computes the second from 3.0 on, which is when the first is done"
    first.free_prefill(2.1)
    first.computed(2.2)
    assert links(registry) == (5.0, 2.5), "half a second earlier, as its transfer is over"
    second.computed(2.3)
    assert links(registry) == (2.3, 2.3)


def test_transfers_behind_each_other_wait_for_the_link(registry: Registry) -> None:
    """As where P has computed little, and has much to send."""
    bookings = [booked(registry, prefill_s=0.0, link_s=1.0) for _ in range(3)]
    for booking in bookings:
        booking.reserve(1.0)
    assert links(registry) == (4.0, 4.0)
    bookings[0].computed(2.0)
    assert links(registry) == (4.0, 4.0), "as was foreseen"
    bookings[1].release(2.5)  # it failed on its way
    assert links(registry) == (3.5, 3.5)
    bookings[2].computed(9.0)
    assert links(registry) == (3.5, 3.5), "a past time"


@pytest.mark.parametrize("prefill", [P, None])
@pytest.mark.parametrize("end", ["free_prefill", "computed", "release"])
def test_a_fetch_takes_links_until_its_prompt_is_computed_and_no_place_in_a_queue(
    registry: Registry, prefill: WorkerId | None, end: str
) -> None:
    registry.add_static(Worker(role=Role.REPLICA, address=R), 0.0)
    changes = {"fetched_tokens": 30, "fetch_link_s": 0.25, "link_s": 0.0}
    booking = LegBooking(registry, D, prefill, replace(ESTIMATES, **changes), source=R)
    booking.reserve(1.0)
    computing, source = registry.view(prefill or D), registry.view(R)
    assert computing is not None
    assert source is not None
    assert computing.queued_prefill_tokens == (60 if prefill else 10)
    assert (source.sends_free_s, computing.receives_free_s) == (1.25, 1.25)
    assert source.inflight == 0
    getattr(booking, end)(1.1)
    source, is_over = registry.view(R), end == "release" or (end == "free_prefill") == (prefill is not None)
    assert source is not None
    assert source.sends_free_s == (1.1 if is_over else 1.25)
    booking.release(2.0)
    assert (decoded(registry)[:2], prefilled(registry)[:2]) == (NOTHING, NOTHING)


def test_a_lender_gets_kv_that_it_keeps(registry: Registry) -> None:
    registry.add_static(Worker(role=Role.DECODE, address=R), 0.0)
    booking = LegBooking(registry, D, R, replace(ESTIMATES, is_lent=True))
    booking.reserve(1.0)
    lender = registry.view(R)
    assert lender is not None
    assert (lender.inflight, lender.queued_prefill_tokens, lender.placed_tokens, lender.decoding) == (1, 90, 90, 0)
    assert (lender.reserved_tokens, lender.prefills, lender.sends_free_s) == (90, 1, 3.5)
    booking.release(2.0)
    lender = registry.view(R)
    assert lender is not None
    assert (lender.inflight, lender.queued_prefill_tokens, lender.reserved_tokens, lender.prefills) == (0, 0, 0, 0)


# -- the handoffs that P keeps


def samples(handoffs: OpenHandoffs, now_s: float) -> list[float]:
    return [sample.value for gauge in handoffs.gauges(now_s) for sample in gauge.samples]


def test_it_counts_what_is_open_and_how_old_the_oldest_is() -> None:
    handoffs = OpenHandoffs()
    assert samples(handoffs, 5.0) == [0, 0]
    handoffs.open("a", 10.0)
    handoffs.open("b", 12.0)
    assert samples(handoffs, 13.0) == [2, 3.0]
    handoffs.close("a")
    handoffs.close("a")
    assert samples(handoffs, 13.0) == [1, 1.0]


def test_what_nobody_pulled_is_counted_until_its_lease_ends() -> None:
    handoffs = OpenHandoffs()
    handoffs.open("a", 0.0)
    handoffs.open("b", 10.0)
    assert handoffs.outstanding(LEASE_S) == 2
    assert handoffs.outstanding(LEASE_S + 1) == 1
    assert handoffs.outstanding(LEASE_S + 11) == 0


class Told:
    """What the other processes hear: of which worker, and whether it has other legs than before."""

    def __init__(self, registry: Registry) -> None:
        self.news = list[tuple[WorkerId, bool]]()
        registry.uses.replicated = self

    def catch_up(self) -> None: ...

    def changed(self, worker: WorkerId, legs: bool) -> None:
        self.news.append((worker, legs))


def test_other_processes_hear_which_changes_are_of_legs(registry: Registry) -> None:
    """They hear of legs at once where little room is left, and of the rest later."""
    told, booking = Told(registry), booked(registry)
    steps = (booking.reserve, booking.free_prefill, booking.computed, booking.release)
    of_legs = []
    for step in steps:
        told.news.clear()
        step(1.0)
        of_legs.append({worker for worker, legs in told.news if legs})
        assert told.news
    assert of_legs == [{P, D}, {P}, set(), {D}]
    told.news.clear()
    registry.answered(D)
    registry.release(D, registry.reserve(D))
    assert told.news == [(D, False), (D, True), (D, True)]
