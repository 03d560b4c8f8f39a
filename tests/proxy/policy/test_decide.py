"""The decision, rule by rule: given a turn and a fleet, which route, which workers, and which reason."""

from __future__ import annotations

from dataclasses import replace as replace_worker

import pytest
from msgspec.structs import replace

from ppd.proxy.beliefs.held import BeliefEvidence
from ppd.proxy.config import Mode, Uncovered
from ppd.proxy.errors import AllDown, NotFound, NoWorkerError
from ppd.proxy.fleet.view import Others, WorkerView
from ppd.proxy.fleet.worker import Load, WorkerId
from ppd.proxy.policy import Excluded, Route, Rules, Turn, has_room
from ppd.proxy.policy.placement import session_share
from tests.support.decisions import (
    D1,
    D2,
    EVICTED,
    FIRST,
    FLEET,
    NEXT,
    P1,
    P2,
    R1,
    Decide,
    by_table,
    fleet_of,
    held,
    rules,
)

SHARED = BeliefEvidence.SHARED_PREFIX


@pytest.mark.parametrize(
    ("by", "route", "reason"),
    [
        (rules(Mode.ALWAYS_LOCAL), Route.LOCAL, "mode_always_local"),
        (rules(Mode.ALWAYS_SPLIT), Route.SPLIT, "mode_always_split"),
        (rules(Mode.FRACTION, x=1.0), Route.LOCAL, "fraction_local"),
        (rules(Mode.FRACTION, x=0.0), Route.SPLIT, "fraction_split"),
        (rules(Mode.REPLICA), Route.REPLICA, "mode_replica"),
        (by_table(1, 1), Route.LOCAL, "table_local"),
        (by_table(0, 1), Route.SPLIT, "table_split"),
        (rules(Mode.TABLE), Route.LOCAL, "no_table"),
        (rules(Mode.TABLE, uncovered=Uncovered.SPLIT), Route.SPLIT, "no_table"),
    ],
)
def test_a_follow_up_turn_goes_where_the_mode_says(run: Decide, by: Rules, route: Route, reason: str) -> None:
    decision = run(NEXT, by=by)
    assert (decision.route, decision.reason) == (route, reason)


@pytest.mark.parametrize(
    ("own", "x", "route"), [(1.0, 0.0, Route.LOCAL), (0.0, 1.0, Route.SPLIT), (None, 1.0, Route.LOCAL)]
)
def test_a_d_with_a_share_of_its_own_goes_by_it(run: Decide, own: float | None, x: float, route: Route) -> None:
    by = rules(Mode.FRACTION, x=x)
    here, there = (replace(view, worker=replace_worker(view.worker, x=own)) for view in (D2, D1))
    decision = run(NEXT, (P1, D1, here), by=by)
    assert (decision.route, decision.reason) == (route, f"fraction_{route.value.lower()}")
    assert run(NEXT, (P1, there, D2), by=by).route is (Route.LOCAL if x else Route.SPLIT)  # the session is on D2


@pytest.mark.parametrize("mode", [Mode.TABLE, Mode.ALWAYS_LOCAL, Mode.ALWAYS_SPLIT, Mode.FRACTION])
def test_the_first_turn_is_split_in_every_mode_of_the_paper(run: Decide, mode: Mode) -> None:
    decision = run(FIRST, by=rules(mode, x=1.0))
    assert (decision.route, decision.reason) == (Route.SPLIT, "first_turn")


def test_a_local_turn_runs_on_the_worker_that_holds_the_prefix(run: Decide) -> None:
    decision = run(NEXT)
    assert decision.decode is D2
    assert decision.prefill is None
    assert decision.cached_tokens == 1000


