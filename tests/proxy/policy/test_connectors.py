"""What connectors ask of workers, as the decision sees it."""

from __future__ import annotations

import contextlib
from dataclasses import replace as replace_worker
from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy.config import Mode
from ppd.proxy.errors import AllBusy, AllDown, NoWorkerError
from ppd.proxy.fleet.order import SORTED_FROM
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Announcement, Role, Source, Worker
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.policy import Route, Turn
from ppd.proxy.policy.candidates import find_candidates
from ppd.proxy.policy.placement import ways_to_serve
from tests.support.decisions import D1, D2, FIRST, NEXT, P1, P2, R1, rules, run

NEEDING_A_P: dict[str, dict[str, str]] = {"sglang": {}, "p2p_nccl": {"zmq_address": "a:1"}}


def told(view: WorkerView, connector: str, **coordinates: str) -> WorkerView:
    return replace(view, worker=replace_worker(view.worker, connector=connector, coordinates=coordinates))


def test_a_worker_that_lacks_a_coordinate_serves_no_split() -> None:
    p1, p2, d1 = (told(view, "p2p_nccl", zmq_address="a:1") for view in (P1, P2, D1))
    silent_p, silent_d = told(P1, "p2p_nccl"), told(D2, "p2p_nccl", takes_plain="true")
    decision = run(FIRST, (silent_p, p2, silent_d, d1))
    assert (decision.prefill, decision.decode) == (p2, d1)
    d1 = told(D1, "p2p_nccl", zmq_address="a:1", takes_plain="true")
    for fleet in ((silent_p, d1), (p1, silent_d)):
        decision = run(FIRST, fleet)
        assert (decision.route, decision.vetoes) == (Route.LOCAL, ("missing_coordinates",))


@pytest.mark.parametrize("connector", NEEDING_A_P)
@pytest.mark.parametrize(
    ("mode", "turn", "fleet", "route", "reason"),
    [
        (Mode.ALWAYS_LOCAL, NEXT, "PD", Route.SPLIT, "needs_prefill"),
        (Mode.ALWAYS_LOCAL, NEXT, "DR", Route.REPLICA, "no_prefill_worker"),
        (Mode.CONDITIONAL, NEXT, "PD", Route.SPLIT, "needs_prefill"),
        (Mode.SESSION_HASH, NEXT, "PD", Route.SPLIT, "needs_prefill"),
        (Mode.ALWAYS_SPLIT, FIRST, "PD", Route.SPLIT, "first_turn"),
        (Mode.ALWAYS_LOCAL, replace(NEXT, single_engine="n"), "PDR", Route.REPLICA, "single_engine"),
    ],
)
def test_a_d_that_needs_a_p_takes_no_local_turn(
    connector: str, mode: Mode, turn: Turn, fleet: str, route: Route, reason: str
) -> None:
    views = {"P": told(P1, connector, **NEEDING_A_P[connector]), "D": told(D2, connector, **NEEDING_A_P[connector])}
    views["R"] = R1
    decision = run(turn, tuple(views[role] for role in fleet), rules(mode))
    assert (decision.route, decision.reason) == (route, reason)


@pytest.mark.parametrize("connector", NEEDING_A_P)
@pytest.mark.parametrize(("turn", "fleet"), [(NEXT, "D"), (replace(NEXT, single_engine="n"), "PD")])
def test_where_only_a_d_that_needs_a_p_is_left_the_turn_is_refused(connector: str, turn: Turn, fleet: str) -> None:
    views = {"P": told(P1, connector, **NEEDING_A_P[connector]), "D": told(D2, connector, **NEEDING_A_P[connector])}
    with pytest.raises(NoWorkerError, match="alone"):
        run(turn, tuple(views[role] for role in fleet))


@pytest.mark.parametrize(
    ("takes_plain", "route", "vetoes"), [("true", Route.LOCAL, ()), ("false", Route.SPLIT, ("needs_prefill",))]
)
def test_a_d_of_p2p_nccl_may_say_that_it_takes_plain_requests(
    takes_plain: str, route: Route, vetoes: tuple[str, ...]
) -> None:
    d2 = told(D2, "p2p_nccl", zmq_address="a:1", takes_plain=takes_plain)
    decision = run(NEXT, (told(P1, "p2p_nccl", zmq_address="a:1"), d2), rules(Mode.ALWAYS_LOCAL))
    assert (decision.route, decision.vetoes) == (route, vetoes)


