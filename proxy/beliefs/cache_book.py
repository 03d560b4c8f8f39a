"""One engine's prefix cache as the proxy's own turns have filled it: what was used last, and what still fits.

An engine keeps whole prompts while there is room. Then it evicts the blocks that have not been used for longest, of
one prompt the last ones first. So an entry stands while it fits into the capacity together with all that was used
since, and it shrinks from its end. A prefix that several entries share has an entry of its own, which is touched after
them: it counts once, and outlives them.

Answers correct the capacity. A prefix that is gone although it should fit tells that other traffic uses the cache too,
or that the engine evicts otherwise: then only as much is believed to fit as was used since. Each prefix that is found
whole raises that a little, up to what the engine reports.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from .held import Mark

BLOCK_TOKENS = 16
"""Engines cache whole blocks, of 16 tokens as a rule: if fewer are missing, nothing is."""

ENTRIES_KEPT = 32_768  # bounded where the capacity is unknown; 150 bytes each
RECOVERY = 64  # prefixes found whole until a capacity that was believed to be 0 is as reported again

_BITS = 30  # for each of the two counts of an entry
_MASK = (1 << _BITS) - 1


class CacheBook:
    """Prefixes by their keys, used longest ago first.

    An entry is one number, as an object would take twice its memory: when it was touched (a count of touches), its
    tokens from the prompt's start, and those of them that no other entry counts.
    """

    __slots__ = ("_believed", "_entries", "_has_missed", "_reported", "_tokens", "_touches", "incarnation")

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self._entries: OrderedDict[int, int] = OrderedDict()
        self._tokens = 0  # of all entries
        self._touches = 0
        self._reported = 0  # capacity; 0: unknown, and nothing is ever believed to be evicted
        self._believed = 0  # capacity by the answers; 0: as reported
        self._has_missed = False  # the last answer that told something of an older turn's prefix

    @property
    def capacity(self) -> int:
        """In tokens; 0: unknown."""
        return min(self._believed, self._reported) if self._believed else self._reported

    @property
    def tokens(self) -> int:
        """Of all that is believed to be held."""
        return self._tokens

    def __len__(self) -> int:
        return len(self._entries)

    def held(self, key: int) -> int:
        return self._entries.get(key, 0) >> _BITS & _MASK

    def touched(self, key: int) -> int:
        """When the entry was last touched, for `found`; 0: there is none."""
        return self._entries.get(key, 0) >> 2 * _BITS

    def report(self, capacity: int) -> None:
        """As the engine says."""
        if capacity != self._reported:
            self._reported = capacity
            self._shrink()

    def touch(self, key: int, tokens: int, shared: Sequence[Mark] = ()) -> None:
        """The engine has just used this prefix, and holds so many tokens of it.

        shared: prefixes of it that other entries share, shortest first.
        """
        shared = [mark for mark in shared if mark.tokens < tokens]
        starts = [0, *(mark.tokens for mark in shared)]
        self._put(key, tokens, tokens - starts[-1])
        for mark, start in zip(reversed(shared), reversed(starts[:-1]), strict=True):
            self._put(mark.key, mark.tokens, mark.tokens - start)
        self._shrink()

    def forget(self, key: int) -> None:
        """Nobody will ask for it again. Where the capacity is known it goes on taking room, as in the engine."""
        if not self._reported:
            self._tokens -= self._entries.pop(key, 0) & _MASK

    def found(self, key: int, touched: int, held: int, cached: int) -> None:
        """An answer says how much of an entry the engine had cached. touched: when it had been used, as of `touched`.

        Text that the model's template leaves out of a later prompt looks like eviction. So what was used recently is
        taken for evicted only if the answer before said so too.
        """
        if not touched or not self._reported:
            return
        if cached > held - BLOCK_TOKENS:
            self._has_missed = False
            self._raise(max(1, self._reported // RECOVERY, cached - held))
            return
        newer = takewhile(lambda item: item[1] >> 2 * _BITS > touched, reversed(self._entries.items()))
        since = sum(entry & _MASK for newer_key, entry in newer if newer_key != key)
        fits = max(BLOCK_TOKENS, since + cached)
        if self._has_missed or 2 * fits >= self.capacity:
            self._believed = min(fits, self.capacity)
            self._shrink()
        self._has_missed = True

    def _raise(self, tokens: int) -> None:
        if self._believed:
            raised = self._believed + tokens
            self._believed = 0 if raised >= self._reported else raised

    def _put(self, key: int, tokens: int, own: int) -> None:
        self._touches += 1
        tokens, own = min(tokens, _MASK), min(own, _MASK)
        self._tokens += own - (self._entries.pop(key, 0) & _MASK)
        self._entries[key] = (self._touches << _BITS | tokens) << _BITS | own

    def _shrink(self) -> None:
        over = self._tokens - self.capacity if self.capacity else 0
        while self._entries and (over > 0 or len(self._entries) > ENTRIES_KEPT):
            key, entry = next(iter(self._entries.items()))
            own = entry & _MASK
            going = min(own, over) if over > 0 and len(self._entries) <= ENTRIES_KEPT else own
            self._tokens -= going
            over -= going
            if going < own:
                self._entries[key] = entry - (going << _BITS | going)
            else:
                del self._entries[key]