@pytest.mark.parametrize(
    ("turn", "fleet", "veto"),
    [
        (replace(NEXT, held={}, decode=None), FLEET, "not_resident"),
        (replace(NEXT, held={}, held_tokens=0), FLEET, "not_resident"),
        (replace(NEXT, held=held(R1), decode=R1.id), FLEET, "not_resident"),
        (replace(NEXT, held=held(D2, 400, SHARED), held_tokens=0, number=3), FLEET, "not_resident"),
        (NEXT, (P1, D1, R1), "decode_gone"),
        (NEXT, (P1, D1, replace(D2, up=False)), "decode_down"),
        (NEXT, (P1, D1, replace(D2, draining=True)), "decode_draining"),
        (replace(NEXT, held={}, lost="decode_restarted"), FLEET, "decode_restarted"),
        (EVICTED, FLEET, "evicted"),
        (replace(NEXT, held=held(D2, 499), lost="evicted"), FLEET, "evicted"),
        (replace(EVICTED, held=held(D1, 400, SHARED)), (P1, D1, replace(D2, up=False)), "decode_down"),
        (replace(NEXT, held=held(D2, 800, SHARED)), (P1, D1, replace(D2, inflight=3)), "decode_busy"),
    ],
)
def test_what_stands_against_local_makes_it_a_split_with_the_reason_named(
    run: Decide, turn: Turn, fleet: tuple[WorkerView, ...], veto: str
) -> None:
    decision = run(turn, fleet)
    assert (decision.route, decision.reason, decision.vetoes) == (Route.SPLIT, veto, (veto,))
    assert decision.wanted is Route.LOCAL


@pytest.mark.parametrize(
    ("turn", "by", "route", "cached"),
    [
        (replace(NEXT, held=held(D2, 500)), rules(), Route.LOCAL, 500),
        (replace(NEXT, held={**held(D2, 300), **held(D1, 900)}), rules(), Route.LOCAL, 900),
        (replace(NEXT, held=held(D1, 800, SHARED)), rules(), Route.LOCAL, 800),
        (replace(FIRST, held=held(D1, 80, SHARED), forced=Route.LOCAL), rules(), Route.LOCAL, 80),
    ],
)
def test_local_runs_where_most_is_held(run: Decide, turn: Turn, by: Rules, route: Route, cached: int) -> None:
    decision = run(turn, by=by)
    assert (decision.route, decision.cached_tokens) == (route, cached)


def test_the_table_judges_what_is_left_of_a_prefix(run: Decide) -> None:
    """Little is new to the session, and much to its D: as a turn that adds so much to so little."""
    whole = replace(NEXT, prompt_tokens=8400, held_tokens=8192, held=held(D2, 8192))
    left = replace(whole, held=held(D2, 1024))
    as_such = replace(whole, held_tokens=1024, held=held(D2, 1024))
    verdicts = [run(turn, by=by_table(1, 1)).verdict for turn in (whole, left, as_such)]
    assert verdicts[0] != verdicts[1] == verdicts[2]


def test_a_split_follow_up_returns_to_the_worker_that_lacks_only_the_new_blocks(run: Decide) -> None:
    busy = replace(D2, inflight=9)
    assert run(NEXT, (P1, D1, busy), rules(Mode.ALWAYS_SPLIT)).decode is busy


@pytest.mark.parametrize(
    ("fleet", "chosen"),
    [
        ((P1, replace(D1, inflight=2), replace(D2, inflight=1)), "D2"),
        ((P1, replace(D1, others=Others(requests=3)), replace(D2, inflight=2)), "D2"),
        ((P1, replace(D1, load=Load(kv_usage=0.5)), replace(D2, load=Load(kv_usage=0.2))), "D2"),
        ((P1, replace(D1, load=Load(kv_usage=0.95)), replace(D2, inflight=5)), "D2"),
        ((P1, replace(D1, draining=True), replace(D2, inflight=5)), "D2"),
    ],
)
def test_a_new_session_goes_to_the_decode_worker_with_least_load_and_most_room(
    run: Decide, fleet: tuple[WorkerView, ...], chosen: str
) -> None:
    assert run(FIRST, fleet).decode.name == chosen


@pytest.mark.parametrize(
    ("turn", "fleet", "chosen"),
    [
        (FIRST, (replace(P1, queued_prefill_tokens=500), replace(P2, queued_prefill_tokens=400), D1), "P2"),
        (NEXT, (replace(P1, queued_prefill_tokens=0), replace(P2, queued_prefill_tokens=800), D2), "P2"),
        (NEXT, (replace(P1, queued_prefill_tokens=0), replace(P2, queued_prefill_tokens=950), D2), "P1"),
    ],
)
def test_the_prefill_worker_is_the_one_with_fewest_tokens_to_compute_first(
    run: Decide, turn: Turn, fleet: tuple[WorkerView, ...], chosen: str
) -> None:
    decision = run(turn, fleet, rules(Mode.ALWAYS_SPLIT))
    assert decision.prefill is not None
    assert decision.prefill.name == chosen


