"""An engine's prefix cache by vLLM's rules, over the keys of blocks instead of their contents.

Only full blocks are kept. A block's key stands for its tokens and all before them, so equal keys are equal prefixes.
A sequence that ends frees its last block first, and the block that was freed longest ago is evicted first: so the tails
of the prompts that were used least recently go first. A hit takes a free block into use again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

BLOCK_TOKENS = 16
_BYTES_PER_TOKEN = 4  # of a run of tokens


def block_keys(tokens: bytes) -> list[int]:
    """The keys of a run's full blocks; `tokens` is an array of 32-bit ids."""
    size, previous, keys = BLOCK_TOKENS * _BYTES_PER_TOKEN, 0, list[int]()
    for start in range(0, len(tokens) - size + 1, size):
        previous = hash((previous, tokens[start : start + size]))
        keys.append(previous)
    return keys


def known_blocks(keys: Sequence[int], is_known: Callable[[int], bool]) -> int:
    """How many from the start, where none is known without those before it: whoever uses a block uses them too."""
    return bisect_left(keys, True, key=lambda key: not is_known(key))


@dataclass(slots=True)
class Lease:
    """What one running sequence uses: blocks that can be found by others, and blocks of its own."""

    found: list[int] = field(default_factory=list)
    own: int = 0  # blocks that are not published yet


class BlockCache:
    def __init__(self, capacity_tokens: int) -> None:
        self.capacity = capacity_tokens // BLOCK_TOKENS  # blocks
        self.used = 0  # blocks of running sequences
        self._users: dict[int, int] = {}  # of each block in use that can be found
        self._free: OrderedDict[int, None] = OrderedDict()  # those kept for reuse, the next to be evicted first

    @property
    def usage(self) -> float:
        """The share in use by running sequences, as vLLM reports it."""
        return self.used / self.capacity

    def holds(self, keys: Sequence[int]) -> int:
        """How many blocks from the prompt's start are here."""
        return known_blocks(keys, lambda key: key in self._users or key in self._free)

    def take(self, keys: Sequence[int], blocks: int) -> tuple[Lease, int] | None:
        """A lease on `blocks` blocks, and how many of them were found; None where there is no room now.

        keys: of the prompt's full blocks that may be found.
        """
        found = list(keys[: self.holds(keys)])
        revived = [key for key in found if key in self._free]
        own = max(0, blocks - len(found))
        if self.used + len(revived) + own > self.capacity:
            return None
        for key in revived:
            del self._free[key]
        for key in found:
            self._users[key] = self._users.get(key, 0) + 1
        self.used += len(revived) + own
        self._evict()
        return Lease(found, own), len(found)

    def publish(self, lease: Lease, keys: Sequence[int]) -> None:
        """The sequence has filled its blocks up to the last of `keys`; others find them from here on.

        Where another has published the same block, the copy is given back; vLLM keeps it until the sequence ends.
        """
        for key in keys[len(lease.found) :]:
            if not lease.own:
                return
            lease.own -= 1
            if key in self._users:
                self.used -= 1
            self._free.pop(key, None)
            self._users[key] = self._users.get(key, 0) + 1
            lease.found.append(key)

    def release(self, lease: Lease) -> None:
        self.used -= lease.own
        for key in reversed(lease.found):
            left = self._users[key] - 1
            if left:
                self._users[key] = left
            else:
                del self._users[key]
                self._free[key] = None
                self.used -= 1
        lease.found, lease.own = [], 0

    def _evict(self) -> None:
        while self.used + len(self._free) > self.capacity:
            self._free.popitem(last=False)
