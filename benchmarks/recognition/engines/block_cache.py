"""An engine's prefix cache by vLLM's rules, over the keys of blocks instead of their contents.

Only full blocks are kept. A block's key stands for its tokens and all before them, so equal keys are equal prefixes.
A sequence that ends frees its last block first, and the block that was freed longest ago is evicted first: so the tails
of the prompts that were used least recently go first. A hit takes a free block into use again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

BLOCK_TOKENS = 16
_BYTES_PER_TOKEN = 4  # of a run of tokens


def block_keys(tokens: bytes, known: Sequence[int] = ()) -> list[int]:
    """The keys of a run's full blocks; `tokens` is an array of 32-bit ids. known: those of the first blocks."""
    size, keys = BLOCK_TOKENS * _BYTES_PER_TOKEN, list(known)
    previous = keys[-1] if keys else 0
    for start in range(len(keys) * size, len(tokens) - size + 1, size):
        previous = hash((previous, tokens[start : start + size]))
        keys.append(previous)
    return keys


def known_blocks(keys: Sequence[int], is_known: Callable[[int], bool]) -> int:
    """How many from the start, where none is known without those before it: whoever uses a block uses them too."""
    return bisect_left(keys, True, key=lambda key: not is_known(key))


class Observer(Protocol):
    """Hears what the cache does, by the keys of blocks."""

    def found(self, keys: Sequence[int], session: str | None) -> None:
        """A prompt of this session begins with these, which are there."""

    def stored(self, keys: Sequence[int], parent: int | None, session: str | None) -> None:
        """These follow `parent`; None: a prompt begins with them."""

    def removed(self, keys: Iterable[int]) -> None: ...

    def cleared(self) -> None: ...


@dataclass(slots=True)
class Lease:
    """What one running sequence uses: blocks that can be found by others, and blocks of its own."""

    found: list[int] = field(default_factory=list)
    own: int = 0  # blocks that are not published yet
    session: str | None = None  # as the request names it


class BlockCache:
    def __init__(self, capacity_tokens: int, observer: Observer | None = None) -> None:
        self.capacity = capacity_tokens // BLOCK_TOKENS  # blocks
        self.used = 0  # blocks of running sequences
        self._observer = observer
        self._users: dict[int, int] = {}  # of each block in use that can be found
        self._free: OrderedDict[int, None] = OrderedDict()  # those kept for reuse, the next to be evicted first

    @property
    def usage(self) -> float:
        """The share in use by running sequences, as vLLM reports it."""
        return self.used / self.capacity

    def holds(self, keys: Sequence[int]) -> int:
        """How many blocks from the prompt's start are here."""
        return known_blocks(keys, lambda key: key in self._users or key in self._free)

    def take(self, keys: Sequence[int], blocks: int, session: str | None = None) -> tuple[Lease, int] | None:
        """A lease on `blocks` blocks, and how many of them were found; None where there is no room now.

        keys: of the prompt's full blocks that may be found.
        """
        found = list(keys[: self.holds(keys)])
        users, free = self._users, self._free
        revived = [key for key in found if key in free]
        own = max(0, blocks - len(found))
        if self.used + len(revived) + own > self.capacity:
            return None
        for key in revived:
            del free[key]
        for key in found:
            users[key] = users.get(key, 0) + 1
        self.used += len(revived) + own
        if self._observer is not None and found:
            self._observer.found(found, session)
        self._evict()
        return Lease(found, own, session), len(found)

    def publish(self, lease: Lease, keys: Sequence[int]) -> None:
        """The sequence has filled its blocks up to the last of `keys`; others find them from here on.

        Where another has published the same block, the copy is given back; vLLM keeps it until the sequence ends.
        """
        start = len(lease.found)
        filled = keys[start : start + lease.own]
        for key in filled:
            lease.own -= 1
            if key in self._users:
                self.used -= 1
            self._free.pop(key, None)
            self._users[key] = self._users.get(key, 0) + 1
        lease.found += filled
        if self._observer is not None and filled:
            self._observer.stored(filled, keys[start - 1] if start else None, lease.session)

    def release(self, lease: Lease) -> None:
        users, free = self._users, self._free
        self.used -= lease.own
        for key in reversed(lease.found):
            left = users[key] - 1
            if left:
                users[key] = left
            else:
                del users[key]
                free[key] = None
                self.used -= 1
        lease.found, lease.own = [], 0

    def clear(self) -> bool:
        """Nothing is kept any more; False, and no change, while a block is in use, as in vLLM."""
        if self.used:
            return False
        self._free.clear()
        if self._observer is not None:
            self._observer.cleared()
        return True

    def _evict(self) -> None:
        over = self.used + len(self._free) - self.capacity
        if over > 0:
            gone = [self._free.popitem(last=False)[0] for _ in range(over)]
            if self._observer is not None:
                self._observer.removed(gone)
