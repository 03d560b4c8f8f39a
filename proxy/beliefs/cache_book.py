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

from collections.abc import Iterable, Sequence
from itertools import chain, islice

from .held import Mark

BLOCK_TOKENS = 16
BLOCK_TOKENS_LIMIT = 256
"""Engines cache whole blocks, and compute at least one token of each prompt. So up to two blocks fewer are found of
what is there. Blocks have 16 tokens as a rule; larger ones show in the counts of cached tokens, their multiples."""

ENTRIES_KEPT = 32_768  # bounded where the capacity is unknown; 100 bytes each
LOOKED_AT = 256  # newest entries, which takes 15 us
RECOVERY = 256  # prefixes found whole until a capacity that was believed to be 0 is as reported again

_BITS = 30  # for each of the two counts of an entry
_MASK = (1 << _BITS) - 1


class CacheBook:
    """Prefixes by their keys, used longest ago first.

    An entry is one number, as an object would take twice its memory: how many tokens from the prompt's start are held,
    and for how many it takes room that no other entry counts. They are in a plain dict, as an `OrderedDict` would take
    twice its memory too; so what is evicted at once is looked for once.
    """

    __slots__ = (
        "_ahead",
        "_awaited",
        "_believed",
        "_counts",
        "_entries",
        "_has_missed",
        "_reported",
        "_tokens",
        "incarnation",
    )

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self._entries: dict[int, int] = {}
        self._awaited: dict[int, int] = {}  # by key: turns that were sent and have not used their entry yet
        self._ahead: dict[int, int] = {}  # the entries of these keys, 0 for none: they count as newer than all others
        self._tokens = 0  # of all entries
        self._reported = 0  # capacity; 0: unknown, and nothing is ever believed to be evicted
        self._believed = 0  # capacity by the answers; 0: as reported
        self._counts = 0  # of cached tokens, all bits of all of them
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
        return len(self._entries) + len(self._ahead)

    def held(self, key: int) -> int:
        return (self._entries.get(key) or self._ahead.get(key, 0)) >> _BITS

    def longest(self, marks: Iterable[tuple[int, int, int]]) -> int:
        """What is held of the first mark that is known, by an entry of its own or by that of a history with it.

        Each mark is its key, the key of such a history, and tokens.
        """
        used, ahead = self._entries.get, self._ahead.get
        for key, history, most in marks:
            if entry := used(key) or ahead(key):
                return entry >> _BITS
            if entry := used(history) or ahead(history):
                return min(entry >> _BITS, most)
        return 0

    def used_since(self, key: int) -> int:
        """Tokens of what was used after this entry, which must be there.

        Of all others, where that would take long to count, or nothing is about to be evicted.
        """
        others = self._tokens - (self._entry(key) & _MASK)
        if not self._reported or 2 * self._tokens < self.capacity:
            return others
        since = 0
        newest_first = chain(reversed(self._ahead.items()), reversed(self._entries.items()))
        for newer, entry in islice(newest_first, LOOKED_AT):
            if newer == key:
                return since
            since += entry & _MASK
        return others

    def report(self, capacity: int) -> None:
        """As the engine says."""
        if capacity != self._reported:
            self._reported = capacity
            self._shrink()

    def touch(self, key: int, tokens: int, shared: Sequence[Mark] = ()) -> None:
        """The engine has just used this prefix, and holds so many tokens of it.

        shared: prefixes of it that other entries share, shortest first.
        """
        self._enter(key, tokens, tokens, shared)

    def expect(self, key: int, tokens: int, shared: Sequence[Mark] = ()) -> None:
        """A turn was sent that will use this prefix, and have so many tokens, before turns that are sent later."""
        if not self._reported:
            return
        held = self.held(key)
        awaited = self._awaited.get(key, 0)
        self._awaited[key] = awaited + 1
        if not awaited:
            self._ahead[key] = self._entries.pop(key, 0)
        if 2 * held < tokens:  # no LOCAL turn comes for so little, whose answer could raise it
            self._raise(self._reported // RECOVERY)
        self._enter(key, held, max(held, tokens), [mark for mark in shared if self.held(mark.key)])

    def begun(self, key: int) -> None:
        """A turn that was expected uses its prefix now."""
        awaited = self._awaited.get(key, 0)
        if awaited > 1:
            self._awaited[key] = awaited - 1
        elif awaited:
            del self._awaited[key]
            if entry := self._ahead.pop(key):
                self._entries[key] = entry

    def withdraw(self, key: int) -> None:
        """A turn that was expected does not come."""
        self.begun(key)
        entry = self._entry(key)
        held, room = entry >> _BITS, entry & _MASK
        if room > held:
            self._tokens -= room - held
            self._keep(key, entry - (room - held) if held else 0)

    def forget(self, key: int) -> None:
        """Nobody will ask for it again. Where the capacity is known it goes on taking room, as in the engine."""
        if not self._reported:
            self._tokens -= self._entry(key) & _MASK
            self._keep(key, 0)

    def found(self, since: int, held: int, cached: int) -> None:
        """An answer says how much of an entry the engine had cached. since: as of `used_since`, when the turn was sent.

        Text that the model's template leaves out of a later prompt looks like eviction, and estimates err. So an eighth
        that is missing tells nothing. What was used recently is taken for evicted only if most of it is gone, and the
        answer before said so too.
        """
        if not self._reported:
            return
        self._counts |= cached
        block = min(max(self._counts & -self._counts, BLOCK_TOKENS), BLOCK_TOKENS_LIMIT)
        if held - cached <= max(2 * block, held // 8):
            self._has_missed = False
            self._raise(max(1, self._reported // RECOVERY, cached - held))
            return
        fits = max(block, since + cached)
        is_gone = 2 * cached < held
        if 2 * fits >= self._reported or (is_gone and self._has_missed):
            self._believed = min(fits, self.capacity)
            self._shrink()
        self._has_missed |= is_gone

    def _raise(self, tokens: int) -> None:
        if self._believed:
            raised = self._believed + tokens
            self._believed = 0 if raised >= self._reported else raised

    def _enter(self, key: int, held: int, room: int, shared: Sequence[Mark]) -> None:
        end, tokens = key, held
        for mark in reversed(shared):
            if mark.tokens < room:
                self._put(end, tokens, room - mark.tokens)
                end, tokens, room = mark.key, mark.tokens, mark.tokens
        self._put(end, tokens, room)
        self._shrink()

    def _put(self, key: int, tokens: int, own: int) -> None:
        tokens, own = min(tokens, _MASK), min(own, _MASK)
        if key in self._ahead:
            before = self._ahead[key]
            self._ahead[key] = tokens << _BITS | own
        else:
            before = self._entries.pop(key, 0)
            self._entries[key] = tokens << _BITS | own
        self._tokens += own - (before & _MASK)

    def _entry(self, key: int) -> int:
        return self._entries.get(key) or self._ahead.get(key, 0)

    def _keep(self, key: int, entry: int) -> None:
        """Where it is; 0: not at all."""
        if key in self._ahead:
            self._ahead[key] = entry
        elif entry:
            self._entries[key] = entry
        else:
            self._entries.pop(key, None)

    def _shrink(self) -> None:
        over = self._tokens - self.capacity if self.capacity else 0
        surplus = len(self) - ENTRIES_KEPT
        if surplus > 0:
            surplus += ENTRIES_KEPT // 8  # the next ones have room
        if over > 0 or surplus > 0:
            self._evict(over, surplus)

    def _evict(self, over: int, surplus: int) -> None:
        """At least so many tokens, and so many entries."""
        for entries in (self._entries, self._ahead):
            gone = list[int]()
            for key, entry in entries.items():
                if over <= 0 and surplus <= 0:
                    break
                own = entry & _MASK
                going = own if surplus > 0 else min(own, over)
                self._tokens -= going
                over -= going
                if going < own:
                    held = min(going, entry >> _BITS)
                    entries[key] = entry - (held << _BITS | going)
                else:
                    gone.append(key)
                    surplus -= 1
            for key in gone:
                self._keep(key, 0)
