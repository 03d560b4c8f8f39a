"""What virtual engines publish, as the proxy's own code reads it."""

from __future__ import annotations

import pytest

from benchmarks.recognition.engines.block_cache import BLOCK_TOKENS, BlockCache
from benchmarks.recognition.engines.kv_events import EventPublisher, EventSetup, Reports
from benchmarks.recognition.engines.workers import VirtualTime
from ppd.proxy.kv_events.event_batch import CacheChange, Cleared, Removed, Stored, decode, session_name
from ppd.servers.sim.core.config import EventEncoding

ONE, OTHER = session_name(1), session_name(2)
_BITS = 2**64 - 1


class Watched:
    """A cache of four blocks, and what is heard of it."""

    def __init__(self, **setup: object) -> None:
        self.time = VirtualTime()
        self.heard: list[tuple[int, float, list[CacheChange]]] = []  # number, time, changes
        self.publisher = EventPublisher(EventSetup(**setup), self.time)  # type: ignore[arg-type]
        self.publisher.subscribe(self._hear)
        self.cache = BlockCache(4 * BLOCK_TOKENS, self.publisher)

    def _hear(self, number: int, batch: bytes) -> None:
        self.heard.append((number, self.time.now_s, decode(batch).changes))

    def use(self, session: str, *keys: int) -> None:
        taken = self.cache.take(keys, len(keys), session)
        assert taken is not None
        self.cache.publish(taken[0], keys)
        self.cache.release(taken[0])

    def changes(self) -> list[CacheChange]:
        self.time.run()
        return [change for _, _, changes in self.heard for change in changes]


def told(changes: list[CacheChange]) -> list[tuple[object, ...]]:
    return [
        (list(one.hashes), one.parent, one.session)
        if isinstance(one, Stored)
        else tuple(one.hashes)
        if isinstance(one, Removed)
        else ()
        for one in changes
    ]


def test_what_is_new_is_told_with_its_session_and_what_comes_before_it() -> None:
    watched = Watched()
    watched.use(ONE, 1, -2)
    watched.use(OTHER, 1, -2, 3)
    watched.use(ONE, 1, -2)  # a hit
    assert told(watched.changes()) == [([1, -2 & _BITS], None, 1), ([3], -2 & _BITS, 2)]


def test_hits_are_told_to_those_who_ask_for_them() -> None:
    watched = Watched(reports=Reports.FULL)
    watched.use(ONE, 1, 2)
    watched.use(OTHER, 1, 2)
    assert told(watched.changes()) == [([1, 2], None, 1), ([1, 2], None, 2)]


def test_evictions_are_told_one_by_one_and_the_end_of_a_cache_at_once() -> None:
    watched = Watched()
    watched.use(ONE, 1, 2, 3)
    watched.use(OTHER, 4, 5)
    assert watched.cache.clear()
    stored, *removed, again, cleared = watched.changes()
    assert told([stored, *removed, again]) == [([1, 2, 3], None, 1), (3,), ([4, 5], None, 2)]
    assert isinstance(cleared, Cleared)
    assert watched.cache.holds([1]) == 0


def test_a_cache_in_use_is_not_cleared() -> None:
    watched = Watched()
    taken = watched.cache.take([1], 1, ONE)
    assert taken is not None
    assert not watched.cache.clear()
    watched.cache.release(taken[0])
    assert watched.cache.clear()


def test_a_batch_holds_what_one_moment_changed_and_comes_later() -> None:
    watched = Watched(delay_s=2.0)
    watched.use(ONE, 1, 2, 3)
    watched.use(OTHER, 4, 5)
    watched.time.after(1.0, lambda: watched.use(ONE, 6))
    watched.time.run()
    assert [(number, at_s, len(changes)) for number, at_s, changes in watched.heard] == [(0, 2.0, 3), (1, 3.0, 2)]


@pytest.mark.parametrize(("encoding", "session"), [(EventEncoding.MAP, 1), (EventEncoding.ARRAY, None)])
def test_old_engines_name_no_session(encoding: EventEncoding, session: int | None) -> None:
    watched = Watched(encoding=encoding)
    watched.use(ONE, 1)
    assert told(watched.changes()) == [([1], None, session)]
