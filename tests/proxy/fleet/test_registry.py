"""Joining, staying, leaving: the registry's rules for each source of workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from ppd.proxy.fleet.ledger import RECENT_TOKENS, LegWork, Use
from ppd.proxy.fleet.order import MODELS_KEPT
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import Fleet, WorkerView, taking_turns
from ppd.proxy.fleet.worker import Announcement, Load, Role, Source, Worker, WorkerId
from ppd.proxy.fleet.worker_names import NAMES_KEPT

D = Worker(role=Role.DECODE, address="d:1", models=("m",), incarnation="a", source=Source.AGENT)
PING = Worker(role=Role.PREFILL, address="p:1", connector="p2p_nccl", source=Source.PING)
STATIC = Worker(role=Role.DECODE, address="s:1")


def heard(*announcements: Announcement, now_s: float = 0.0) -> Registry:
    registry = Registry()
    for said in announcements:
        registry.apply(said, now_s)
    return registry


def only(registry: Registry) -> WorkerView:
    (view,) = registry.views()
    return view


def test_a_heartbeat_brings_a_worker_and_its_load() -> None:
    view = only(heard(Announcement(D, Load(3, 1, 0.5, 4096))))
    assert (view.name, view.incarnation, view.load.running, view.state) == ("D1", "a", 3, "up")


def test_silent_workers_are_dropped_after_their_time() -> None:
    registry = heard(Announcement(D))
    assert registry.expire(30.0, ttl_s=30.0) == ()
    assert [view.id for view in registry.expire(30.1, ttl_s=30.0)] == ["d:1"]
    assert registry.views() == ()


def test_static_workers_do_not_expire_but_go_down_and_up_by_probes() -> None:
    registry = Registry()
    registry.add_static(STATIC, 0.0)
    assert only(registry).state == "down"
    registry.probed(STATIC.id, replace(STATIC, models=("m",), incarnation="7"), Load(), 1.0)
    assert (only(registry).state, only(registry).worker.models) == ("up", ("m",))
    assert registry.expire(10_000.0, ttl_s=30.0) == ()
    registry.probe_failed(STATIC.id)
    assert only(registry).state == "down"


def test_a_new_incarnation_is_seen_and_what_is_in_flight_there_stays_counted() -> None:
    registry = heard(Announcement(D))
    registry.reserve(D.id)
    registry.apply(Announcement(replace(D, incarnation="b")), 1.0)
    view = only(registry)
    assert (view.incarnation, view.inflight) == ("b", 1)


def test_an_engine_that_tells_no_incarnation_gets_a_new_one_when_it_rejoins() -> None:
    registry = heard(Announcement(PING))
    first = only(registry).incarnation
    registry.apply(Announcement(PING), 3.0)
    assert only(registry).incarnation == first
    registry.expire(100.0, ttl_s=30.0)
    registry.apply(Announcement(PING), 101.0)
    assert only(registry).incarnation != first


def test_an_agents_word_stands_over_its_engines_own_pings() -> None:
    agent = replace(PING, role=Role.REPLICA, source=Source.AGENT, connector="nixl", incarnation="x")
    registry = heard(Announcement(agent), Announcement(PING))
    assert (only(registry).role, only(registry).worker.connector) == (Role.REPLICA, "nixl")


def test_the_configs_word_on_a_static_worker_stands_over_messages() -> None:
    registry = Registry()
    registry.add_static(STATIC, 0.0)
    registry.apply(Announcement(replace(D, address="s:1", role=Role.PREFILL), Load(5)), 1.0)
    assert (only(registry).role, only(registry).load.running) == (Role.DECODE, 5)
    registry.apply(Announcement(replace(D, address="s:1"), leaving=True), 2.0)
    assert len(registry.views()) == 1


def test_a_probe_without_metrics_keeps_the_last_load_and_incarnation() -> None:
    registry = Registry()
    registry.add_static(STATIC, 0.0)
    registry.probed(STATIC.id, replace(STATIC, incarnation="7"), Load(9), 1.0)
    registry.probed(STATIC.id, STATIC, None, 2.0)
    assert (only(registry).incarnation, only(registry).load.running) == ("7", 9)


def test_a_heartbeat_without_models_does_not_make_a_worker_serve_any() -> None:
    registry = heard(Announcement(D), Announcement(replace(D, models=())))
    assert only(registry).worker.models == ("m",)


def test_the_operators_draining_holds_whatever_the_worker_says() -> None:
    registry = heard(Announcement(D))
    registry.hold_back(D.id, True)
    registry.apply(Announcement(D), 1.0)
    registry.apply(Announcement(replace(D, incarnation="b")), 2.0)
    assert only(registry).state == "draining"
    registry.hold_back(D.id, False)
    assert only(registry).state == "up"


def drained_static() -> Registry:
    """Its agent was stopped, and has said so."""
    registry = Registry()
    registry.add_static(STATIC, 0.0)
    registry.probed(STATIC.id, replace(STATIC, incarnation="a"), Load(), 1.0)
    registry.apply(Announcement(replace(D, address="s:1", incarnation="a"), draining=True), 2.0)
    registry.probed(STATIC.id, replace(STATIC, incarnation="a"), Load(), 3.0)
    registry.probe_failed(STATIC.id)
    registry.probed(STATIC.id, STATIC, Load(), 4.0)
    registry.add_static(STATIC, 5.0)
    assert only(registry).state == "draining"
    return registry


def closed_and_back(registry: Registry) -> None:
    registry.probe_failed(STATIC.id, refused=True)
    assert only(registry).state == "down"
    registry.probed(STATIC.id, STATIC, Load(), 7.0)


ENDS_OF_DRAINING: dict[str, Callable[[Registry], object]] = {
    "another incarnation": lambda it: it.probed(STATIC.id, replace(STATIC, incarnation="b"), Load(), 6.0),
    "its port was closed": closed_and_back,
    "the operator": lambda it: it.hold_back(STATIC.id, False),
    "another config": lambda it: it.add_static(replace(STATIC, engine_version="2"), 6.0),
    "its agent": lambda it: it.apply(Announcement(replace(D, address="s:1", incarnation="a")), 6.0),
}


@pytest.mark.parametrize("end", ENDS_OF_DRAINING)
def test_what_ends_the_draining_of_a_static_worker(end: str) -> None:
    registry = drained_static()
    ENDS_OF_DRAINING[end](registry)
    assert only(registry).state == "up"


def test_only_a_worker_that_was_found_healthy_may_be_asked_against_its_probes() -> None:
    registry = Registry()
    registry.add_static(STATIC, 0.0)
    seen = []
    for is_healthy, refused in ((False, False), (True, False), (False, False), (False, True), (False, False)):
        if is_healthy:
            registry.probed(STATIC.id, STATIC, Load(), 1.0)
        else:
            registry.probe_failed(STATIC.id, refused=refused)
        seen.append(only(registry).unanswered)
    assert seen == [False, False, True, False, False]


def test_a_restart_does_not_end_what_the_operator_holds_back() -> None:
    registry = drained_static()
    registry.hold_back(STATIC.id, True)
    closed_and_back(registry)
    assert (only(registry).draining, only(registry).state) == (False, "draining")


def test_answers_of_every_process_are_signs_of_life_and_none_is_forgotten() -> None:
    registry = heard(Announcement(D))
    seen = [registry.answers(D.id)]
    registry.answered(D.id)
    seen.append(registry.answers(D.id))
    registry.used_by(1, D.id, Use(answers=5))
    seen.append(registry.answers(D.id))
    registry.ended(1)
    seen.append(registry.answers(D.id))
    assert seen == [0, 1, 6, 6]


@pytest.mark.parametrize("reported", [Load(kv_usage=0.2), Load()])
def test_what_was_placed_counts_until_the_engine_reports_its_load(reported: Load) -> None:
    registry = heard(Announcement(D, Load()))
    for _ in range(2):
        leg = LegWork(placed_tokens=300)
        used = registry.begin(D.id, leg, 0.0)
        assert used is not None
        used.end(leg)
    registry.used_by(1, D.id, Use(placed_tokens=50))
    assert only(registry).placed_tokens == 650, "ended turns too, as the engine has not told what became of them"
    registry.apply(Announcement(D), 1.0)
    assert only(registry).placed_tokens == 650
    registry.loaded(D.id, reported, 2.0)
    assert only(registry).placed_tokens == 50, "the other process will say that it has heard"


def test_what_was_brought_lately_counts_on_and_halves_as_more_comes_anywhere() -> None:
    other = replace(D, address="d:2")
    registry = heard(Announcement(D, Load()), Announcement(other, Load()))
    registry.begin(D.id, LegWork(placed_tokens=RECENT_TOKENS), 0.0)
    registry.loaded(D.id, Load(kv_usage=0.2), 2.0)
    assert [view.recent_tokens for view in registry.views()] == [RECENT_TOKENS, 0], "whatever the engine reports"
    registry.begin(other.id, LegWork(placed_tokens=RECENT_TOKENS + 2), 0.0)
    assert [view.recent_tokens for view in registry.views()] == [RECENT_TOKENS // 2, RECENT_TOKENS // 2 + 1]


def test_strangers_names_do_not_pile_up_and_the_newest_stay() -> None:
    registry, names = Registry(), list[str]()
    for number in (*range(NAMES_KEPT + 1), 1, 0):
        registry.apply(Announcement(replace(D, address=f"h{number}:1")), 0.0)
        names.append(only(registry).name)
        registry.remove(WorkerId(f"h{number}:1"))
    assert (names[1], names[-2], names[0]) == ("D2", "D2", "D1")
    assert names[-1] == f"D{NAMES_KEPT + 2}", "the oldest was forgotten"


def test_a_re_roled_worker_changes_its_name_and_keeps_what_runs_there() -> None:
    registry = heard(Announcement(D))
    registry.begin(D.id, LegWork(prefill_tokens=70), 0.0)
    registry.apply(Announcement(replace(D, role=Role.PREFILL)), 1.0)
    assert (only(registry).name, only(registry).inflight, only(registry).queued_prefill_tokens) == ("P1", 1, 70)


@pytest.mark.parametrize("field", ["draining", "leaving"])
def test_a_draining_worker_takes_no_turns_and_a_leaving_one_is_forgotten(field: str) -> None:
    said: Any = {field: True}
    registry = heard(Announcement(D), Announcement(D, **said))
    assert not any(view.takes_turns("m") for view in registry.views())
    assert len(registry.views()) == (1 if field == "draining" else 0)


def test_counts_return_to_zero_and_never_below() -> None:
    registry = heard(Announcement(D))
    used = registry.reserve(D.id)
    registry.release(D.id, used)
    registry.release(D.id, used)
    assert only(registry).inflight == 0


def test_a_request_that_outlives_its_worker_is_none_of_the_one_that_came_back() -> None:
    registry = heard(Announcement(D))
    old = registry.reserve(D.id)
    registry.remove(D.id)
    registry.apply(Announcement(D), 0.0)
    new = registry.reserve(D.id)
    registry.release(D.id, old)
    assert only(registry).inflight == 1
    registry.release(D.id, new)
    assert only(registry).inflight == 0


def test_what_happens_on_a_worker_that_left_is_ignored() -> None:
    registry = Registry()
    registry.release(WorkerId("gone:1"), registry.reserve(WorkerId("gone:1")))
    assert registry.views() == ()


FLEET_STEPS: list[Callable[[Registry], object]] = [
    lambda registry: registry.apply(Announcement(D, Load(1)), 0.0),
    lambda registry: registry.apply(Announcement(D, Load(2), draining=True), 0.0),
    lambda registry: registry.apply(Announcement(replace(D, models=("other",))), 0.0),
    lambda registry: registry.apply(Announcement(replace(D, incarnation="b")), 0.0),
    lambda registry: registry.apply(Announcement(D, leaving=True), 0.0),
    lambda registry: registry.apply(Announcement(PING), 0.0),
    lambda registry: registry.apply(Announcement(replace(PING, role=Role.REPLICA)), 0.0),
    lambda registry: registry.add_static(STATIC, 0.0),
    lambda registry: registry.probed(STATIC.id, replace(STATIC, models=("m",)), Load(), 0.0),
    lambda registry: registry.probe_failed(STATIC.id),
    lambda registry: registry.probe_failed(STATIC.id, refused=True),
    lambda registry: registry.outranked(STATIC.id, 0.0),
    lambda registry: registry.hold_back(D.id, True),
    lambda registry: registry.reserve(D.id),
    lambda registry: registry.begin(STATIC.id, LegWork(prefill_tokens=10, placed_tokens=10), 0.0),
    lambda registry: registry.release(D.id, registry.use(D.id)),
    lambda registry: registry.used_by(1, D.id, Use(inflight=3)),
    lambda registry: registry.ended(1),
    lambda registry: registry.adopt(
        WorkerView(worker=STATIC, name="D9", incarnation="x"),
    ),
    lambda registry: registry.dismiss(STATIC.id),
    lambda registry: registry.expire(1000.0, ttl_s=30.0),
]


def fleet_of(registry: Registry, model: str) -> Fleet:
    views = registry.views()
    fleet = Fleet.of({view.id: view for view in views}, taking_turns(views, model))
    return replace_struct(fleet, newest_s=registry.fleet(model).newest_s)


@given(steps=st.lists(st.sampled_from(range(len(FLEET_STEPS))), max_size=30))
@example(steps=list(range(len(FLEET_STEPS))))
def test_the_fleet_of_a_model_is_what_the_views_say_after_every_step(steps: list[int]) -> None:
    registry = Registry()
    for step in steps:
        FLEET_STEPS[step](registry)
        for model in ("m", "other", "m"):
            assert registry.fleet(model) == fleet_of(registry, model)
            assert registry.fleet(model) is registry.fleet(model)
            assert all(view.since_s <= registry.fleet(model).newest_s for view in registry.views())


def test_models_that_clients_make_up_do_not_pile_up() -> None:
    registry = heard(Announcement(replace(D, models=())))  # it has not said yet which it serves
    for number in range(3 * MODELS_KEPT):
        assert registry.fleet(f"model {number}") == fleet_of(registry, f"model {number}")
    assert max(len(registry._rosters._by_model), len(registry._rosters.known)) <= MODELS_KEPT


@pytest.mark.parametrize(
    ("aliases", "family"),
    [
        ([{}], "m"),
        ([{"m": "a"}], "a"),
        ([{"m": "b"}, {"b": "a"}], "a"),
        ([{"a": "m", "m": "a"}], "a"),  # a worker's nonsense makes no loop
    ],
)
def test_the_names_of_one_model_are_one_family(aliases: list[dict[str, str]], family: str) -> None:
    workers = [replace(D, address=f"d:{at}", aliases=known) for at, known in enumerate(aliases)]
    registry = heard(*map(Announcement, workers))
    assert registry.family("m") == registry.family(family) == family
    assert registry.families() == {family}
    for worker in workers:
        registry.remove(worker.id)
    assert registry.family("m") == "m"


def test_a_model_that_a_worker_has_lost_is_its_again_once_it_is_listed() -> None:
    listed = Announcement(replace(D, models=("m", "adapter")))
    registry = heard(listed)
    registry.lost_model(D.id, "adapter")
    registry.lost_model(WorkerId("gone:1"), "adapter")
    assert only(registry).worker.models == ("m",)
    registry.lost_model(D.id, "m")
    assert only(registry).worker.models == ("m",), "without any name it would get every model's turns"
    registry.apply(listed, 1.0)
    assert only(registry).worker.models == ("m", "adapter")
