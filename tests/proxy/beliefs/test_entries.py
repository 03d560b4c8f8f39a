"""Which books have an entry of a key: told at once, and as a walk through all books would tell it."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ppd.proxy.beliefs import cache_book
from ppd.proxy.beliefs.beliefs import Beliefs
from ppd.proxy.beliefs.entries import GROWTH, Entries
from ppd.proxy.beliefs.held import BeliefEvidence, Held, LegOutcome, Mark, PromptEntry, Residency, SentLeg
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Load, Role, Worker, WorkerId
from tests.proxy.uncompiled import uncompiled_beliefs

OWN, SHARED = BeliefEvidence.OWN_TURNS, BeliefEvidence.SHARED_PREFIX
MARKS = tuple(Mark(100 + number, 150 * number) for number in (1, 2, 3))
NUMBERS = st.integers(0, 5)
STEPS = st.tuples(
    st.sampled_from(["ended", "ended", "sent", "begun", "left", "forget", "restart", "gone", "back"]),
    NUMBERS,  # of a worker
    NUMBERS,  # of a history
    st.integers(0, 900),  # tokens
    st.sets(st.sampled_from(MARKS)),
)


def fleet(size: int, capacity: int) -> dict[WorkerId, WorkerView]:
    load = Load(kv_capacity_tokens=capacity)
    workers = [Worker(role=Role.DECODE, address=WorkerId(f"w{number}")) for number in range(size)]
    return {worker.id: WorkerView(worker=worker, name=worker.address, incarnation="0", load=load) for worker in workers}


class Histories:
    """What happens to six workers and six histories."""

    def __init__(self, capacity: int) -> None:
        self.all_views = fleet(6, capacity)
        self.views = dict(self.all_views)
        self.beliefs = Beliefs(self.views.get)
        self._incarnations = 0
        self._legs = 0

    def step(self, step: str, worker: WorkerId, history: int, tokens: int, marks: list[Mark]) -> None:
        beliefs, view = self.beliefs, self.views.get(worker)
        if step == "ended":
            beliefs.ended(history, [Residency(worker, view.incarnation if view else "0", tokens)], marks)
        elif step == "sent":
            self._legs += 1
            beliefs.sent(SentLeg(self._legs, worker, history, tokens, marks))
        elif step in ("begun", "left"):
            beliefs.ended_leg(LegOutcome(self._legs - history, has_used=step == "begun"))
        elif step == "forget":
            beliefs.forget(history, [worker])
        elif step == "gone":
            self.views.pop(worker, None)
        else:  # it is there again, or another engine is
            self._incarnations += step == "restart"
            self.views[worker] = replace(self.all_views[worker], incarnation=str(self._incarnations))

    def walked(self, entry: PromptEntry) -> dict[WorkerId, Held]:
        """What `held` must say."""
        found = dict[WorkerId, Held]()
        for worker, book in self.beliefs._books.items():
            view = self.views.get(worker)
            if view is None or view.incarnation != book.incarnation:
                continue
            own = 0 if entry.source is None else book.held(entry.source)
            shared = self._longest(book, entry)
            if own or shared:
                found[worker] = Held(shared, SHARED) if shared > own else Held(own, OWN)
        return found

    def _longest(self, book: Any, entry: PromptEntry) -> int:
        for mark in reversed(entry.marks):
            known = self.beliefs._marks.get(mark.key)
            for key, most in () if known is None else ((mark.key, 1 << 30), (known >> 30, known & (1 << 30) - 1)):
                slot = book.slot(key)
                if slot and (book.entries.held(slot) or book.entries.own(slot)):
                    return int(min(book.held(key), most))
        return 0


@pytest.mark.parametrize(("capacity", "kept"), [(0, 4), (1000, 1000)])
@given(st.lists(STEPS, max_size=60))
def test_who_holds_a_prompt_is_what_a_walk_through_all_books_finds(
    capacity: int, kept: int, steps: list[tuple[str, int, int, int, set[Mark]]]
) -> None:
    known = Histories(capacity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_book, "ENTRIES_KEPT", kept)
        for step, worker, history, tokens, marks in steps:
            known.step(step, WorkerId(f"w{worker}"), history, tokens, sorted(marks, key=lambda mark: mark.tokens))
    known.step("back", WorkerId("w0"), 0, 0, [])
    beliefs = known.beliefs
    for history in range(6):
        for source in (None, history):
            entry = PromptEntry(history, source, MARKS)
            held = beliefs.held(known.views, entry, 1 << 40)
            assert list(held.items()) == list(known.walked(entry).items()), "in the order of the books, too"
    entries, books = beliefs._entries, beliefs._books.values()
    while beliefs._closed:
        beliefs.ended(0, [Residency(WorkerId("w0"), known.views[WorkerId("w0")].incarnation, 5)], ())
    places = [slots_of(entries, key) for key in (*range(6), *(mark.key for mark in MARKS))]
    assert sum(map(len, places)) == sum(map(len, books)), "none outlives its entry"
    for book in books:
        slots = [slot for end in (book.ahead, book.used) for slot in listed(entries, end)]
        assert len(slots) == len(book)
        assert [entries.slot(entries.key(slot), book.number) for slot in slots] == slots


def slots_of(entries: Entries, key: int) -> dict[int, int]:
    """By the numbers of the books."""
    found, slot = {}, entries.first(key)
    while slot:
        found[entries.number(slot)] = slot
        slot = entries.also(slot)
    return found


def listed(entries: Entries, end: int) -> list[int]:
    """The slots of a list, used longest ago first."""
    found, slot = [], entries.oldest(end)
    while slot != end:
        found.append(slot)
        slot = entries.newer(slot)
    return found


class Unwalked(dict[Any, Any]):
    def __iter__(self) -> NoReturn:
        raise AssertionError("all workers were looked through")

    items = keys = values = __iter__


def test_who_holds_a_prompt_takes_no_walk_through_the_fleet() -> None:
    views = fleet(1000, 10_000)
    beliefs = uncompiled_beliefs()["beliefs"].Beliefs(views.get)  # a class of C takes plain dicts alone
    for number, worker in enumerate(views):
        beliefs.ended(number, [Residency(worker, "0", 500)], ())
    beliefs._books = Unwalked(beliefs._books)
    held = beliefs.held(Unwalked(views), PromptEntry(7, 7, MARKS), 1 << 40)
    assert held == {WorkerId("w7"): Held(500, OWN)}


@pytest.mark.parametrize("books", [1, 2, 4, 5, 300])
def test_a_key_has_one_place_in_each_book(books: int) -> None:
    entries = Entries()
    ends = [entries.open(number) for number in range(1, books + 1)]
    slots = {number: entries.add(7, end) for number, end in enumerate(ends, start=1)}
    assert slots_of(entries, 7) == slots
    for number, slot in sorted(slots.items(), key=lambda item: item[0] * 7 % books):  # in no order
        assert (entries.slot(7, number), entries.slot(7, books + 1), entries.slot(8, number)) == (slot, 0, 0)
        entries.remove(slot)
        del slots[number]
        assert slots_of(entries, 7) == slots
    assert not len(entries)


def test_slots_are_made_as_they_are_needed_and_free_ones_are_used_again() -> None:
    entries = Entries()
    used, ahead = entries.open(1), entries.open(1)
    slots = [entries.add(key, used) for key in range(100, 140)]
    assert sorted(slots) == list(range(3, 43)), "nowhere and the two lists are before them"
    for slot in slots[:30]:
        entries.remove(slot)
    again = [entries.add(key, ahead) for key in range(200, 230)]
    assert sorted(again) == sorted(slots[:30])
    assert [entries.key(slot) for slot in listed(entries, used)] == list(range(130, 140))
    assert [entries.key(slot) for slot in listed(entries, ahead)] == list(range(200, 230))
    for slot in again:
        entries.remove(slot)
    entries.close(ahead)
    assert entries.open(2) == ahead


def test_a_key_of_more_than_64_bits_takes_no_slot() -> None:
    entries = Entries()
    end = entries.open(1)
    for key in (-1, 1 << 64):
        with pytest.raises(OverflowError):
            entries.add(key, end)
    assert entries.add((1 << 64) - 1, end) == 2 <= GROWTH
    assert listed(entries, end) == [2]
