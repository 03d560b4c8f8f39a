"""The cache by vLLM's rules: full blocks, tails first, hits taken into use again."""

from __future__ import annotations

from array import array

import pytest

from benchmarks.recognition.engines.block_cache import BLOCK_TOKENS, BlockCache, block_keys


def run(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def use(cache: BlockCache, keys: list[int]) -> int:
    """A sequence of these full blocks begins and ends; how many it found."""
    taken = cache.take(keys, len(keys))
    assert taken is not None
    lease, found = taken
    cache.publish(lease, keys)
    cache.release(lease)
    return found


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2), (100, 6)])
def test_only_full_blocks_have_keys(tokens: int, blocks: int) -> None:
    assert len(block_keys(run(*range(tokens)))) == blocks


def test_a_key_stands_for_all_tokens_before_it() -> None:
    one, other = block_keys(run(*range(64))), block_keys(run(99, *range(1, 64)))
    assert block_keys(run(*range(32))) == one[:2]
    assert not set(one) & set(other)


@pytest.mark.parametrize(
    ("used", "held"),
    [
        ([[1, 2, 3]], [[1, 2, 3]]),
        ([[1, 2, 3], [4, 5]], [[1, 2], [4, 5]]),  # the tail of what was used longest ago goes first
        ([[1, 2, 3], [4], [1, 2, 3], [5]], [[1, 2, 3], [5]]),  # a hit moves it ahead
        ([[1, 2, 3], [1, 2, 6, 7]], [[1, 2, 6, 7]]),
        ([[1, 2], [3, 4], [5, 6, 7]], [[3], [5, 6, 7]]),
    ],
)
def test_the_tails_of_what_was_used_least_recently_go_first(used: list[list[int]], held: list[list[int]]) -> None:
    cache = BlockCache(4 * BLOCK_TOKENS)
    for keys in used:
        use(cache, keys)
    for keys in held:
        assert cache.holds([*keys, 0]) == len(keys)
    assert sum(cache.holds([key]) for key in range(1, 8)) == len({key for keys in held for key in keys})


def test_blocks_of_running_sequences_stay_and_leave_no_room_for_others() -> None:
    cache = BlockCache(4 * BLOCK_TOKENS)
    taken = cache.take([1, 2], 3)
    assert taken is not None
    lease, _ = taken
    cache.publish(lease, [1, 2])
    assert cache.usage == 0.75
    assert cache.take([8, 9], 2) is None
    shared = cache.take([1, 2], 3)  # two of its blocks are there
    assert shared is not None
    assert (shared[1], cache.usage) == (2, 1.0)
    cache.release(lease)
    cache.release(shared[0])
    assert cache.usage == 0.0
    assert cache.holds([1, 2]) == 2


def test_two_that_compute_the_same_at_once_hold_it_once() -> None:
    cache = BlockCache(8 * BLOCK_TOKENS)
    first, second = cache.take([1, 2], 2), cache.take([1, 2], 2)
    assert first is not None
    assert second is not None
    assert cache.usage == 0.5
    cache.publish(first[0], [1, 2])
    cache.publish(second[0], [1, 2])
    assert cache.usage == 0.25
    cache.release(first[0])
    cache.release(second[0])
    assert cache.usage == 0.0
