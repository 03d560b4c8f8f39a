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

import math
from collections.abc import Sequence
from itertools import islice

from .entries import AHEAD, USED, Entries
from .entry_places import EntryPlaces
from .held import Mark

BLOCK_TOKENS = 16
BLOCK_TOKENS_LIMIT = 4096
BLOCK_SAMPLES = 8
"""Engines cache whole blocks, and compute at least one token of each prompt. So up to two blocks fewer are found of
what is there. Blocks have 16 tokens as a rule. Larger ones, as of models that keep states beside attention, show in the
counts of cached tokens: what divides all of so many. Fewer counts may have more in common, and tell powers of two."""

USUAL_BLOCK_TOKENS = 256  # at most; larger ones excuse no more than half of a prefix

ENTRIES_KEPT = 32_768  # bounded where the capacity is unknown; 100 bytes each
LOOKED_AT = 256  # newest entries, which takes 15 us
RECOVERY = 256  # prefixes found whole until a capacity that was believed to be 0 is as reported again

_MOST = (1 << 30) - 1  # tokens of an entry


class CacheBook:
    """Prefixes by their keys, used longest ago first."""

    __slots__ = (
        "_awaited",
        "_believed",
        "_counted",
        "_counts",
        "_entries",
        "_has_missed",
        "_reported",
        "_tokens",
        "evicted",
        "incarnation",
        "number",
    )

    def __init__(self, incarnation: str, places: EntryPlaces | None = None, number: int = 1) -> None:
        """places: of the entries of all books, of which this one has a number of its own."""
        self.incarnation = incarnation
        self.number = number
        self._entries = Entries(EntryPlaces() if places is None else places, number)
        # By key: turns that were sent and have not used their entry yet, which may be of nothing.
        self._awaited: dict[int, int] = {}
        self._tokens = 0  # of all entries
        self.evicted = 0  # tokens so far, as is believed
        self._reported = 0  # capacity; 0: unknown, and nothing is ever believed to be evicted
        self._believed = 0  # capacity by the answers; 0: as reported
        self._counts = 0  # of cached tokens: what divides all of them
        self._counted = 0  # of those, as far as it matters
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
        return self._entries.count

    def held(self, key: int) -> int:
        entries = self._entries
        return entries.held[entries.slot(key)]

    def held_at(self, slot: int) -> int | None:
        """As `EntryPlaces` has the slot; None: the entry is of nothing."""
        held = self._entries.held[slot]
        return held if held or self._entries.own[slot] else None

    def used_since(self, key: int) -> int:
        """Tokens of what was used after this entry, which must be there.

        Of all others, where that would take long to count, or nothing is about to be evicted.
        """
        entries = self._entries
        looked_for = entries.slot(key)
        others = self._tokens - entries.own[looked_for]
        if not self._reported or 2 * self._tokens < self.capacity:
            return others
        since = 0
        for slot in islice(entries.newest_first(AHEAD, USED), LOOKED_AT):
            if slot == looked_for:
                return since
            since += entries.own[slot]
        return others

    def room(self) -> float:
        """Tokens that can be written before anything is evicted."""
        capacity = self.capacity
        return max(0, capacity - self._tokens) if capacity else math.inf

    def oldest(self, most: int) -> list[tuple[int, int]]:
        """Keys of what no turn uses, in the order in which they will be evicted, and the tokens that go with each."""
        keys, own = self._entries.keys, self._entries.own
        return [(keys[slot], own[slot]) for slot in islice(self._entries.oldest_first(USED), most)]

    def newest(self, most: int) -> list[int]:
        """Keys of what no turn uses, and was used last."""
        keys = self._entries.keys
        return [keys[slot] for slot in islice(self._entries.newest_first(USED), most)]

    def clear(self, most: int) -> bool:
        """Some of what an engine held that is gone; whether that was all."""
        self._entries.remove_some(most)
        return not self._entries.count

    @property
    def lessons(self) -> tuple[int, int, bool]:
        """What `adopt` takes."""
        return self._believed, self._counts, self._has_missed

    def adopt(self, believed: int, counts: int, has_missed: bool) -> None:
        """What another process has learned from answers."""
        self._believed, self._counts, self._has_missed = believed, counts, has_missed
        self._shrink()

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
            entries, slot = self._entries, self._entries.slot(key)
            if slot:
                entries.renew(slot, AHEAD)
            else:
                entries.add(key, AHEAD)
        if 2 * held < tokens:  # no LOCAL turn comes for so little, whose answer could raise it
            self._raise(self._reported // RECOVERY)
        self._enter(key, held, max(held, tokens), [mark for mark in shared if self.held(mark.key)])

    def pass_on(self, key: int, tokens: int) -> int:
        """A newer entry begins with so many tokens of this one, which count there from here on.

        What `take_back` takes: those that counted here, as its beginning may count elsewhere.
        """
        entries, slot = self._entries, self._entries.slot(key)
        own = entries.own[slot]
        passed = min(own, max(0, tokens - max(0, entries.held[slot] - own)))
        self._tokens -= passed
        entries.own[slot] = own - passed
        return passed

    def take_back(self, key: int, passed: int) -> None:
        """That newer entry came to nothing."""
        entries, slot = self._entries, self._entries.slot(key)
        own = entries.own[slot]
        whole = min(max(own, entries.held[slot]), own + passed)
        self._tokens += whole - own
        entries.own[slot] = whole
        self._shrink()

    def begun(self, key: int) -> None:
        """A turn that was expected uses its prefix now."""
        awaited = self._awaited.get(key, 0)
        if awaited > 1:
            self._awaited[key] = awaited - 1
        elif awaited:
            del self._awaited[key]
            entries, slot = self._entries, self._entries.slot(key)
            if entries.held[slot] or entries.own[slot]:
                entries.renew(slot, USED)
            else:
                entries.remove(slot)

    def withdraw(self, key: int) -> None:
        """A turn that was expected does not come."""
        self.begun(key)
        entries, slot = self._entries, self._entries.slot(key)
        held, room = entries.held[slot], entries.own[slot]
        if room > held:
            self._tokens -= room - held
            if held:
                entries.own[slot] = held
            else:
                self._empty(slot)

    def forget(self, key: int) -> None:
        """Nobody will ask for it again. Where the capacity is known it goes on taking room, as in the engine."""
        slot = 0 if self._reported else self._entries.slot(key)
        if slot:
            self._tokens -= self._entries.own[slot]
            self._empty(slot)

    def found(self, since: int, held: int, cached: int) -> None:
        """An answer says how much of an entry the engine had cached. since: as of `used_since`, when the turn was sent.

        Text that the model's template leaves out of a later prompt looks like eviction, and estimates err. So an eighth
        that is missing tells nothing. What was used recently is taken for evicted only if most of it is gone, and the
        answer before said so too.
        """
        if not self._reported:
            return
        if cached:
            self._counts, self._counted = math.gcd(self._counts, cached), min(self._counted + 1, BLOCK_SAMPLES)
        block = self._block()
        if held - cached <= max(2 * min(block, USUAL_BLOCK_TOKENS), min(2 * block, held // 2), held // 8):
            self._has_missed = False
            self._raise(max(1, self._reported // RECOVERY, cached - held))
            return
        fits = max(block, since + cached)
        is_gone = 2 * cached < held
        if 2 * fits >= self._reported or (is_gone and self._has_missed):
            self._believed = min(fits, self.capacity)
            self._shrink()
        self._has_missed |= is_gone

    def _block(self) -> int:
        if self._counted == BLOCK_SAMPLES:
            return min(max(self._counts, BLOCK_TOKENS), BLOCK_TOKENS_LIMIT)
        return min(max(self._counts & -self._counts, BLOCK_TOKENS), USUAL_BLOCK_TOKENS)

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
        entries, slot = self._entries, self._entries.slot(key)
        tokens, own = min(tokens, _MOST), min(own, _MOST)
        if not slot:
            slot = entries.add(key, USED)
        elif key not in self._awaited:
            entries.renew(slot, USED)
        self._tokens += own - entries.own[slot]
        entries.held[slot], entries.own[slot] = tokens, own

    def _empty(self, slot: int) -> None:
        entries = self._entries
        if entries.keys[slot] in self._awaited:
            entries.held[slot] = entries.own[slot] = 0
        else:
            entries.remove(slot)

    def _shrink(self) -> None:
        capacity = self.capacity
        over = self._tokens - capacity if capacity else 0
        surplus = self._entries.count - ENTRIES_KEPT
        if surplus > 0:
            surplus += ENTRIES_KEPT // 8  # the next ones have room
        if over > 0 or surplus > 0:
            self._evict(over, surplus)

    def _evict(self, over: int, surplus: int) -> None:
        """At least so many tokens, and so many entries."""
        entries = self._entries
        held, owns = entries.held, entries.own
        for end in (USED, AHEAD):
            for slot in entries.oldest_first(end):
                if over <= 0 and surplus <= 0:
                    return
                own = owns[slot]
                going = own if surplus > 0 else min(own, over)
                self._tokens -= going
                self.evicted += going
                over -= going
                if going < own:
                    held[slot] -= min(going, held[slot])
                    owns[slot] = own - going
                else:
                    surplus -= 1
                    self._empty(slot)
