from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd.proxy.kv_events.block_index import FORKS_LIMIT, SWEEP_SLACK, BlockIndex
from ppd.proxy.kv_events.event_batch import CacheChange, Cleared, Removed, Stored

A, B, C = 1, 2, 3
"""Sessions."""

Step = tuple[Any, ...]


def store(hashes: Sequence[int], parent: int | None = None, session: int | None = A, **other: int) -> Stored:
    return Stored(array("Q", hashes), parent, other.get("tokens", 16), other.get("group", 0), session)


def remove(*hashes: int, group: int = 0) -> Removed:
    return Removed(array("Q", hashes), group)


PROMPT, MORE = store([1, 2, 3]), store([4, 5], 3)


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ([], {A: None}),
        ([PROMPT], {A: 48, B: None}),
        ([PROMPT, MORE], {A: 80}),
        ([PROMPT, PROMPT, MORE, MORE, PROMPT], {A: 48}),  # again, as of a prompt that parted after its third block
        ([PROMPT, MORE, remove(5)], {A: 64}),
        ([PROMPT, MORE, remove(2)], {A: 16}),
        ([PROMPT, MORE, remove(5, 4, 3, 2, 1)], {A: 0}),
        ([PROMPT, MORE, remove(2), store([2], 1, None)], {A: 80}),
        ([PROMPT, MORE, remove(2), store([6], 5)], {A: 96}),  # a block after it proves that another copy is there
        ([PROMPT, remove(9), remove(3), remove(3)], {A: 32}),
        ([PROMPT, MORE, Cleared()], {A: 0, B: None}),
        ([PROMPT, Cleared(), PROMPT], {A: 48}),
        ([PROMPT, store([7], 3, B), MORE], {A: 80, B: 64}),  # B goes on from A's prompt
        ([PROMPT, store([7], 2, B), remove(7)], {A: 48, B: 32}),
        ([PROMPT, store([7], 2, B), remove(3)], {A: 32, B: 48}),
        ([PROMPT, store([7], 2, B), remove(1)], {A: 0, B: 0}),
        ([PROMPT, MORE, store([1, 2], None, B)], {A: 80, B: 32}),
        ([PROMPT, MORE, store([1, 2, 8], None, B)], {A: 80, B: 48}),
        ([PROMPT, store([9], 8, B)], {A: 48, B: None}),  # the block before is not known
        ([PROMPT, store([9], 8)], {A: None}),  # nor is the session's newest prompt, then
        ([PROMPT, store([2], 3)], {A: None}),  # a block is in one place only
        ([PROMPT, store([4, 1], 3)], {A: None}),
        ([PROMPT, store([4, 5, 4], 3)], {A: None}),
        ([PROMPT, store([9], 8), PROMPT], {A: 48}),
        ([PROMPT, store([])], {A: 48}),
        ([PROMPT, store([4], 3, group=1), remove(1, group=1)], {A: 48}),
        ([PROMPT, store([4], 3, tokens=4)], {A: 48}),
    ],
)
def test_a_session_holds_what_is_unbroken_from_its_start(changes: list[CacheChange], held: dict[int, Any]) -> None:
    index = BlockIndex()
    for change in changes:
        index.apply(change)
    assert {session: index.held(session) for session in held} == held


def test_blocks_that_are_gone_but_lie_before_others_are_bounded_too() -> None:
    """As of an engine that evicts beginnings first, so that no sweep could forget them."""
    index = BlockIndex(blocks_limit=4, sweep_slack=0)
    for prompt in ([1, 2, 3, 4], [5, 6, 7]):
        index.apply(store(prompt))
        index.apply(remove(*prompt[:-1]))
    assert (len(index), index.slots, index.is_full) == (2, 7, False)
    index.apply(store([8, 9]))
    assert (len(index), index.slots, index.is_full) == (0, 0, True)
    index.apply(Cleared())
    assert index.apply(PROMPT) is None and index.held(A) == 48


def test_changes_that_say_nothing_are_told() -> None:
    index = BlockIndex()
    index.apply(PROMPT)
    changes: list[CacheChange] = [
        store([9], 8),
        store([2], 3),
        store([4], 3, group=1),
        store([4], 3, tokens=4),
        remove(1, group=1),
    ]
    reasons = ["unknown_parent", "contradiction", "other_group", "partial_block", "other_group"]
    assert [index.apply(change) for change in changes] == reasons


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ([], None),
        ([PROMPT], 80),  # two blocks more than were told: the last one has no KV yet, and lookahead takes one
        ([PROMPT, MORE], 112),
        ([PROMPT, store([6, 7, 8], 3, B)], 80),
        ([PROMPT, MORE, remove(5, 4, 3)], 112),  # told, and gone since
        ([PROMPT, MORE, store([1, 2], None)], 112),  # another of its prompts, which parts from this one
        ([PROMPT, Cleared()], 10**9),
        ([PROMPT, Cleared(), PROMPT], 80),
    ],
)
@pytest.mark.parametrize("sweep_slack", [0, SWEEP_SLACK])
def test_how_much_of_a_session_was_told(changes: list[CacheChange], most: int | None, sweep_slack: int) -> None:
    index = BlockIndex(sweep_slack=sweep_slack)
    for change in changes:
        index.apply(change)
    assert index.has_told(A, most or 0) is (most is not None)
    assert most == 10**9 or not index.has_told(A, (most or 0) + 1)


