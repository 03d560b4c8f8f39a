"""The room's modules as C and as Python from the same files: on any history they answer alike and keep the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ppd.proxy.beliefs import beliefs, cache_book, entries, turn_touches
from ppd.proxy.beliefs.held import (
    BookLessons,
    CacheFound,
    Held,
    LegOutcome,
    Mark,
    PromptEntry,
    Residency,
    SentLeg,
)
from ppd.proxy.beliefs.turn_touches import TurnCaches
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Load, Role, Worker, WorkerId
from tests.proxy.uncompiled import is_compiled, uncompiled_beliefs

COMPILED = (beliefs, cache_book, entries, turn_touches)
UNCOMPILED = uncompiled_beliefs()

pytestmark = pytest.mark.skipif(not is_compiled(*COMPILED), reason="the compiled modules are not built")

WORKERS = tuple(WorkerId(f"w{number}") for number in range(4))
KEYS = (0, 1, 2, (1 << 64) - 1)
MARKS = (Mark(100, 150), Mark((1 << 63) + 1, 300), Mark(102, 450), Mark(103, 1 << 40))
TOKENS = st.sampled_from([0, 1, 100, 290, 310, 600, 900, 2000, -5, 1 << 29, (1 << 30) + 1, 1 << 40, 1 << 61])
PART = st.sampled_from(MARKS)
STEP = st.tuples(
    st.sampled_from(
        ["sent", "sent", "begun", "left", "ended", "found", "turn", "forget", "capacity", "lessons", "gone"]
    ),
    st.sampled_from(WORKERS),
    st.sampled_from(KEYS),
    TOKENS,
    st.lists(PART, max_size=3, unique=True),
    st.lists(PART, max_size=2, unique=True),
    TOKENS,
)


class World:
    """One kind of beliefs, and what is told to them."""

    def __init__(self, beliefs: Callable[..., Any], touches: Callable[..., Any]) -> None:
        load = Load(kv_capacity_tokens=1500)
        workers = [Worker(role=Role.PREFILL if name == "w0" else Role.DECODE, address=name) for name in WORKERS]
        self.views = {one.id: WorkerView(worker=one, name=one.address, incarnation="0", load=load) for one in workers}
        self.beliefs, self._touches, self._legs, self._turns = beliefs(self.views.get, 8), touches, 0, 0

    def step(self, step: str, worker: WorkerId, key: int, tokens: int, marks: Any, points: Any, more: int) -> Any:
        """What is answered."""
        told, view = self.beliefs, self.views.get(worker)
        was = Residency(worker, "0" if view is None else view.incarnation, tokens)
        if step == "sent":
            self._legs += 1
            source = None if more < 0 else more % 3
            return told.sent(
                SentLeg(1000 + self._legs, worker, key, tokens, marks, points, more > 600, source, 250), -1
            )
        if step in ("begun", "left"):
            return told.ended_leg(LegOutcome(1000 + self._legs - key % 3, has_used=step == "begun"))
        if step == "ended":
            return told.ended(key, [was, None], marks)
        if step == "found":
            return told.found(CacheFound(key, was, more, min(tokens, 700)))
        if step == "turn":
            return self._turn(PromptEntry(key, key, marks, was, points, more), worker, tokens, more)
        if step == "forget":
            return told.forget(key, [worker, None])
        if step == "lessons":
            return told.adopt_lessons(
                BookLessons(worker, was.incarnation, max(0, tokens), max(0, more), key * (tokens % 2))
            )
        if step == "gone":
            return self.views.pop(worker, None) and None
        for name, one in list(self.views.items()):  # an engine says another capacity, and one in two has restarted
            incarnation = str(more) if tokens % 2 else one.incarnation
            self.views[name] = replace(one, load=Load(kv_capacity_tokens=max(0, tokens)), incarnation=incarnation)
        return told.capacities()

    def _turn(self, entry: PromptEntry, worker: WorkerId, tokens: int, cached: int) -> Any:
        held = self.beliefs.held(self.views, entry, 1 << 40, {WORKERS[1]: 40} if tokens == 100 else None)
        caches = TurnCaches(worker, WORKERS[0] if cached % 2 else None, next(iter(held), None), tokens)
        turn = self._touches(self.beliefs, entry, held, tokens, caches)
        turn.sent()
        if caches.prefill is not None:
            turn.prefilled(cached)
        turn.answering()
        late = turn.settled()
        late.answered(cached)
        turn.close()
        return held, type(late).__name__

    def state(self) -> Any:
        told = self.beliefs
        found = []
        for worker in WORKERS:
            if (book := told.book(worker)) is not None:
                sums = (
                    book.number,
                    book.incarnation,
                    len(book),
                    book.tokens,
                    book.evicted,
                    book.reported,
                    book.capacity,
                )
                since = [book.used_since(book.slot(key)) for key in (*KEYS, *(mark.key for mark in MARKS))]
                shared = [book.is_shared(key, mark) for key in KEYS for mark in MARKS]
                elsewhere = [told.is_held_elsewhere(key, book, prefills_answer=False) for key in KEYS]
                lists = (book.oldest(99), book.newest(99), book.room(), book.lessons, book._awaited)
                found.append((worker, sums, since, shared, elsewhere, *lists))
        prompts = [PromptEntry(key, source, MARKS[:3]) for key in KEYS for source in (None, key)]
        held = [list(told.held(self.views, entry, 1 << 40).items()) for entry in prompts]
        kept = [told.lasting([*MARKS[:2]], MARKS[2:], Residency(worker, "0", 5)) for worker in WORKERS]
        return found, held, kept, told.legs(), told.lessons(), list(told._marks.items()), told._passed


def outcome(call: Callable[..., Any], *given: Any) -> Any:
    try:
        return call(*given)
    except Exception as exc:
        return type(exc)


@given(st.lists(STEP, max_size=40))
def test_every_answer_and_all_that_is_kept_is_the_same(steps: list[tuple[Any, ...]]) -> None:
    ours = World(beliefs.Beliefs, turn_touches.TurnTouches)
    plain = World(UNCOMPILED["beliefs"].Beliefs, UNCOMPILED["turn_touches"].TurnTouches)
    for step in steps:
        assert outcome(ours.step, *step) == outcome(plain.step, *step)
        assert ours.state() == plain.state()
    views = ours.views.values()
    assert all(isinstance(held, Held) for held in ours.beliefs.held(ours.views, PromptEntry(1, 1), 9).values()), views
