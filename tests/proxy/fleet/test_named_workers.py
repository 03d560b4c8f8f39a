"""Workers that the config names anew, or no longer, while they serve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Announcement, Load, Role, Source, Worker, WorkerId

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
    registry.add_static(STATIC, 100.0)
    registry.probed(STATIC.id, replace(STATIC, models=("m",), incarnation="a"), Load(), 101.0)
    agents = replace(AGENTS, role=role)
    registry.apply(Announcement(agents, Load(5)), 102.0)
    if said is not None:
        registry.apply(Announcement(agents, **said), 103.0)
    registry.unnamed(STATIC.id, now_s=120.0 if said is not None else 140.0, ttl_s=30.0)
    assert [view.worker.source for view in registry.views()] == left
    if left:
        view = only(registry)
        assert (view.role, view.worker.models, view.configured) == (role, ("m",), None)
        assert view.state == ("draining" if said else "up")
        assert registry.expire(134.0, 30.0) == (view,)


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


def test_names_that_another_process_gave_are_kept_and_counted_on() -> None:
    """Of the one that watched the workers until it died."""
    first, second = Registry(), Registry()
    for number in (1, 2, 3):
        first.apply(Announcement(replace(AGENTS, address=f"a:{number}")), 0.0)
    first.remove(WorkerId("a:1"))
    for view in first.views():
        second.adopt(view)
    second.remove(WorkerId("a:2"))
    for address in ("a:9", "a:2"):
        second.apply(Announcement(replace(AGENTS, address=address)), 1.0)
    assert {view.id: view.name for view in second.views()} == {"a:2": "D2", "a:3": "D3", "a:9": "D4"}


def test_the_names_of_a_model_are_those_that_were_listed_last() -> None:
    registry = Registry()
    registry.add_static(STATIC, 0.0)
    for aliases in ({"n": "m"}, {"n": "m", "o": "m"}):
        registry.probed(STATIC.id, replace(STATIC, models=("m", *aliases), aliases=aliases), Load(), 1.0)
        assert [registry.family(name) for name in aliases] == ["m"] * len(aliases)
        registry.probed(STATIC.id, STATIC, Load(), 2.0)  # it could not be asked this time
        assert (only(registry).worker.models, only(registry).worker.aliases) == (("m", *aliases), aliases)


def test_a_worker_that_answers_turns_is_up_whatever_its_probes_say() -> None:
    registry = Registry()
    registry.add_static(STATIC, 0.0)
    registry.probed(STATIC.id, replace(STATIC, models=("m",)), Load(), 1.0)
    registry.probe_failed(STATIC.id)
    assert (only(registry).state, only(registry).unanswered) == ("down", True)
    registry.outranked(STATIC.id, 5.0)
    assert (only(registry).state, only(registry).unanswered, only(registry).since_s) == ("up", False, 5.0)
    registry.probe_failed(STATIC.id, refused=True)  # nothing could have answered there
    registry.outranked(STATIC.id, 6.0)
    assert only(registry).state == "down"
