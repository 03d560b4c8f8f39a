"""What workers have told of themselves when they were asked: how long it holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ppd.proxy.connectors import can_pair, missing_coordinates
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import NO_EVENTS, UNHEARD, Announcement, EventSource, Role, Source, Worker

P = Worker(role=Role.PREFILL, address="10.0.0.5:8100", source=Source.STATIC)
CONFIGURED = {"bootstrap_port": "9"}
TOLD = {**CONFIGURED, "engine_id": "e"}
EVENTS = EventSource("tcp://10.0.0.5:5557")


@pytest.mark.parametrize(
    ("before", "again", "was_down", "keeps"),
    [
        ("a", "a", False, True),
        ("a", "a", True, True),  # it had only been slow
        ("a", "b", False, False),
        ("a", "b", True, False),
        ("a", "", False, True),  # its metrics were late too
        ("a", "", True, False),  # it may have begun anew
        ("", "", False, True),  # an engine that tells no start time
        ("", "", True, False),
        ("", "b", False, False),
    ],
)
def test_what_a_probe_learns_is_kept_where_the_next_query_fails(
    before: str, again: str, was_down: bool, keeps: bool
) -> None:
    registry = Registry()
    told = replace(P, coordinates=CONFIGURED, incarnation=before)
    registry.add_static(told, 0.0)
    registry.probed(told.id, replace(told, coordinates={"engine_id": "e"}), None, 0.0)
    if was_down:
        registry.probe_failed(told.id)
    registry.probed(told.id, replace(told, coordinates={}, incarnation=again), None, 1.0)
    (view,) = registry.views()
    assert view.worker.coordinates == (TOLD if keeps else CONFIGURED)


def test_another_answer_replaces_the_one_before() -> None:
    registry = Registry()
    told = replace(P, coordinates=CONFIGURED, incarnation="a")
    registry.add_static(told, 0.0)
    registry.probed(told.id, replace(told, coordinates={"engine_id": "e", "engine_id.1": "f"}), None, 0.0)
    registry.probed(told.id, replace(told, coordinates={"engine_id": "g"}), None, 1.0)
    (view,) = registry.views()
    assert view.worker.coordinates == {**CONFIGURED, "engine_id": "g"}


KNOWN = replace(P, coordinates=CONFIGURED, incarnation="a", models=("m",), engine_version="0.32.0", kv_events=EVENTS)


@pytest.mark.parametrize(
    ("changed", "holds"),
    [
        ({"labels": {"zone": "b"}}, ("m", "0.32.0", EVENTS, TOLD)),
        ({"x": 0.5, "models": ("n",)}, ("n", "0.32.0", EVENTS, TOLD)),
        ({"engine_version": "0.33.0", "kv_events": UNHEARD}, ("m", "0.33.0", UNHEARD, TOLD)),
        ({"coordinates": {}}, ("m", "0.32.0", EVENTS, {"engine_id": "e"})),
        ({"coordinates": {"bootstrap_port": "8"}}, ("m", "0.32.0", EVENTS, {**TOLD, "bootstrap_port": "8"})),
        ({"connector": "mooncake"}, ("m", "0.32.0", EVENTS, CONFIGURED)),
        ({"role": Role.DECODE}, ("", "", NO_EVENTS, CONFIGURED)),  # it may be another engine
    ],
    ids=str,
)
def test_under_a_changed_config_what_an_engine_has_told_holds_until_it_is_asked_again(
    changed: dict[str, Any], holds: tuple[Any, ...]
) -> None:
    """Or it would seem to serve any model for a moment, to tell no events any more, and to pair with no other one."""
    registry, configured = Registry(), replace(P, coordinates=CONFIGURED)
    registry.add_static(configured, 0.0)
    registry.probed(P.id, replace(KNOWN, coordinates={"engine_id": "e"}), None, 0.0)
    registry.add_static(replace(configured, **changed), 1.0)
    worker = registry.views()[0].worker
    told = worker.engine_version, worker.kv_events, worker.coordinates
    assert ("".join(worker.models), *told) == holds
    assert (worker.labels, worker.x) == (changed.get("labels", {}), changed.get("x"))


@pytest.mark.parametrize("source", [Source.AGENT, Source.PING])
def test_what_a_heartbeat_tells_late_anew_or_no_more_holds_from_then_on(source: Source) -> None:
    registry, told = Registry(), replace(P, connector="p2p_nccl", source=source)
    decode = replace(told, role=Role.DECODE, address="10.0.0.6:8200", coordinates={"zmq_address": "b:1"})
    registry.apply(Announcement(decode), 0.0)
    for coordinates in ({}, {"zmq_address": "a:1"}, {"zmq_address": "a:2"}, {}):
        registry.apply(Announcement(replace(told, coordinates=coordinates)), 1.0)
        view, other = registry.view(told.id), registry.view(decode.id)
        assert view is not None and other is not None
        assert view.worker.coordinates == coordinates
        assert missing_coordinates(view.worker) == (() if coordinates else ("zmq_address",))
        assert can_pair(view.worker, other.worker) is bool(coordinates)
        assert [one.worker.coordinates for one in registry.fleet("m").prefills] == [coordinates]


def test_a_late_probe_does_not_undo_what_a_ping_has_told() -> None:
    registry, pinging = Registry(), replace(P, source=Source.PING, coordinates={"zmq_address": "a:1"})
    registry.apply(Announcement(pinging), 0.0)
    registry.apply(Announcement(replace(pinging, coordinates={"zmq_address": "a:2"})), 1.0)
    registry.probed(pinging.id, pinging, None, 1.0)
    view = registry.view(pinging.id)
    assert view is not None and view.worker.coordinates == {"zmq_address": "a:2"}
