"""Workers that the config names anew, or no longer, while they serve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Announcement, Load, Role, Source, Worker

STATIC = Worker(role=Role.DECODE, address="s:1")
AGENTS = replace(STATIC, models=("m",), incarnation="a", source=Source.AGENT)


def only(registry: Registry) -> WorkerView:
    (view,) = registry.views()
    return view


@pytest.mark.parametrize(
    ("said", "role", "left"),
    [
        ({}, Role.DECODE, ["agent"]),
        ({"draining": True}, Role.DECODE, ["agent"]),
        ({}, Role.REPLICA, ["agent"]),
        ({"leaving": True}, Role.DECODE, []),
        (None, Role.DECODE, []),
    ],
)
def test_a_worker_that_the_config_no_longer_names_stays_as_its_agent_announces_it(
    said: dict[str, Any] | None, role: Role, left: list[str]
) -> None:
    """Else all turns would be refused until the next heartbeats, of a fleet that goes over to agents."""
    registry = Registry()
    registry.add_static(STATIC, 0.0)
    registry.probed(STATIC.id, replace(STATIC, models=("m",), incarnation="a"), Load(), 1.0)
    agents = replace(AGENTS, role=role)
    registry.apply(Announcement(agents, Load(5)), 2.0)
    if said is not None:
        registry.apply(Announcement(agents, **said), 3.0)
    registry.unnamed(STATIC.id, now_s=20.0 if said is not None else 40.0, ttl_s=30.0)
    assert [view.worker.source for view in registry.views()] == left
    if left:
        view = only(registry)
        assert (view.role, view.worker.models, view.configured) == (role, ("m",), None)
        assert view.state == ("draining" if said else "up")
        assert registry.expire(34.0, 30.0) == (view,)


def test_a_worker_named_again_goes_on_serving() -> None:
    registry = Registry()
    registry.add_static(STATIC, 0.0)
    registry.probed(STATIC.id, replace(STATIC, models=("m",)), Load(), 1.0)
    registry.add_static(STATIC, 2.0)
    assert only(registry).state == "up"
    registry.add_static(replace(STATIC, engine_version="0.33.0"), 3.0)
    assert (only(registry).state, only(registry).worker.engine_version) == ("up", "0.33.0")
    registry.add_static(replace(STATIC, role=Role.PREFILL), 4.0)
    assert (only(registry).state, only(registry).role) == ("down", Role.PREFILL)
