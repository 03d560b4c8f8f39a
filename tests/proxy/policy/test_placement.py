"""Which worker of a role gets a turn: what each holds of it, against what each has to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace as replace_worker

import pytest
from msgspec.structs import replace

from ppd.proxy.beliefs.held import BeliefEvidence, Held
from ppd.proxy.config import Mode
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.ledger import LegEstimates
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import Others, WorkerView
from ppd.proxy.fleet.worker import Announcement, Load, Role, Source, Worker, WorkerId
from ppd.proxy.policy import Route, Turn, decide
from ppd.proxy.policy.placement import own_worker, ways_to_serve
from tests.support.decisions import D1, D2, EVICTED, FIRST, NEXT, P1, P2, R1, held, rules, run, view

SHARED = BeliefEvidence.SHARED_PREFIX
LONG = replace(FIRST, prompt_tokens=10_000)
R2, R3, R4 = (view("R", number) for number in (2, 3, 4))


def shared(*holders: WorkerView, tokens: int = 8000) -> Mapping[WorkerId, Held]:
    return {one.id: Held(tokens, SHARED) for one in holders}


@pytest.mark.parametrize(
    ("fleet", "holders", "chosen"),
    [
        ((D1, D2), (), {"D1", "D2"}),
        ((D1, D2), (D2,), {"D2"}),
        ((D1, D2, view("D", 3)), (D2, D1), {"D1", "D2"}),
        ((D1, replace(D2, inflight=5)), (D2,), {"D2"}),
        ((D1, replace(D2, inflight=6)), (D2,), {"D1"}),  # above 1.25 times the mean by more than two
        ((replace(D1, inflight=8), replace(D2, inflight=18)), (D2,), {"D2"}),
        ((replace(D1, inflight=8), replace(D2, inflight=19)), (D2,), {"D1"}),
        ((D1, replace(D2, others=Others(requests=14))), (D2,), {"D1"}),
        ((D1, replace(D2, load=Load(kv_usage=0.97))), (D2,), {"D1"}),
        ((D1, replace(D2, recent_tokens=25_000)), (D2,), {"D2"}),
        ((D1, replace(D2, recent_tokens=30_000)), (D2,), {"D1", "D2"}),
        ((D1, replace(D2, queued_prefill_tokens=9000)), (D2,), {"D1"}),  # it would have more to compute
        ((R1, R2, R3, R4), (R3,), {"R3"}),
        ((R1, R2, replace(R3, inflight=2), R4), (R3,), {"R3"}),
        ((R1, R2, replace(R3, inflight=3), R4), (R3,), {"R1", "R2", "R4"}),
    ],
)
def test_a_first_turn_goes_to_who_holds_its_beginning_unless_others_are_idler(
    fleet: tuple[WorkerView, ...], holders: tuple[WorkerView, ...], chosen: set[str]
) -> None:
    found = {
        run(replace(LONG, held=shared(*holders), session_id=f"{n:016x}"), (P1, *fleet)).decode.name for n in range(30)
    }
    assert found == chosen


@pytest.mark.parametrize(("queued", "chosen"), [(7900, "P2"), (8100, "P1")])
def test_a_p_that_holds_the_beginning_is_worth_as_many_queued_tokens(queued: int, chosen: str) -> None:
    turn = replace(LONG, held=shared(P2))
    decision = run(turn, (P1, replace(P2, queued_prefill_tokens=queued), D1))
    assert decision.prefill is not None and decision.prefill.name == chosen


@pytest.mark.parametrize(
    ("turn", "fleet", "chosen"),
    [
        (replace(NEXT, held=held(D2, 500)), (P1, D1, replace(D2, inflight=9)), "D2"),  # its own, however busy
        (replace(NEXT, held=held(D2, 499)), (P1, D1, replace(D2, inflight=9)), "D1"),
        (EVICTED, (P1, D1, replace(D2, inflight=1)), "D1"),
        (replace(NEXT, held={}, held_tokens=0), (P1, D1, replace(D2, inflight=1)), "D2"),  # where it last was
        (replace(NEXT, held={}, held_tokens=0), (P1, D1, replace(D2, inflight=9)), "D1"),
        (replace(NEXT, held={}, held_tokens=0, lost="decode_restarted"), (P1, D1, replace(D2, inflight=1)), "D1"),
        (replace(NEXT, held={}, stored_response=True), (P1, D1, replace(D2, inflight=9)), "D2"),
    ],
)
def test_a_follow_up_that_is_split_returns_to_its_own_worker(
    turn: Turn, fleet: tuple[WorkerView, ...], chosen: str
) -> None:
    assert run(turn, fleet, rules(Mode.ALWAYS_SPLIT)).decode.name == chosen


# -- what was placed counts at once


def idle_fleet(usage: Mapping[str, float]) -> Registry:
    registry = Registry()
    for name in ("P1", "P2", "D1", "D2"):
        worker = Worker(role=Role(name[0]), address=f"{name}:1", models=("m",), incarnation="i", source=Source.AGENT)
        load = Load(kv_usage=usage.get(name, 0.0), kv_capacity_tokens=400_000)
        registry.apply(Announcement(worker, load), 0.0)
    return registry


@pytest.mark.parametrize("usage", [{}, {"D2": 0.02}, {"D1": 0.03, "D2": 0.01}])
@pytest.mark.parametrize("head", [False, True])
def test_first_turns_between_two_reports_of_an_idle_fleet_spread_over_it(usage: dict[str, float], head: bool) -> None:
    """Each ends before the next comes, so no worker is ever busier than another."""
    registry, chosen, holders = idle_fleet(usage), Counter[str](), dict[WorkerId, Held]()
    for number in range(48):
        turn = replace(LONG, session_id=f"{number:016x}", held=dict(holders) if head else {})
        decision = decide(turn, registry.fleet("m"), rules(), qps=0.0, now_s=0.0)
        assert decision.route is (Route.LOCAL if decision.cached_tokens else Route.SPLIT)
        decode, prefill = decision.decode.id, None if decision.prefill is None else decision.prefill.id
        new = turn.prompt_tokens - decision.cached_tokens
        booking = LegBooking(registry, decode, prefill, LegEstimates(prompt_tokens=turn.prompt_tokens, new_tokens=new))
        booking.reserve(0.0)
        booking.release(0.0)
        holders[decode] = Held(8000, SHARED)
        chosen[decision.decode.name] += 1
    assert max(chosen.values()) <= 1.25 * 24, chosen


@pytest.mark.parametrize(("is_shared", "is_own"), [(True, False), (False, True)])
def test_a_head_that_others_brought_makes_no_worker_the_sessions_own(is_shared: bool, is_own: bool) -> None:
    """Where a session's own cache is gone, its like would else all move to the worker that comes first."""
    turn = replace(NEXT, held={D1.id: Held(900, BeliefEvidence.KV_EVENTS, is_shared)})
    assert (own_worker(turn, (D1, D2)) is not None) is is_own


