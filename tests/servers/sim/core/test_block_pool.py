from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ppd.servers.sim.core.block_pool import (
    AllBlocksCleared,
    Block,
    BlockPool,
    BlockRemoved,
    BlockStored,
    Namespace,
    chain_hash,
)

HERE = Namespace("m")


def stored(tokens: tuple[int, ...], parent: int | None = None, namespace: Namespace = HERE) -> BlockStored:
    return BlockStored(chain_hash(parent, tokens, namespace), parent, tokens, namespace)


def filled(pool: BlockPool, *runs: tuple[int, ...]) -> list[Block]:
    """A chain of sealed blocks, in use once."""
    blocks = pool.allocate(len(runs)) or []
    parent = None
    for block, tokens in zip(blocks, runs, strict=True):
        event = stored(tokens, parent)
        block.content[:] = array("I", tokens)
        pool.seal(block, event)
        parent = event.block_hash
    return blocks


def hashes(*runs: tuple[int, ...]) -> list[int]:
    chain: list[int] = []
    for tokens in runs:
        chain.append(chain_hash(chain[-1] if chain else None, tokens, HERE))
    return chain


@pytest.mark.parametrize(
    ("parent", "tokens", "namespace"),
    [
        (None, (1, 3), HERE),
        (7, (1, 2), HERE),
        (None, (1, 2), Namespace("other")),
        (None, (1, 2), Namespace("m", lora="l")),
        (None, (1, 2), Namespace("m", cache_salt="s")),
    ],
)
def test_a_hash_covers_tokens_parent_and_namespace(
    parent: int | None, tokens: tuple[int, ...], namespace: Namespace
) -> None:
    assert chain_hash(None, (1, 2), HERE) == chain_hash(None, (1, 2), HERE)
    assert chain_hash(parent, tokens, namespace) != chain_hash(None, (1, 2), HERE)


def test_the_longest_cached_prefix_is_found() -> None:
    pool = BlockPool(8, 2)
    blocks = filled(pool, (1, 2), (3, 4), (5, 6))
    assert pool.match(hashes((1, 2), (3, 4), (9, 9), (5, 6))) == blocks[:2]
    assert pool.match(hashes((3, 4))) == []


def test_released_blocks_are_still_found() -> None:
    pool = BlockPool(4, 2)
    blocks = filled(pool, (1, 2))
    pool.release(blocks)
    assert pool.used == 0
    assert pool.match(hashes((1, 2))) == blocks


def test_the_longest_unused_blocks_go_first_and_tails_before_heads() -> None:
    pool = BlockPool(4, 1)
    old = filled(pool, (1,), (2,))
    new = filled(pool, (3,), (4,))
    pool.release(old)
    pool.release(new)
    order = [old[1], old[0], new[1], new[0]]
    assert [pool.allocate(1) for _ in order] == [[block] for block in order]


def test_a_hit_moves_a_block_to_the_end_of_the_line() -> None:
    pool = BlockPool(2, 1)
    first, second = filled(pool, (1,)), filled(pool, (2,))
    pool.release(first)
    pool.release(second)
    pool.share(first)
    pool.release(first)
    assert pool.allocate(1) == second


def test_too_few_blocks_change_nothing() -> None:
    pool = BlockPool(3, 2)
    held = filled(pool, (1, 2))
    assert pool.allocate(3) is None
    assert pool.free == 2
    assert pool.match(hashes((1, 2))) == held


def test_evicting_a_block_hides_it_from_prompts() -> None:
    pool = BlockPool(1, 2, records_events=True)
    pool.release(filled(pool, (1, 2)))
    pool.allocate(1)
    assert pool.match(hashes((1, 2))) == []
    assert pool.events == [stored((1, 2)), BlockRemoved(hashes((1, 2))[0])]


def test_the_first_of_two_equal_blocks_stays_the_one_to_find() -> None:
    pool = BlockPool(4, 2)
    first, second = filled(pool, (1, 2)), filled(pool, (1, 2))
    assert pool.match(hashes((1, 2))) == first
    pool.release(second)
    assert pool.match(hashes((1, 2))) == first
    assert pool.cached == 1


def test_reuse_is_announced_again() -> None:
    pool = BlockPool(2, 2, records_events=True)
    blocks = filled(pool, (1, 2))
    pool.events.clear()
    pool.share(blocks)
    assert pool.events == [stored((1, 2))]


def test_a_hit_names_the_session_that_hit() -> None:
    pool = BlockPool(2, 2, records_events=True)
    blocks = filled(pool, (1, 2))
    pool.events.clear()
    pool.share(blocks, "other")
    assert pool.events == [replace(stored((1, 2)), session_id="other")]


def test_an_engine_of_old_announces_no_hits() -> None:
    pool = BlockPool(2, 2, records_events=True, announces_hits=False)
    pool.share(filled(pool, (1, 2)))
    assert pool.events == [stored((1, 2))]


def test_a_cache_in_use_is_not_cleared() -> None:
    pool = BlockPool(2, 2, records_events=True)
    blocks = filled(pool, (1, 2))
    pool.events.clear()
    assert not pool.clear()
    assert pool.match(hashes((1, 2))) == blocks
    pool.release(blocks)
    assert pool.clear()
    assert pool.match(hashes((1, 2))) == []
    assert pool.events == [AllBlocksCleared()]


def test_a_restart_empties_the_cache_and_says_nothing() -> None:
    pool = BlockPool(2, 2, records_events=True)
    held = filled(pool, (1, 2))
    pool.restart()
    assert (pool.match(hashes((1, 2))), pool.events, pool.used) == ([], [], 1)
    pool.release(held)
    assert pool.free == 2


class PoolMachine(RuleBasedStateMachine):
    """Sequences that share, fill and release blocks in any order."""

    CAPACITY = 12

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.CAPACITY, 1)
        self.held: list[list[Block]] = []

    @rule(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=6))
    def run_sequence(self, tokens: list[int]) -> None:
        chain = hashes(*[(token,) for token in tokens])
        hits = self.pool.match(chain)
        self.pool.share(hits)
        new = self.pool.allocate(len(tokens) - len(hits))
        if new is None:
            self.pool.release(hits)
            return
        for at, block in enumerate(new, start=len(hits)):
            parent = chain[at - 1] if at else None
            self.pool.seal(block, BlockStored(chain[at], parent, (tokens[at],), HERE))
        self.held.append(hits + new)

    @precondition(lambda self: bool(self.held))
    @rule(data=st.data())
    def end_sequence(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def references_are_those_of_the_sequences(self) -> None:
        users = [block.id for blocks in self.held for block in blocks]
        assert all(self.pool[at].refs == users.count(at) for at in range(self.CAPACITY))
        assert self.pool.used == len(set(users)) <= self.CAPACITY

    @invariant()
    def no_sequence_holds_a_block_twice(self) -> None:
        assert all(len(set(map(id, blocks))) == len(blocks) for blocks in self.held)

    def teardown(self) -> None:
        for blocks in self.held:
            self.pool.release(blocks)
        assert self.pool.free == self.CAPACITY
        assert self.pool.allocate(self.CAPACITY) is not None
        assert self.pool.cached == 0


TestPoolInvariants = PoolMachine.TestCase
