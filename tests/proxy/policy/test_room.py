"""Workers that have as many legs as they should have."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ppd.proxy.errors import AllBusy
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.policy import has_room
from tests.support.decisions import (
    D1,
    D2,
    EVICTED,
    FIRST,
    NEXT,
    P1,
    P2,
    R1,
    fleet_of,
    rules,
    run,
)


def test_a_full_worker_takes_no_more_and_says_so() -> None:
    limited = replace(rules(), worker_limit=3)
    full = replace(D2, inflight=3)
    decision = run(NEXT, (P1, D1, full), limited)
    assert (decision.decode, decision.reason) == (D1, "decode_busy")
    with pytest.raises(AllBusy):
        run(NEXT, (P1, full), limited)
    with pytest.raises(AllBusy):
        run(replace(NEXT, stored_response=True), (P1, D1, full), limited)
    assert run(NEXT, (P1, replace(D1, inflight=2), full), limited).decode.name == "D1"
    assert run(FIRST, (replace(P1, inflight=3), P2, D1), limited).prefill is P2
    assert run(FIRST, (replace(P1, inflight=3), D1), limited).reason == "no_prefill_worker"


def test_a_worker_without_places_gets_no_turn_but_those_whose_prefix_it_holds() -> None:
    crowded = replace(D2, inflight=8, places=8)
    assert run(FIRST, (P1, crowded, replace(D1, inflight=20))).decode.name == "D1"
    assert run(NEXT, (P1, D1, crowded)).decode is crowded
    assert run(EVICTED, (P1, D1, crowded)).decode is D1  # its cache is gone
    decision = run(NEXT, (P1, D1, replace(crowded, inflight=9)), replace(rules(), worker_limit=9))
    assert (decision.decode, decision.reason) == (D1, "decode_busy")
    with pytest.raises(AllBusy):
        run(FIRST, (P1, crowded))


@pytest.mark.parametrize(
    ("fleet", "fits"),
    [
        ((), True),  # nobody to wait for: the decision says so at once
        ((replace(D1, inflight=3),), False),
        ((replace(D1, inflight=3), R1), True),
        ((replace(R1, inflight=3),), False),
        ((replace(D1, inflight=3), replace(R1, up=False)), False),
        ((D1, replace(P1, inflight=3)), True),  # D computes the prompt
        ((replace(D1, inflight=2),), True),
        ((replace(P1, inflight=3),), True),  # nobody could take it, ever
        ((replace(P1, inflight=3), replace(D1, inflight=3, draining=True)), True),
    ],
)
def test_there_is_room_where_some_worker_of_each_kind_has_it(fleet: tuple[WorkerView, ...], fits: bool) -> None:
    assert has_room(fleet_of(fleet), replace(rules(), worker_limit=3)) is fits
    assert has_room(fleet_of(fleet), rules())
    assert not has_room(fleet_of((replace(D1, inflight=2, places=2),)), rules())


def test_who_failed_other_turns_is_asked_only_where_no_d_or_r_has_room() -> None:
    asked = list[str]()

    def blocked() -> tuple[WorkerId, ...]:
        asked.append("who")
        return ()

    assert has_room(fleet_of((D1,)), rules(), blocked)
    assert not asked
    assert not has_room(fleet_of((replace(D1, inflight=2, places=2),)), rules(), blocked)
    assert asked == ["who"]