@pytest.mark.parametrize(
    ("roles", "ways"),
    [
        ("", (False, False, False)),
        ("P", (False, False, False)),
        ("D", (False, True, False)),
        ("PD", (True, True, False)),
        ("R", (False, False, True)),
        ("PDR", (True, True, True)),
    ],
)
def test_ways_to_serve(roles: str, ways: tuple[bool, bool, bool]) -> None:
    views = [view(role, 1) for role in roles]
    assert tuple(ways_to_serve(views).values()) == ways
    assert ways_to_serve(views, prefills_answer=True)["replica"] is ("P" in roles or "R" in roles)
    views.append(replace(D2, worker=replace_worker(D2.worker, has_sidecar=True)))
    assert ways_to_serve(views, prefills_answer=True)["replica"] is ("R" in roles)


@pytest.mark.parametrize("first", [D1, D2])
@pytest.mark.parametrize("own", [D1, D2])
def test_of_two_that_hold_as_much_a_session_stays_on_the_one_that_had_its_last_turn(
    own: WorkerView, first: WorkerView
) -> None:
    turn = replace(NEXT, held={**held(first), **held(D1), **held(D2)}, decode=own.id)
    assert run(turn).decode is own
    assert run(turn, by=rules(Mode.ALWAYS_SPLIT)).decode is own