@pytest.mark.parametrize(
    ("connector", "endpoint", "route", "reason"),
    [
        ("sglang", Endpoint.CHAT, Route.SPLIT, "first_turn"),
        ("sglang", Endpoint.MESSAGES, Route.REPLICA, "endpoint_not_split"),
        ("sglang", Endpoint.RESPONSES, Route.REPLICA, "endpoint_not_split"),
        ("trtllm", Endpoint.COMPLETIONS, Route.SPLIT, "first_turn"),
        ("trtllm", Endpoint.MESSAGES, Route.REPLICA, "endpoint_not_split"),
        ("p2p_nccl", Endpoint.MESSAGES, Route.SPLIT, "first_turn"),
        ("p2p_nccl", Endpoint.RESPONSES, Route.REPLICA, "endpoint_not_split"),
        ("unknown", Endpoint.MESSAGES, Route.REPLICA, "no_prefill_worker"),
    ],
)
def test_a_turn_that_no_connector_can_split_is_one_engines(
    connector: str, endpoint: Endpoint, route: Route, reason: str
) -> None:
    p1, d1 = (told(view, connector, zmq_address="a:1") for view in (P1, D1))
    decision = run(replace(FIRST, endpoint=endpoint), (p1, d1, R1))
    assert (decision.route, decision.reason) == (route, reason)


@pytest.mark.parametrize(
    ("connector", "endpoint", "route"),
    [
        ("trtllm", Endpoint.COMPLETIONS, Route.SPLIT),
        ("trtllm", Endpoint.MESSAGES, Route.LOCAL),
        ("sglang", Endpoint.CHAT, Route.SPLIT),
        ("sglang", Endpoint.MESSAGES, None),
    ],
)
@pytest.mark.parametrize("is_up", [True, False])
def test_a_d_that_is_tried_while_it_is_down_is_asked_for_no_more_than_one_that_is_up(
    connector: str, endpoint: Endpoint, route: Route | None, is_up: bool
) -> None:
    p1, d1 = (told(view, connector) for view in (P1, D1))
    fleet = p1, replace(d1, up=is_up, unanswered=not is_up)
    with contextlib.nullcontext() if route else pytest.raises(NoWorkerError):
        assert run(replace(FIRST, endpoint=endpoint), fleet).route is route


def test_of_several_p_those_are_asked_whose_connector_can_split_the_turn() -> None:
    fleet = told(P1, "trtllm"), told(D1, "trtllm"), P2, D2
    for endpoint in (Endpoint.MESSAGES, Endpoint.RESPONSES):
        decision = run(replace(FIRST, endpoint=endpoint), fleet)
        assert (decision.prefill, decision.decode) == (P2, D2)


def test_the_fleet_says_that_it_serves_no_local_turns() -> None:
    views = [told(view, "sglang") for view in (P1, D1)]
    assert ways_to_serve(views) == {"split": True, "local": False, "replica": False}


@pytest.mark.parametrize("count", [2, SORTED_FROM])
def test_a_p_whose_connector_cannot_split_an_endpoint_is_not_asked_for_it(count: int) -> None:
    """However many P there are."""
    registry = Registry()
    for name, connector in (("sglang", "sglang"), ("nixl", "nixl")):
        for role in "PD":
            for number in range(count if role == "P" else 1):
                worker = Worker(role=Role(role), address=f"{name}{role}{number}:1", models=("m",), connector=connector)
                registry.apply(Announcement(replace_worker(worker, source=Source.AGENT)), 0.0)
    turn = replace(FIRST, endpoint=Endpoint.MESSAGES)
    found = find_candidates(turn, registry.fleet("m"), rules(), qps=1.0, now_s=0.0, avoid=(), blocked=())
    assert {view.worker.connector for view in found.prefills} == {"nixl"}


@pytest.mark.parametrize("blocked", [[P1.id], [(P1.id, D1.id)], [P1.id, D1.id]])
def test_a_p_that_failed_others_is_asked_where_no_turn_can_do_without(blocked: list[Any]) -> None:
    p1, d1 = told(P1, "sglang"), told(D1, "sglang")
    assert run(FIRST, (p1, d1), blocked=blocked).prefill == p1
    assert run(FIRST, (p1, told(P2, "sglang"), d1), avoid=[P1.id]).prefill is not p1
    with pytest.raises(NoWorkerError):
        run(FIRST, (p1, d1), avoid=[P1.id])


def test_a_turn_that_needs_a_p_waits_for_one_that_is_busy() -> None:
    busy, d1 = replace(told(P1, "sglang"), inflight=3), told(D1, "sglang")
    with pytest.raises(AllBusy, match="every P"):
        run(FIRST, (busy, d1), rules(worker_limit=3))
    assert run(FIRST, (busy, d1, R1), rules(worker_limit=3)).route is Route.REPLICA


def test_a_turn_that_needs_a_p_waits_for_one_that_is_down() -> None:
    down, d1 = replace(told(P1, "sglang"), up=False), told(D1, "sglang")
    with pytest.raises(AllDown, match="every P"):
        run(FIRST, (down, d1))
    assert run(FIRST, (down, told(P2, "sglang"), d1)).prefill is not None
    with pytest.raises(NoWorkerError, match="alone"):
        run(FIRST, (replace(down, held_back=True), d1))
