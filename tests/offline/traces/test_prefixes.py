from __future__ import annotations

import pytest

from ppd.offline.traces.prefixes import PrefixTree, added_tokens, shared_tokens


@pytest.mark.parametrize(
    ("blocks", "parent"),
    [
        ((0, 1, 3, 5), 1),  # the longest prefix
        ((0, 1, 8), 2),  # of equal ones the latest
        ((0, 7), None),  # one block is a system prompt
        ((5, 6, 7), 3),
        ((6, 5), None),
        ((), None),
    ],
)
def test_a_request_carries_on_from_the_longest_prefix_seen(blocks: tuple[int, ...], parent: int | None) -> None:
    tree = PrefixTree()
    for number, complete in enumerate([(0, 1), (0, 1, 3), (0, 1), (5, 6), (0,)]):
        tree.add(number, complete)
    assert tree.parent(blocks) == parent


@pytest.mark.parametrize(
    ("before", "blocks", "before_tokens", "shared"),
    [
        ((1, 2, 3), (1, 2, 3, 4), 48, 48),
        ((1, 2, 3), (1, 2, 9, 4), 40, 40),  # the last block was not complete: its id had to change
        ((1, 2, 3), (1, 2, 9, 4), 48, 32),
        ((1, 2, 3), (1, 9), 48, 16),
        ((1, 2, 3), (1,), 48, 16),  # cut short
        ((1, 2, 3), (7, 8), 48, 0),
        ((), (7, 8), 0, 0),
    ],
)
def test_prompts_share_their_equal_leading_blocks(
    before: tuple[int, ...], blocks: tuple[int, ...], before_tokens: int, shared: int
) -> None:
    assert shared_tokens(before, blocks, 16, before_tokens) == shared


@pytest.mark.parametrize(
    ("shared", "tokens", "added"),
    [
        (100, 180, 60),  # less the answer of 20
        (80, 180, 80),  # what was written anew is computed again
        (100, 110, 1),  # part of the answer was left out
        (40, 180, None),  # compacted
        (60, 40, None),
    ],
)
def test_a_turn_adds_what_is_behind_the_answer_before(shared: int, tokens: int, added: int | None) -> None:
    assert added_tokens(shared, 100, 20, tokens) == added