def test_new_sessions_spread_over_idle_workers(run: Decide) -> None:
    names = [run(replace(FIRST, session_id=f"{n:016x}")).decode.name for n in range(200)]
    assert 60 < names.count("D1") < 140


@pytest.mark.parametrize(
    ("turn", "fleet", "route", "reason"),
    [
        (FIRST, (R1,), Route.REPLICA, "no_decode_worker"),
        (FIRST, (P1, R1), Route.REPLICA, "no_decode_worker"),
        (FIRST, (D1, R1), Route.REPLICA, "no_prefill_worker"),
        (FIRST, (D1,), Route.LOCAL, "no_prefill_worker"),
        (NEXT, (D2, R1), Route.LOCAL, "no_prefill_worker"),
        (NEXT, (D1, R1), Route.REPLICA, "no_prefill_worker"),
    ],
)
def test_a_fleet_without_a_role_still_answers(
    run: Decide, turn: Turn, fleet: tuple[WorkerView, ...], route: Route, reason: str
) -> None:
    decision = run(turn, fleet, rules(Mode.ALWAYS_SPLIT))
    assert (decision.route, decision.reason) == (route, reason)


def test_kv_never_moves_between_engines_of_different_versions_or_connectors(run: Decide) -> None:
    old = replace(P1, worker=replace_worker(P1.worker, engine_version="0.32.0"))
    other = replace(P2, worker=replace_worker(P2.worker, connector="p2p_nccl"))
    new_d = replace(D1, worker=replace_worker(D1.worker, engine_version="0.33.0"))
    assert run(FIRST, (old, other, new_d)).reason == "no_prefill_worker"


def test_a_worker_that_failed_this_turn_is_not_asked_again(run: Decide) -> None:
    assert run(FIRST, avoid=(P1.id, D1.id)).prefill is P2
    assert run(FIRST, avoid=(P2.id,)).prefill is P1
    assert run(FIRST, avoid=(P1.id, D1.id)).decode is D2
    assert run(NEXT, avoid=(D2.id,)).reason == "decode_failed"


def test_a_pair_that_failed_is_parted_and_both_go_on(run: Decide) -> None:
    parted = [(P1.id, D1.id), (P1.id, D2.id)]
    assert run(FIRST, blocked=parted).prefill is P2
    assert run(FIRST, (P1, D1), blocked=parted).reason == "no_prefill_worker"
    other = run(FIRST, (P1, D1, D2), blocked=[(P1.id, D1.id)])
    assert (other.prefill, other.decode) == (P1, D2)


@pytest.mark.parametrize(
    ("fleet", "blocked", "route", "prefill", "decode"),
    [
        (FLEET, [D1], Route.SPLIT, True, "D2"),
        ((P1, D1), [D1], Route.SPLIT, True, "D1"),  # the only one that could answer
        ((P1, D1, R1), [D1], Route.REPLICA, False, "R1"),
        ((P1, D1), [P1], Route.LOCAL, False, "D1"),  # a turn can do without a P
        ((P1, P2, D1), [P1], Route.SPLIT, True, "D1"),
        ((P1, D1, R1), [P1, D1, R1], Route.REPLICA, False, "R1"),
    ],
    ids=str,
)
def test_who_failed_others_is_asked_only_where_nobody_else_can_answer(
    run: Decide, fleet: tuple[WorkerView, ...], blocked: list[WorkerView], route: Route, prefill: bool, decode: str
) -> None:
    decision = run(FIRST, fleet, blocked=[view.id for view in blocked])
    assert (decision.route, decision.prefill is not None, decision.decode.name) == (route, prefill, decode)
    assert decision.prefill is None or decision.prefill not in blocked


def test_a_new_workers_share_grows(run: Decide) -> None:
    """At 100 s, of a warm-up of 20 s."""
    warming = replace(rules(), warm_up_s=20.0)

    def chosen(since_s: float, inflight: int) -> str:
        return run(FIRST, (P1, replace(D1, inflight=inflight), replace(D2, since_s=since_s)), warming).decode.name

    assert [chosen(100.0, inflight) for inflight in (8, 10)] == ["D1", "D2"]  # it counts as ten times as loaded
    assert [chosen(90.0, inflight) for inflight in (0, 2)] == ["D1", "D2"]
    assert chosen(80.0, 1) == "D2"
    prefills = (replace(P1, queued_prefill_tokens=1000), replace(P2, since_s=95.0), D1)
    assert run(replace(FIRST, prompt_tokens=1000), prefills, warming).prefill is prefills[0]
    assert run(replace(FIRST, prompt_tokens=100), prefills, warming).prefill is prefills[1]