def test_beyond_its_limit_an_index_knows_nothing_until_it_is_cleared() -> None:
    index = BlockIndex(blocks_limit=4)
    for change in (PROMPT, MORE):
        index.apply(change)
    assert (index.held(A), index.is_full, index.apply(PROMPT)) == (None, True, "full")
    index.apply(Cleared())
    index.apply(PROMPT)
    assert index.held(A) == 48


def test_a_block_that_is_named_many_times_takes_one_place() -> None:
    index = BlockIndex(blocks_limit=100)
    for block in range(1, 50):
        assert index.apply(store([block] * 1000)) == "contradiction"
    assert (len(index), index.slots) == (49, 49)


def test_a_prompt_is_followed_through_so_many_forks_alone() -> None:
    """Each event, and each look at what is held, goes through all forks before it."""
    index = BlockIndex()
    index.apply(store([1, 2]))
    reasons = [index.apply(store([at + 2, at + 3], at)) for at in range(1, 2 * FORKS_LIMIT + 7, 2)]
    assert reasons[:FORKS_LIMIT] == [None] * FORKS_LIMIT
    assert reasons[FORKS_LIMIT:] == ["forks", "unknown_parent", "unknown_parent"]
    assert index.apply(store([0], 2 * FORKS_LIMIT + 2)) is None  # no fork
    assert index.held(A) == 16 * (FORKS_LIMIT + 3)


def test_the_sessions_without_news_are_forgotten_first() -> None:
    index = BlockIndex(sessions_limit=2)
    for session in (A, B, A, C):
        index.apply(store([1, 2, 3], None, session))
    assert [index.held(session) for session in (A, B, C)] == [48, None, 48]


def test_what_is_gone_takes_no_memory() -> None:
    index = BlockIndex()
    index.apply(store([1, 2, 3], None, A))
    for number in range(2000):  # prompts that share three blocks, each evicted before the next
        own = range(10_000 + 100 * number, 10_000 + 100 * number + 50)
        index.apply(store(own, 3, 100 + number))
        index.apply(remove(*reversed(own)))
    assert len(index) == 3
    assert (index.held(A), index.held(100), index.held(2099)) == (48, 48, 48)
    assert index.slots < 3 + 2 * SWEEP_SLACK + 100


class Model:
    """The same answers from all chains written out."""

    def __init__(self) -> None:
        self.paths: dict[int, tuple[int, ...]] = {}  # of each block, itself last
        self.there: set[int] = set()
        self.sessions: dict[int, tuple[int, ...]] = {}

    def apply(self, change: CacheChange) -> None:
        if isinstance(change, Stored):
            path = self.paths[change.parent] if change.parent is not None else ()
            for block in change.hashes:
                path = (*path, block)
                self.paths[block] = path
            self.there.update(path)
            assert change.session is not None
            self.sessions[change.session] = path
        elif isinstance(change, Removed):
            self.there.difference_update(change.hashes)
        else:
            self.there.clear()
            self.paths.clear()
            self.sessions = dict.fromkeys(self.sessions, ())

    def held(self, session: int) -> int | None:
        path = self.sessions.get(session)
        if path is None:
            return None
        return 16 * next((count for count, block in enumerate(path) if block not in self.there), len(path))


def chain(words: Sequence[int]) -> list[int]:
    """Hashes of a prompt's blocks, each of all words so far."""
    return [hash(tuple(words[: end + 1])) & (2**64 - 1) for end in range(len(words))]


@pytest.mark.parametrize("sweep_slack", [0, SWEEP_SLACK])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_an_index_answers_as_chains_written_out(sweep_slack: int, data: st.DataObject) -> None:
    """After a sweep perhaps less: of a tail that was forgotten and came back for another session."""
    index, model = BlockIndex(sweep_slack=sweep_slack), Model()
    for _ in range(data.draw(st.integers(5, 25))):
        what = data.draw(st.sampled_from("sssssrrrc"))
        change: CacheChange
        if what == "s":
            hashes = chain(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6)))
            ends = [end for end in range(len(hashes)) if hashes[end] in model.there]
            start = data.draw(st.sampled_from([0, *(end + 1 for end in ends if end + 1 < len(hashes))]))
            change = store(hashes[start:], hashes[start - 1] if start else None, data.draw(st.integers(1, 4)))
        elif what == "r" and model.there:
            change = remove(*data.draw(st.lists(st.sampled_from(sorted(model.there)), max_size=3)))
        else:
            change = Cleared() if data.draw(st.integers(0, 5)) == 0 else remove()
        assert index.apply(change) is None
        model.apply(change)
        assert len(index) == len(model.there)
        for session in range(1, 5):
            found, known = index.held(session), model.held(session)
            assert found == known or (sweep_slack == 0 and found is not None and known is not None and found < known)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 6), max_size=4), st.none() | st.integers(0, 6), st.booleans())))
def test_hashes_of_no_chain_do_no_harm(events: list[tuple[list[int], int | None, bool]]) -> None:
    index = BlockIndex(sweep_slack=0)
    for hashes, parent, stores in events:
        index.apply(store(hashes, parent) if stores else remove(*hashes))
        held = index.held(A)
        assert held is None or 0 <= held <= 16 * index.slots
