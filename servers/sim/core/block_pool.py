"""The prefix cache: KV blocks with chained hashes, reference counts and LRU eviction. Pure.

A block carries the tokens whose KV it holds. Its hash says what *should* be in it; after a wrong transfer the two
differ, and what is generated from it is wrong, as it would be in a real engine.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BlockHash = int
"""64 bits over a block's tokens and all before it, and the namespace they were computed in."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Prompts of different namespaces never share blocks."""

    model: str
    lora: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class BlockStored:
    block_hash: BlockHash
    parent_hash: BlockHash | None  # None: the first block of a prompt
    tokens: tuple[int, ...]
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hash: BlockHash


CacheEvent = BlockStored | BlockRemoved


def chain_hash(parent: BlockHash | None, tokens: Sequence[int], namespace: Namespace) -> BlockHash:
    """The hash of a full block after `parent`; the namespace enters through the first block of the chain."""
    digest = hashlib.blake2b(array("I", tokens).tobytes(), digest_size=8)
    if parent is None:
        digest.update(repr((namespace.model, namespace.lora, namespace.cache_salt)).encode())
    else:
        digest.update(parent.to_bytes(8))
    return int.from_bytes(digest.digest())


class Block:
    """One KV block. `content[i]` is the token whose KV slot i holds; 0 where nothing was written yet."""

    __slots__ = ("block_hash", "content", "id", "refs", "stored")

    def __init__(self, block_id: int, block_size: int) -> None:
        self.id = block_id
        self.content = [0] * block_size
        self.refs = 0
        self.block_hash: BlockHash | None = None  # set while the block can be found by its hash
        self.stored: BlockStored | None = None

    def __repr__(self) -> str:
        return f"<Block {self.id} refs={self.refs}{' cached' if self.block_hash is not None else ''}>"


class BlockPool:
    """All blocks of one engine. A block with references is in use; the others wait to be found again, or reused.

    `events` collects what is stored and removed while `records_events` is set; whoever publishes them empties it.
    """

    def __init__(self, capacity: int, block_size: int, *, records_events: bool = False) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.events: list[CacheEvent] = []
        self._records_events = records_events
        self._blocks = [Block(block_id, block_size) for block_id in range(capacity)]
        self._free = OrderedDict((block.id, block) for block in self._blocks)  # the first is reused next
        self._cached: dict[BlockHash, Block] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that a prompt can hit, in use or not."""
        return len(self._cached)

    @property
    def usage(self) -> float:
        return self.used / self.capacity

    def __getitem__(self, block_id: int) -> Block:
        return self._blocks[block_id]

    def match(self, hashes: Iterable[BlockHash]) -> list[Block]:
        """The cached blocks of the longest known prefix; `share` them before anything is allocated."""
        found = []
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[Block]) -> None:
        """One more user for each of these blocks; a reused block is announced again, as vLLM does since 0.26."""
        for block in blocks:
            if block.refs == 0:
                del self._free[block.id]
            block.refs += 1
            if self._records_events and block.stored is not None:
                self.events.append(block.stored)

    def allocate(self, count: int) -> list[Block] | None:
        """`count` blocks for a new user, the longest unused first; None, and nothing changes, if there are too few."""
        if count > len(self._free):
            return None
        return [self._take() for _ in range(count)]

    def seal(self, block: Block, stored: BlockStored) -> None:
        """Make a full block findable. Where its hash is known already, the older block stays the one to find."""
        if block.block_hash is not None or stored.block_hash in self._cached:
            return
        block.block_hash = stored.block_hash
        block.stored = stored if self._records_events else None
        self._cached[stored.block_hash] = block
        if self._records_events:
            self.events.append(stored)

    def release(self, blocks: Sequence[Block]) -> None:
        """One user less. The tail of a sequence is reused before its head, which more prompts begin with."""
        for block in reversed(blocks):
            block.refs -= 1
            assert block.refs >= 0, f"{block!r} released too often"
            if block.refs == 0:
                self._free[block.id] = block

    def _take(self) -> Block:
        _, block = self._free.popitem(last=False)
        if block.block_hash is not None:
            del self._cached[block.block_hash]
            if self._records_events:
                self.events.append(BlockRemoved(block.block_hash))
        block.block_hash = block.stored = None
        block.refs = 1
        return block