DOWN, UNANSWERED = replace(D1, up=False), replace(D2, up=False, unanswered=True)


@pytest.mark.parametrize(
    ("fleet", "blocked", "decode"),
    [
        ((P1, D1, UNANSWERED), (), "D1"),
        ((P1, D1, UNANSWERED), (D1.id,), "D1"),  # a breaker leaves more hope than probes
        ((P1, UNANSWERED, DOWN), (), "D2"),
        ((P1, replace(R1, up=False, unanswered=True)), (), "R1"),
        ((P1, UNANSWERED), (D2.id,), None),
        ((P1, replace(UNANSWERED, inflight=1)), (), None),  # one turn at a time
        ((P1, DOWN), (), None),
        ((DOWN, replace(D2, draining=True)), (), None),
    ],
)
def test_with_every_worker_down_one_turn_tries_those_with_an_open_port_and_the_rest_wait(
    run: Decide, fleet: tuple[WorkerView, ...], blocked: Excluded, decode: str | None
) -> None:
    assert has_room(fleet_of(fleet), rules(), lambda: blocked) is (decode is not None)
    if decode is None:
        for avoid in ((), (D2.id,)):
            with pytest.raises(AllDown, match="'m' is down"):
                run(FIRST, fleet, blocked=blocked, avoid=avoid)
    else:
        assert run(FIRST, fleet, blocked=blocked).decode.name == decode


@pytest.mark.parametrize("fleet", [(), (P1,), (replace(D1, draining=True),), (replace(DOWN, held_back=True),)])
def test_a_fleet_that_cannot_serve_is_an_error(run: Decide, fleet: tuple[WorkerView, ...]) -> None:
    with pytest.raises(NoWorkerError, match="'m'"):
        run(FIRST, fleet)


def test_workers_of_another_model_are_not_asked(run: Decide) -> None:
    with pytest.raises(NotFound, match="other"):
        run(replace(FIRST, model="other"))
    with pytest.raises(NotFound, match="other"):
        run(replace(FIRST, model="other"), tuple(replace(view, up=False) for view in FLEET))


@pytest.mark.parametrize(
    ("turn", "fleet", "route", "name"),
    [
        (replace(NEXT, single_engine="n"), FLEET, Route.LOCAL, "D2"),
        (replace(FIRST, single_engine="n"), FLEET, Route.REPLICA, "R1"),
        (replace(FIRST, single_engine="n"), (P1, D1), Route.LOCAL, "D1"),
        (replace(NEXT, stored_response=True, held_tokens=0), FLEET, Route.LOCAL, "D2"),
    ],
)
def test_what_needs_one_engine_is_never_split(
    run: Decide, turn: Turn, fleet: tuple[WorkerView, ...], route: Route, name: str
) -> None:
    decision = run(turn, fleet, rules(Mode.ALWAYS_SPLIT))
    assert (decision.route, decision.decode.name) == (route, name)


def test_a_decision_carries_the_numbers_it_used(run: Decide) -> None:
    decision = run(NEXT, by=by_table(1, 1))
    assert decision.verdict is not None
    assert decision.verdict.score is not None and decision.verdict.score > 0
    assert decision.qps == 2.0


@pytest.mark.parametrize("name", ["{:08x}", "chat {}", "-{:07x}"], ids=["digest", "name", "negative"])
def test_sessions_share_out_evenly_for_a_fraction(name: str) -> None:
    shares = [session_share(name.format(n * 2654435761 % 2**32)) for n in range(1000)]
    assert all(0 <= share < 1 for share in shares)
    assert 300 < sum(share < 1 / 3 for share in shares) < 367


def test_a_turn_without_a_session_has_a_share_too() -> None:
    assert 0 <= session_share("") < 1


