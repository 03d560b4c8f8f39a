"""The prefix cache: KV blocks with chained hashes, reference counts and LRU eviction. Pure.

A block records the tokens whose KV it holds. Its hash says which KV it *should* hold. After a wrong transfer the two
differ, and text generated from it is wrong, as in a real engine.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

BlockHash = int
"""64 bits, of a block's tokens, all tokens before it, and their namespace."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Prompts in different namespaces never share blocks."""

    model: str
    lora: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class BlockStored:
    block_hash: BlockHash
    parent_hash: BlockHash | None  # None: the first block of a prompt
    tokens: tuple[int, ...]
    namespace: Namespace
    session_id: str | None = None  # of the request that stored the block, or hit it


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


def chain_hash(parent: BlockHash | None, tokens: Sequence[int], namespace: Namespace) -> BlockHash:
    """The hash of a full block after `parent`. Only the first block of a chain hashes the namespace."""
    digest = hashlib.blake2b(array("I", tokens).tobytes(), digest_size=8)
    if parent is None:
        digest.update(repr((namespace.model, namespace.lora, namespace.cache_salt)).encode())
    else:
        digest.update(parent.to_bytes(8))
    return int.from_bytes(digest.digest())


class Block:
    """One KV block. `content[i]` is the token whose KV is in slot i, of 32 bits; 0 before it is written."""

    __slots__ = ("block_hash", "content", "id", "refs", "stored")

    def __init__(self, block_id: int, block_size: int) -> None:
        self.id = block_id
        self.content = array("I", bytes(4 * block_size))  # a list would be one more object for the collector
        self.refs = 0
        self.block_hash: BlockHash | None = None  # set while the block is in the prefix cache
        self.stored: BlockStored | None = None

    def __repr__(self) -> str:
        return f"<Block {self.id} refs={self.refs}{' cached' if self.block_hash is not None else ''}>"


class BlockPool:
    """All blocks of one engine. A block with references is in use; the others may be hit again, or reused.

    `events` collects what is stored and removed if `records_events` is set; the publisher empties it. With
    `announces_hits` a hit is announced again as stored, as vLLM does since 0.26.
    """

    def __init__(
        self, capacity: int, block_size: int, *, records_events: bool = False, announces_hits: bool = True
    ) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.events: list[CacheEvent] = []
        self._records_events = records_events
        self._announces_hits = announces_hits
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
        return len(self._cached)

    @property
    def usage(self) -> float:
        return self.used / self.capacity

    def __getitem__(self, block_id: int) -> Block:
        return self._blocks[block_id]

    def match(self, hashes: Iterable[BlockHash]) -> list[Block]:
        """The cached blocks of the longest known prefix; call `share` with them before any `allocate`."""
        found = []
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[Block], session_id: str | None = None) -> None:
        """Adds a reference to each block, for a request of that session."""
        for block in blocks:
            if block.refs == 0:
                del self._free[block.id]
            block.refs += 1
            if self._announces_hits and block.stored is not None:
                self.events.append(replace(block.stored, session_id=session_id))

    def allocate(self, count: int) -> list[Block] | None:
        """`count` blocks, least recently used first; None, with no change, if too few are free."""
        if count > len(self._free):
            return None
        return [self._take() for _ in range(count)]

    def seal(self, block: Block, stored: BlockStored) -> None:
        """Adds a full block to the prefix cache, unless another block with its hash is there."""
        if block.block_hash is not None or stored.block_hash in self._cached:
            return
        block.block_hash = stored.block_hash
        block.stored = stored if self._records_events else None
        self._cached[stored.block_hash] = block
        if self._records_events:
            self.events.append(stored)

    def store(self, contents: Iterable[Sequence[int]], namespace: Namespace) -> None:
        """Full blocks of one prompt, from a peer: they are cached, as far as there is room."""
        parent: BlockHash | None = None
        for content in contents:
            block_hash = chain_hash(parent, content, namespace)
            if block_hash not in self._cached:
                if (blocks := self.allocate(1)) is None:
                    return
                blocks[0].content[:] = array("I", content)
                self.seal(blocks[0], BlockStored(block_hash, parent, tuple(content), namespace))
                self.release(blocks)
            parent = block_hash

    def release(self, blocks: Sequence[Block]) -> None:
        """Drops a reference from each block. Tails are reused before heads, which more prompts share."""
        for block in reversed(blocks):
            block.refs -= 1
            assert block.refs >= 0, f"{block!r} released too often"
            if block.refs == 0:
                self._free[block.id] = block

    def clear(self) -> bool:
        """Empties the prefix cache; False, with no change, while a block is in use."""
        if self.used:
            return False
        self._forget()
        if self._records_events:
            self.events.append(AllBlocksCleared())
        return True

    def restart(self) -> None:
        """Empties the prefix cache and announces nothing. Blocks in use stay with their sequences."""
        self._forget()
        self.events.clear()

    def _forget(self) -> None:
        for block in self._cached.values():
            block.block_hash = block.stored = None
        self._cached.clear()

    def _take(self) -> Block:
        _, block = self._free.popitem(last=False)
        if block.block_hash is not None:
            del self._cached[block.block_hash]
            if self._records_events:
                self.events.append(BlockRemoved(block.block_hash))
        block.block_hash = block.stored = None
        block.refs = 1
        return block
