from __future__ import annotations

import numpy as np
import pytest

from ppd.offline.load.prompt_text import Draws, draw
from ppd.offline.traces.turns import Blocks, TracedTurn

PLAIN = TracedTurn(new_tokens=100)


def drawn(turn: TracedTurn, place: tuple[int, int] = (0, 0), seed: int = 7, count: int = 100) -> Draws:
    return draw(turn, place, seed=seed, count=count, choices=50)


def with_blocks(*ids: int, tokens: int = 16, scope: str = "") -> TracedTurn:
    return TracedTurn(new_tokens=100, blocks=Blocks(ids, tokens, scope))


def test_the_same_place_always_draws_the_same() -> None:
    assert drawn(PLAIN).tolist() == drawn(PLAIN).tolist()
    assert drawn(PLAIN, count=40).tolist() == drawn(PLAIN)[:40].tolist()


@pytest.mark.parametrize(("place", "seed"), [((1, 0), 7), ((0, 1), 7), ((0, 0), 8)])
def test_other_conversations_turns_and_seeds_share_no_prefix(place: tuple[int, int], seed: int) -> None:
    assert drawn(PLAIN)[:16].tolist() != drawn(PLAIN, place, seed)[:16].tolist()


def test_draws_fill_the_whole_range_evenly() -> None:
    counts = np.bincount(drawn(PLAIN, count=50_000), minlength=50)
    assert counts.size == 50
    assert 850 < counts.min() <= counts.max() < 1150  # five standard deviations around 1,000


def test_equal_blocks_are_equal_text_in_any_conversation() -> None:
    one, other = drawn(with_blocks(1, 2, 3), (0, 0)), drawn(with_blocks(1, 2, 4), (5, 0))
    assert one[:32].tolist() == other[:32].tolist()
    assert one[32:48].tolist() != other[32:48].tolist()
    assert one[48:].tolist() != other[48:].tolist()  # behind the blocks each has its own


def test_a_blocks_text_does_not_depend_on_where_it_stands() -> None:
    assert drawn(with_blocks(9, 2))[16:32].tolist() == drawn(with_blocks(2))[:16].tolist()


def test_ids_of_another_scope_are_other_text() -> None:
    assert drawn(with_blocks(1, scope="a"))[:16].tolist() != drawn(with_blocks(1, scope="b"))[:16].tolist()


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 47, 48, 49])
def test_a_prompt_may_end_anywhere(count: int) -> None:
    assert drawn(with_blocks(1, 2, 3), count=count).tolist() == drawn(with_blocks(1, 2, 3))[:count].tolist()