def test_the_same_session_always_gets_the_same_worker(run: Decide) -> None:
    assert {run(FIRST).decode.id for _ in range(5)} == {WorkerId(run(FIRST).decode.worker.address)}


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("turn", [FIRST, NEXT], ids=["first", "next"])
@pytest.mark.parametrize("forced", [Route.SPLIT, Route.REPLICA])
def test_a_forced_route_replaces_mode_and_table_on_every_turn(
    run: Decide, mode: Mode, turn: Turn, forced: Route
) -> None:
    decision = run(replace(turn, forced=forced), by=replace(by_table(1, 1), mode=mode))
    assert (decision.route, decision.reason, decision.wanted) == (forced, "forced", forced)
    assert decision.verdict is None


@pytest.mark.parametrize("mode", list(Mode))
def test_a_turn_forced_to_be_local_appends_where_its_prefix_is(run: Decide, mode: Mode) -> None:
    decision = run(replace(NEXT, forced=Route.LOCAL), by=replace(by_table(0, 1), mode=mode))
    assert (decision.route, decision.reason, decision.decode) == (Route.LOCAL, "forced", D2)


@pytest.mark.parametrize(
    ("turn", "fleet", "veto"),
    [
        (replace(FIRST, forced=Route.LOCAL), FLEET, "not_resident"),
        (replace(NEXT, forced=Route.LOCAL, held={}, decode=None), FLEET, "not_resident"),
        (replace(NEXT, forced=Route.LOCAL), (P1, D1, R1), "decode_gone"),
        (replace(NEXT, forced=Route.REPLICA), (P1, D1, D2), "no_replica_worker"),
        (replace(FIRST, forced=Route.REPLICA), (P1, D1, replace(R1, draining=True)), "no_replica_worker"),
    ],
)
def test_a_forced_route_that_cannot_be_had_is_a_split_with_the_veto_for_a_reason(
    run: Decide, turn: Turn, fleet: tuple[WorkerView, ...], veto: str
) -> None:
    decision = run(turn, fleet, rules(Mode.REPLICA))
    assert (decision.route, decision.reason, decision.vetoes) == (Route.SPLIT, veto, (veto,))
    assert decision.wanted is turn.forced


@pytest.mark.parametrize("forced", list(Route))
@pytest.mark.parametrize(
    ("turn", "fleet", "route", "reason"),
    [
        (NEXT, (R1,), Route.REPLICA, {Route.REPLICA: "forced"}),
        (replace(NEXT, stored_response=True), (P1, D2), Route.LOCAL, {}),
        (replace(NEXT, stored_response=True), FLEET, Route.LOCAL, {}),  # R has no part of it
        (replace(NEXT, single_engine="n"), (P1, D2), Route.LOCAL, {}),
        (NEXT, (D2,), Route.LOCAL, {Route.LOCAL: "forced"}),
    ],
)
def test_force_does_not_do_what_the_fleet_or_the_request_cannot(
    run: Decide, forced: Route, turn: Turn, fleet: tuple[WorkerView, ...], route: Route, reason: dict[Route, str]
) -> None:
    decision = run(replace(turn, forced=forced), fleet, rules(Mode.ALWAYS_SPLIT))
    assert decision.route is route
    assert (decision.reason == "forced") is (forced in reason)


@pytest.mark.parametrize(
    ("prefers", "requests", "kv_usage", "chosen"),
    [
        (D1, (0, 0), 0.0, D1),
        (D2, (0, 0), 0.0, D2),
        (D2, (3, 7), 0.0, D2),  # a quarter more than the mean, and one
        (D2, (3, 8), 0.0, D1),
        (D2, (3, 3), 0.96, D1),  # full
        (R1, (1, 0), 0.0, D2),  # not one that may take it
    ],
)
def test_what_nobody_holds_goes_where_its_conversation_was_unless_that_has_more_to_do(
    run: Decide, prefers: WorkerView, requests: tuple[int, int], kv_usage: float, chosen: WorkerView
) -> None:
    lost = replace(NEXT, held_tokens=0, held={}, decode=None, affinity=prefers.id)
    fleet = (P1, P2, replace(D1, inflight=requests[0]), replace(D2, inflight=requests[1], load=Load(kv_usage=kv_usage)))
    decision = run(lost, fleet)
    assert (decision.route, decision.decode.id, decision.cached_tokens) == (Route.SPLIT, chosen.id, 0)


def test_a_worker_that_holds_the_prefix_comes_before_the_preferred_one(run: Decide) -> None:
    assert run(replace(NEXT, affinity=D1.id), by=rules(Mode.ALWAYS_SPLIT)).decode.id == D2.id
