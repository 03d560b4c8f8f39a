"""What is believed of engines' events as time goes by."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ppd.proxy.beliefs.held import Residency
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.kv_events.engine_caches import LATE_FOR_S, LATE_S, EngineCaches, _names_sessions
from ppd.proxy.kv_events.event_batch import session_name
from ppd.servers.sim.core.block_pool import BlockRemoved, BlockStored, CacheEvent, Namespace
from ppd.servers.sim.engine.kv_event_encoding import encode_batch

D1, D2 = WorkerId("d1:8200"), WorkerId("d2:8200")
OURS, OTHER = 5, 6
"""Histories, which are sessions' names here."""
BLOCK = 16
AT_ONCE, LATER = LATE_S / 2, 2 * LATE_S


class Engines:
    """Two with two ranks each, which all tell the same; the time is given."""

    def __init__(self) -> None:
        self.caches = EngineCaches(lambda history: history)
        self.now_s = 100.0
        for worker in (D1, D2):
            for rank in (0, 1):
                self.caches.stream(worker, rank).is_behind = False

    def stores(self, worker: WorkerId, history: int, blocks: range) -> None:
        hashes, here, name = [1000 * history + at for at in blocks], Namespace("m"), session_name(history)
        parents = [block - 1 if block % 1000 else None for block in hashes]
        pairs = zip(hashes, parents, strict=True)
        self._tell(worker, [BlockStored(block, parent, (0,) * BLOCK, here, name) for block, parent in pairs])

    def removes(self, worker: WorkerId, history: int, blocks: range) -> None:
        self._tell(worker, [BlockRemoved(1000 * history + at) for at in blocks])

    def _tell(self, worker: WorkerId, events: list[CacheEvent]) -> None:
        for stream in self.caches.streams(worker):
            number = stream.expected or 0
            stream.take(number, encode_batch(events, time_s=float(number), block_size=BLOCK))

    def ended(self, worker: WorkerId, history: int, tokens: int, new: int | None = None) -> None:
        self.caches.stored(worker, history, tokens, tokens if new is None else new, self.now_s)

    def observed(self, last: Residency | None = None, most: int = 10_000) -> Mapping[WorkerId, int]:
        return self.caches.observed(OURS, most, last, self.now_s)


def residency(worker: WorkerId, tokens: int) -> Residency:
    return Residency(worker, "1", tokens)


def test_what_events_tell_counts_up_to_what_is_in_common() -> None:
    engines = Engines()
    assert engines.observed() == {}
    engines.stores(D1, OURS, range(10))
    engines.stores(D2, OTHER, range(10))
    assert engines.observed() == {D1: 160}
    assert engines.observed(most=100) == {D1: 100}


@pytest.mark.parametrize(
    ("last", "observed"),
    [
        (residency(D1, 175), {D1: 160, D2: 80}),  # the last block is not full
        (residency(D1, 400), {D2: 80}),
        (residency(D2, 400), {D1: 160}),
        (None, {D1: 160, D2: 80}),
    ],
)
def test_until_a_turn_is_told_its_worker_is_left_to_the_book(
    last: Residency | None, observed: Mapping[WorkerId, int]
) -> None:
    engines = Engines()
    engines.stores(D1, OURS, range(10))
    engines.stores(D2, OURS, range(5))
    assert engines.observed(last) == observed
    engines.stores(D1, OURS, range(10, 25))
    engines.stores(D2, OURS, range(5, 25))
    assert engines.observed(last) == {D1: 400, D2: 400}


def test_where_another_prompt_of_the_session_was_told_last_the_worker_is_left_to_the_book() -> None:
    engines = Engines()
    engines.stores(D1, OURS, range(10))
    engines.stores(D1, OURS, range(3))
    assert engines.observed(residency(D1, 160)) == {}
    engines.ended(D1, OURS, 160)
    engines.now_s += LATER
    assert engines.observed(residency(D1, 48)) == {D1: 48}, "that is not taken for late"


def test_what_was_told_and_is_gone_is_not_held() -> None:
    engines = Engines()
    engines.stores(D1, OURS, range(10))
    engines.removes(D1, OURS, range(2, 10))
    assert engines.observed(residency(D1, 160)) == {D1: 32}


@pytest.mark.parametrize(
    ("told_after_s", "is_believed"), [(AT_ONCE, True), (LATER, False), (None, False)], ids=["soon", "late", "never"]
)
def test_a_worker_whose_events_come_late_is_left_to_the_book_for_a_while(
    told_after_s: float | None, is_believed: bool
) -> None:
    engines = Engines()
    engines.stores(D1, OURS, range(10))
    engines.ended(D1, OTHER, 160)
    if told_after_s is not None:
        engines.now_s += told_after_s
        assert engines.observed() == ({D1: 160} if told_after_s < LATE_S else {})
        engines.stores(D1, OTHER, range(10))
    engines.now_s += LATER
    assert engines.observed() == ({D1: 160} if is_believed else {})
    engines.now_s += LATE_FOR_S
    assert engines.observed() == {D1: 160}


@pytest.mark.parametrize("new", [0, 3 * BLOCK])
def test_a_turn_that_stores_next_to_nothing_says_nothing_of_lateness(new: int) -> None:
    engines = Engines()
    engines.stores(D1, OURS, range(10))
    engines.ended(D1, OTHER, 160, new)
    engines.now_s += LATER
    assert engines.observed() == {D1: 160}


def test_lateness_is_forgotten_with_the_worker() -> None:
    engines = Engines()
    engines.stores(D1, OURS, range(10))
    engines.ended(D1, OTHER, 160)
    engines.now_s += LATER
    assert engines.observed() == {}
    engines.caches.drop(D1)
    engines.caches.stream(D1, 0).is_behind = False
    engines.stores(D1, OURS, range(10))
    assert engines.observed() == {D1: 160}


def test_an_engine_that_has_started_over_is_heard_anew_in_each_of_its_ranks() -> None:
    """What is still being read of the one before goes to streams of which nobody asks any more."""
    engines = Engines()
    engines.stores(D1, OURS, range(10))
    engines.ended(D1, OURS, 20 * BLOCK)
    before = list(engines.caches.streams(D1))
    engines.now_s += LATER
    engines.caches.renew(D1)
    assert len(list(engines.caches.streams(D1))) == len(before)
    for rank in (0, 1):
        engines.caches.stream(D1, rank).is_behind = False
    assert engines.observed() == {}
    engines.stores(D1, OURS, range(5))
    assert engines.observed() == {D1: 5 * BLOCK}
    assert all(stream.held(OURS) == 10 * BLOCK for stream in before)


def test_of_workers_without_events_nothing_is_kept() -> None:
    engines = Engines()
    engines.ended(WorkerId("d3:8200"), OURS, 160)
    assert not engines.caches._awaited


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("", True),
        ("dev", True),
        ("0.32.0", True),
        ("v0.30", True),
        ("0.24rc1", True),
        ("0.23.1", False),
        ("v0.9.0", False),
        ("1.0", True),
        ("0.²", True),
        ("9" * 5000 + ".1", True),
    ],
)
def test_an_engine_names_sessions_unless_its_version_says_that_it_cannot(version: str, names: bool) -> None:
    assert _names_sessions(version) is names
