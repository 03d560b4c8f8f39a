"""What is believed to be left in one engine's cache, after turns and their answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.beliefs import cache_book
from ppd.proxy.beliefs.cache_book import BLOCK_SAMPLES, ENTRIES_KEPT, RECOVERY, CacheBook
from ppd.proxy.beliefs.held import MARK_BITS, Mark
from tests.proxy.uncompiled import uncompiled_beliefs

HEAD, LONGER = Mark(1000, 300), Mark(1001, 450)
ANOTHER = 99 << MARK_BITS  # a history that has passed them


def book(capacity: int = 1000, **touched: int) -> CacheBook:
    """Sessions a, b, c, ... were used in this order."""
    made = CacheBook("i", marks={HEAD.key: ANOTHER, LONGER.key: ANOTHER})
    made.report(capacity)
    for name, tokens in touched.items():
        made.touch(ord(name), tokens)
    return made


def expect(found: CacheBook, name: str, tokens: int) -> None:
    found.expect(ord(name), found.slot(ord(name)), tokens)


def left(found: CacheBook, names: str) -> list[int]:
    return [found.held(ord(name)) for name in names]


@pytest.mark.parametrize(
    ("touches", "expected"),
    [
        ([("a", 600)], [600, 0, 0]),
        ([("a", 600), ("b", 400)], [600, 400, 0]),
        ([("a", 600), ("b", 500)], [500, 500, 0]),  # of the oldest the end goes first
        ([("a", 600), ("b", 500), ("a", 600)], [600, 400, 0]),
        ([("a", 300), ("b", 300), ("c", 800)], [0, 200, 800]),
        ([("a", 300), ("a", 900)], [900, 0, 0]),  # it grew: what it had counts once
        ([("a", 900), ("a", 300), ("b", 700)], [300, 700, 0]),
        ([("a", 300), ("b", 1500)], [0, 1000, 0]),
    ],
)
def test_what_was_used_longest_ago_shrinks_from_its_end(touches: list[tuple[str, int]], expected: list[int]) -> None:
    found = book()
    for name, tokens in touches:
        found.touch(ord(name), tokens)
    assert left(found, "abc") == expected


def test_an_engine_that_reports_no_capacity_never_evicts_and_forgets_only_what_nobody_asks_for() -> None:
    found = book(0, a=10**6, b=10**6)
    found.found(ord("a"), 0, 10**6, 0)
    found.forget(ord("b"))
    assert left(found, "ab") == [10**6, 0]
    known = book(2000, a=500)
    known.forget(ord("a"))
    assert left(known, "a") == [500], "it goes on taking room in the engine"


def test_entries_are_bounded_where_no_capacity_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENTRIES_KEPT >= 10_000
    monkeypatch.setattr(cache_book, "ENTRIES_KEPT", 3)
    assert left(book(0, a=5, b=5, c=5, d=5), "abcd") == [0, 5, 5, 5]


def test_a_reported_capacity_that_falls_evicts_at_once() -> None:
    found = book(1000, a=500, b=500)
    found.report(600)
    assert (left(found, "ab"), found.tokens) == ([100, 500], 600)


def test_a_shared_beginning_counts_once_and_outlives_its_sessions() -> None:
    found = book(1000)
    for name in "abc":
        found.touch(ord(name), 400, [HEAD])
    assert (left(found, "abc"), found.held(HEAD.key), found.tokens) == ([400, 400, 400], 300, 600)
    found.touch(ord("d"), 600)
    assert (left(found, "abcd"), found.held(HEAD.key)) == ([0, 0, 400, 600], 300)
    found.touch(ord("e"), 300)
    assert (left(found, "cde"), found.held(HEAD.key)) == ([0, 600, 300], 100)


def test_beginnings_nest_and_one_that_is_the_whole_prompt_is_the_session_itself() -> None:
    found = book(1000)
    for name in "ab":
        found.touch(ord(name), 500, [HEAD, LONGER])
    assert found.tokens == 300 + 150 + 50 + 50
    found.touch(ord("c"), 450, [HEAD, LONGER])
    assert (found.held(ord("c")), found.held(LONGER.key)) == (450, 450)


# -- turns under way


def test_turns_that_were_sent_take_room_before_they_hold_anything() -> None:
    found = book(1000, a=600)
    expect(found, "b", 700)
    assert left(found, "ab") == [300, 0]
    found.touch(ord("c"), 300)  # a turn that was sent before b ends: b still comes after it
    found.touch(ord("d"), 100)
    assert left(found, "abcd") == [0, 0, 200, 100]
    found.begin(ord("b"), 700)
    assert left(found, "bcd") == [700, 200, 100]


def test_what_a_session_holds_stands_while_its_next_turn_waits() -> None:
    found = book(1000, a=600)
    expect(found, "a", 650)
    assert (left(found, "a"), found.tokens) == ([600], 650)


@pytest.mark.parametrize("times", [1, 2])
def test_the_room_of_a_turn_that_does_not_come_is_free_again(times: int) -> None:
    found = book(1000, a=600)
    for name, tokens in (("a", 650), ("b", 300)):
        for _ in range(times):
            expect(found, name, tokens)
        for _ in range(times):
            found.withdraw(ord(name))
    assert (left(found, "ab"), found.tokens, len(found), len(found._awaited)) == ([600, 0], 600, 1, 0)


def walked(*_: object) -> NoReturn:
    raise AssertionError("all that waits was looked through")


class UnwalkedKeys(dict[int, int]):
    __iter__ = items = keys = values = walked


def test_a_turn_does_not_look_through_those_that_wait() -> None:
    modules = uncompiled_beliefs()  # a class of C has no methods that a test could replace
    entries: Any = type("Unwalked", (modules["entries"].Entries,), dict.fromkeys(("newer", "older"), walked))()
    found = modules["cache_book"].CacheBook("i", entries)
    found._awaited = UnwalkedKeys()
    found.report(10_000)
    found.touch(ord("a"), 600)
    for name in "bc":
        expect(found, name, 300)
    found.touch(ord("a"), 700)
    found.begin(ord("b"), 300)
    assert left(found, "abc") == [700, 300, 0]


# -- answers


def used(found: CacheBook, name: str) -> int:
    return found.used_since(found.slot(ord(name)))


def test_what_was_used_since_is_counted_where_something_may_be_evicted() -> None:
    found = book(1000, a=100, b=200, c=300)
    assert [used(found, name) for name in "abc"] == [500, 300, 0]
    for roomy in (10_000, 0):
        assert used(book(roomy, a=100, b=200, c=300), "c") == 300, "of a cache that is half empty, all others"


def test_counting_stops_where_it_would_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_book, "LOOKED_AT", 2)
    found = book(1000, a=100, b=200, c=300, d=50)
    assert [used(found, name) for name in "abc"] == [550, 450, 50]


@pytest.mark.parametrize(
    ("since", "cached", "capacity"),
    [
        (500, 400, 1000),
        (500, 350, 1000),  # an eighth less than was believed: estimates err, and templates leave text out
        (500, 349, 849),
        (500, 0, 500),
        (100, 349, 1000),  # so young that its text may have changed: what is there proves that it was not evicted
        (100, 0, 1000),  # once is no proof
    ],
)
def test_a_prefix_that_is_gone_lowers_the_capacity_to_what_was_used_since(
    since: int, cached: int, capacity: int
) -> None:
    found = book(1000, a=400)
    found.found(ord("a"), since, 400, cached)
    assert found.capacity == capacity


def test_young_prefixes_that_are_gone_twice_in_a_row_are_evicted() -> None:
    found = book(1000, a=400, b=100)
    found.found(ord("c"), 100, 400, 0)
    found.found(ord("a"), 100, 400, 400)
    found.found(ord("c"), 100, 400, 0)
    assert (found.capacity, left(found, "ab")) == (1000, [400, 100])
    found.found(ord("a"), 100, 400, 50)
    assert (found.capacity, left(found, "ab")) == (150, [50, 100])


def test_one_history_that_is_never_found_says_nothing_of_others() -> None:
    """Whatever it is that is rendered anew each time, the engine holds what others have there."""
    found = book(1000, b=100, a=400, c=300)
    for cached in (0, 30, 20):
        found.found(ord("a"), 300, 400, cached)
    assert (found.capacity, left(found, "abc"), found.tokens) == (1000, [20, 100, 300], 420)
    for _ in range(3):
        found.found(ord("a"), 300, 400, 0)
    assert (found.capacity, left(found, "abc"), found.tokens) == (1000, [0, 100, 300], 400)


def test_young_prefixes_of_which_a_part_is_missing_lower_nothing_however_often() -> None:
    found = book(1000, a=400, b=100)
    for _ in range(20):
        found.found(ord("a"), 100, 400, 250)
    assert (found.capacity, left(found, "ab")) == (1000, [400, 100])


def test_prefixes_found_whole_raise_the_capacity_step_by_step_to_what_is_reported() -> None:
    found = book(RECOVERY * 10, a=400)
    found.found(ord("a"), RECOVERY * 8, 400, 0)
    seen = []
    for _ in range(RECOVERY):
        found.found(ord("a"), 0, 400, 390)
        seen.append(found.capacity)
    assert seen[:2] == [RECOVERY * 8 + 10, RECOVERY * 8 + 20]
    assert (seen[-1], max(seen)) == (RECOVERY * 10, RECOVERY * 10)


def test_more_than_was_believed_raises_it_by_as_much() -> None:
    found = book(100_000, a=400)
    found.found(ord("a"), 60_000, 400, 0)
    found.found(ord("a"), 0, 400, 20_400)
    assert found.capacity == 80_000


def test_a_cache_in_which_nothing_is_believed_to_stay_is_tried_again() -> None:
    """Else no turn would run LOCAL there, and no answer could ever tell."""
    found = book(RECOVERY * 100, a=400)
    for history in (ord("a"), ord("b")):
        found.found(history, 0, 400, 0)
    least = found.capacity
    for name in range(1000, 1000 + RECOVERY):
        found.expect(name, 0, 100)
    assert (least, found.capacity) == (16, RECOVERY * 100)


def test_what_one_history_lacks_leaves_a_turn_that_is_under_way_its_room_counted() -> None:
    found = book(1000, a=400)
    expect(found, "a", 600)
    for _ in range(2):
        found.found(ord("a"), 0, 400, 0)
    assert (found.held(ord("a")), found.tokens) == (0, 0)
    found.begin(ord("a"), 600)
    assert (found.held(ord("a")), found.tokens) == (600, 600)


def slots(found: CacheBook, end: int) -> Iterator[int]:
    slot = found.entries.oldest(end)
    while slot != end:
        yield slot
        slot = found.entries.newer(slot)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["touch", "expect", "begin", "withdraw", "found"]), st.integers(0, 5), st.integers(0, 900)
        )
    )
)
def test_the_sum_is_that_of_its_entries_and_fits(steps: list[tuple[str, int, int]]) -> None:
    found = book(1000)
    for step, key, tokens in steps:
        marks = [HEAD] if key % 2 else []
        if step == "expect":
            found.expect(key, found.slot(key), tokens, marks)
        elif step == "found":
            found.found(key, tokens, 500, 10 * key)
        elif step == "withdraw":
            found.withdraw(key)
        else:
            (found.touch if step == "touch" else found.begin)(key, tokens, marks)
        rooms = [found.entries.own(slot) for end in (found.ahead, found.used) for slot in slots(found, end)]
        assert found.tokens == sum(rooms) <= found.capacity <= 1000
        assert all(0 <= found.held(name) <= 900 for name in range(6))


@pytest.mark.parametrize("block", [16, 24, 32, 48, 64, 128, 256, 544, 1056, 2096])
def test_what_larger_blocks_leave_over_is_not_taken_for_evicted(block: int) -> None:
    found, held = book(1_000_000), 20 * block
    for _ in range(BLOCK_SAMPLES):
        found.found(ord("a"), 0, held, held // block * block)
        held += 171 + block
    held = 4 * block - 1  # of which a block and a part are missing: more than an eighth
    for _ in range(20):
        found.touch(ord("a"), held)
        found.found(ord("a"), 900_000, held, held // block * block - block)
    assert found.capacity == 1_000_000


def test_counts_that_are_alike_by_chance_hide_no_miss() -> None:
    """Sessions of one length, as in benchmarks: what their counts have in common looks like a huge block."""
    found = book(100_000, a=2000)
    for _ in range(BLOCK_SAMPLES):
        found.found(ord("a"), 60_000, 2000, 2000)
    found.found(ord("a"), 60_000, 2000, 0)
    assert found.capacity == 60_000


def test_a_branch_of_a_session_whose_next_turn_is_under_way_leaves_it_its_room() -> None:
    found = book(4000, a=500)
    expect(found, "a", 1500)
    found.pass_on(ord("a"), 400)
    assert found.tokens == 1100
