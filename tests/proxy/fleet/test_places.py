"""How many legs a worker should have, by what its engine reports."""

from __future__ import annotations

import pytest

from ppd.proxy.fleet.places import MOST, START, UNKNOWN, learned
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import Announcement, Load, Role, Source, Worker

IDLE = Load(kv_capacity_tokens=4096)


def load(running: int, waiting: int = 0) -> Load:
    return Load(running, waiting, 0.5, 4096)


@pytest.mark.parametrize(
    ("places", "inflight", "before", "now", "then"),
    [
        (UNKNOWN, 40, Load(), Load(), UNKNOWN),  # the engine reports nothing
        (UNKNOWN, 0, Load(), IDLE, START),
        (UNKNOWN, 0, Load(), load(200, 3), 200),  # other proxies use it
        (16, 3, IDLE, load(3), 16),  # not used up: nothing is learnt
        (16, 16, load(9), load(16), 24),  # used up, and nothing waits inside
        (16, 16, load(9), load(9), 24),  # its turns are still on P
        (MOST, MOST, load(9), load(9), MOST),
        (64, 64, load(8), load(8, 56), 64),  # one sample: it may be taking in a burst
        (64, 64, load(2, 62), load(8, 56), 64),  # it is
        (64, 64, load(8, 56), load(8, 56), 10),
        (64, 40, load(8, 56), load(8, 30), 12),
        (64, 5, load(8, 56), load(8, 56), 10),  # late, when its turns have left: it still runs 8
        (64, 64, load(256, 40), load(256, 40), 288),  # of which other proxies have most
        (10, 10, load(8, 2), load(8, 2), 10),  # what it should have waiting
        (10, 10, load(8, 2), load(8, 1), 10),
    ],
)
def test_places_follow_reports(places: int, inflight: int, before: Load, now: Load, then: int) -> None:
    assert learned(places, inflight, before, now) == then


@pytest.mark.parametrize("runs", [1, 8, 100, 256, 1000])
def test_places_settle_just_above_what_an_engine_runs(runs: int) -> None:
    places, before, seen = START, IDLE, list[int]()
    for _ in range(40):  # reports while more turns arrive than it can take
        now = load(min(runs, places), max(0, places - runs))
        places, before = learned(places, places, before, now), now
        seen.append(places)
    assert min(seen[20:]) >= runs
    assert max(seen[20:]) <= 1.5 * (runs + max(2, runs // 8))


@pytest.mark.parametrize(("role", "places"), [(Role.PREFILL, UNKNOWN), (Role.DECODE, START), (Role.REPLICA, START)])
def test_who_learns_places(role: Role, places: int) -> None:
    registry = Registry()
    worker = Worker(role=role, address="a:1", incarnation="1", source=Source.AGENT)
    registry.apply(Announcement(worker, IDLE), 0.0)
    (view,) = registry.views()
    assert view.places == places


def test_a_new_engine_at_the_same_address_starts_over() -> None:
    registry = Registry()
    for incarnation, places in (("1", 24), ("2", START)):
        worker = Worker(role=Role.DECODE, address="a:1", incarnation=incarnation, source=Source.AGENT)
        registry.apply(Announcement(worker, IDLE), 0.0)
        for _ in range(START):
            registry.reserve(worker.id)
        if incarnation == "1":
            registry.loaded(worker.id, load(START), 0.0)
        (view,) = registry.views()
        assert view.places == places
