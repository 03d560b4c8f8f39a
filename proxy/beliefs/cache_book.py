# cython: language_level=3, annotation_typing=False, infer_types=True
# cython: boundscheck=False, wraparound=False
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

from .entries import Entries
from .held import MARK_BITS, Mark

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
        *("_awaited", "_believed", "_count", "_counted", "_counts", "_marks", "_missed", "ahead", "capacity"),
        *("entries", "evicted", "incarnation", "number", "reported", "tokens", "used"),
    )

    def __init__(
        self,
        incarnation: str,
        entries: Entries | None = None,
        number: int = 1,
        marks: dict[int, int] | None = None,
    ) -> None:
        """entries: of all books, of which this one has a number of its own. marks: see `Beliefs`."""
        self.incarnation = incarnation
        self.number = number
        self._marks = {} if marks is None else marks
        self.entries = Entries() if entries is None else entries
        self.used = self.entries.open(number)  # what turns have used
        self.ahead = self.entries.open(number)  # what turns that were sent will use
        self._count = 0
        # By key: turns that were sent and have not used their entry yet, which may be of nothing.
        self._awaited: dict[int, int] = {}
        self.tokens = 0  # of all that is believed to be held
        self.evicted = 0  # tokens so far, as is believed
        self.reported = 0  # capacity; 0: unknown, and nothing is ever believed to be evicted
        self._believed = 0  # capacity by the answers; 0: as reported
        self.capacity = 0  # by both; 0: unknown
        self._counts = 0  # of cached tokens: what divides all of them
        self._counted = 0  # of those, as far as it matters
        self._missed = 0  # the history that was gone by the newest answers; 0: they found what was believed

    def __len__(self) -> int:
        return self._count

    def slot(self, key: int) -> int:
        """Where its entry is, until that is removed; 0: nowhere."""
        return self.entries.slot(key, self.number)

    def held(self, key: int) -> int:
        return self.entries.held(self.entries.slot(key, self.number))

    def used_since(self, slot: int) -> int:
        """Tokens of what was used after this entry; 0 if it holds nothing.

        Of all others, where that would take long to count, or nothing is about to be evicted.
        """
        entries = self.entries
        if not entries.held(slot):
            return 0
        others = self.tokens - entries.own(slot)
        if 2 * self.tokens < self.capacity or not self.reported:
            return others
        since, left, end = 0, LOOKED_AT, self.ahead
        newer = entries.newest(end)
        while left:
            if newer == slot:
                return since
            if newer != end:
                since += entries.own(newer)
                left -= 1
                newer = entries.older(newer)
            elif end == self.used:
                break
            else:
                end = self.used
                newer = entries.newest(end)
        return others

    def room(self) -> float:
        """Tokens that can be written before anything is evicted."""
        capacity = self.capacity
        return max(0, capacity - self.tokens) if capacity else math.inf

    def oldest(self, most: int) -> list[tuple[int, int]]:
        """Keys of what no turn uses, in the order in which they will be evicted, and the tokens that go with each."""
        entries = self.entries
        found: list[tuple[int, int]] = []
        slot = entries.oldest(self.used)
        while slot != self.used and len(found) < most:
            found.append((entries.key(slot), entries.own(slot)))
            slot = entries.newer(slot)
        return found

    def newest(self, most: int) -> list[int]:
        """Keys of what no turn uses, and was used last."""
        entries = self.entries
        found: list[int] = []
        slot = entries.newest(self.used)
        while slot != self.used and len(found) < most:
            found.append(entries.key(slot))
            slot = entries.older(slot)
        return found

    def clear(self, most: int) -> bool:
        """Some of what an engine held that is gone; whether that was all, and it may be told of nothing more."""
        for end in (self.used, self.ahead):
            for _ in range(most):
                slot = self.entries.oldest(end)
                if slot == end:
                    break
                self._remove(slot)
        if self._count:
            return False
        self.entries.close(self.used)
        self.entries.close(self.ahead)
        return True

    @property
    def lessons(self) -> tuple[int, int, int]:
        """What `adopt` takes."""
        return self._believed, self._counts, self._missed

    def adopt(self, believed: int, counts: int, missed: int) -> None:
        """What another process has learned from answers."""
        self._counts, self._missed = counts, missed
        self._believe(believed)
        self._shrink()

    def report(self, capacity: int) -> None:
        """As the engine says."""
        if capacity != self.reported:
            self.reported = capacity
            self._believe(self._believed)
            self._shrink()

    def is_shared(self, history: int, mark: Mark) -> bool:
        """Whether it has an entry, or another history has passed it."""
        return self.held(mark.key) > 0 or self._marks.get(mark.key, history << MARK_BITS) >> MARK_BITS != history

    def touch(self, history: int, tokens: int, marks: Sequence[Mark] = ()) -> None:
        """The engine has just used this prefix, and holds so many tokens of it.

        marks: of the prompt, shortest first.
        """
        self._enter(history, self.entries.slot(history, self.number), tokens, tokens, marks, self._marks)

    def expect(self, history: int, slot: int, tokens: int, marks: Sequence[Mark] = ()) -> None:
        """A turn was sent that will use this prefix, and have so many tokens, before turns that are sent later.

        slot: the history's.
        """
        if not self.reported:
            return
        entries, awaited = self.entries, self._awaited.get(history, 0)
        self._awaited[history] = awaited + 1
        if not slot:
            slot = self._add(history, self.ahead)
        elif not awaited:
            entries.renew(slot, self.ahead)
        held = entries.held(slot)
        if self._believed and 2 * held < tokens:  # no LOCAL turn comes for so little, whose answer could raise it
            self._raise(self.reported // RECOVERY)
        self._enter(history, slot, held, held if held > tokens else tokens, marks, None)

    def pass_on(self, key: int, tokens: int) -> int:
        """A newer entry begins with so many tokens of this one, which count there from here on.

        What `take_back` takes: those that counted here, as its beginning may count elsewhere.
        """
        entries, slot = self.entries, self.slot(key)
        own = entries.own(slot)
        passed = min(own, max(0, tokens - max(0, entries.held(slot) - own)))
        self.tokens -= passed
        entries.set(slot, entries.held(slot), own - passed)
        return passed

    def take_back(self, key: int, passed: int) -> None:
        """That newer entry came to nothing."""
        entries, slot = self.entries, self.slot(key)
        own = entries.own(slot)
        whole = min(max(own, entries.held(slot)), own + passed)
        self.tokens += whole - own
        entries.set(slot, entries.held(slot), whole)
        self._shrink()

    def begin(self, history: int, tokens: int, marks: Sequence[Mark] = ()) -> None:
        """A turn that was expected uses its prefix now. The engine may hold more of it than this turn has, and then
        keeps it."""
        slot = self.entries.slot(history, self.number)
        if self._awaited:
            self._has_come(history)
        held = self.entries.held(slot)
        held = held if held > tokens else tokens
        self._enter(history, slot, held, held, marks, self._marks)

    def withdraw(self, key: int) -> None:
        """A turn that was expected does not come."""
        entries, slot = self.entries, self.slot(key)
        held, room = entries.held(slot), entries.own(slot)
        if self._has_come(key):
            if not held and not room:
                self._remove(slot)
                return
            entries.renew(slot, self.used)
        if room > held:
            self.tokens -= room - held
            if held:
                entries.set(slot, held, held)
            else:
                self._empty(slot)

    def forget(self, key: int) -> None:
        """Nobody will ask for it again. Where the capacity is known it goes on taking room, as in the engine."""
        slot = 0 if self.reported else self.slot(key)
        if slot:
            self.tokens -= self.entries.own(slot)
            self._empty(slot)

    def found(self, history: int, since: int, held: int, cached: int) -> None:
        """An answer says how much of an entry the engine had cached. since: as of `used_since`, when the turn was sent.

        Text that the model's template leaves out of a later prompt looks like eviction, and estimates err. So an eighth
        that is missing tells nothing. What was used recently is taken for evicted only if most of it is gone, and the
        answer before said so of another history: one alone may be rendered anew each time, in a way that is not seen
        here, and the engine then holds all that others have there. So that tells of its own entry alone.
        """
        reported = self.reported
        if not reported:
            return
        if cached:
            self._counts = math.gcd(self._counts, cached)
            if self._counted < BLOCK_SAMPLES:
                self._counted += 1
        missing = held - cached
        if missing <= held // 8 or missing <= self._excused(held):  # nearly always by the eighth
            self._missed = 0
            if self._believed:
                self._raise(max(1, reported // RECOVERY, cached - held))
            return
        fits = max(self._block(), since + cached)
        is_gone = 2 * cached < held
        if 2 * fits >= reported or (is_gone and self._missed not in (0, history)):
            self._believe(min(fits, self.capacity))
            self._shrink()
        elif is_gone and self._missed == history:
            self._cut(history, cached)
        if is_gone:
            self._missed = history

    def _cut(self, history: int, tokens: int) -> None:
        """No more than so many tokens of its prefix are held."""
        entries, slot = self.entries, self.slot(history)
        gone = entries.held(slot) - tokens
        if gone > 0:
            own = entries.own(slot)
            left = own - gone if tokens and own > gone else 0
            self.tokens -= own - left
            entries.set(slot, tokens, left)
            if not tokens:
                self._empty(slot)

    def _excused(self, held: int) -> int:
        """Tokens that may be missing of a prefix, as engines cache whole blocks."""
        block = self._block()
        return max(2 * min(block, USUAL_BLOCK_TOKENS), min(2 * block, held // 2))

    def _block(self) -> int:
        if self._counted == BLOCK_SAMPLES:
            return min(max(self._counts, BLOCK_TOKENS), BLOCK_TOKENS_LIMIT)
        return min(max(self._counts & -self._counts, BLOCK_TOKENS), USUAL_BLOCK_TOKENS)

    def _raise(self, tokens: int) -> None:
        raised = self._believed + tokens
        self._believe(0 if raised >= self.reported else raised)

    def _believe(self, capacity: int) -> None:
        self._believed = capacity
        self.capacity = min(capacity, self.reported) if capacity else self.reported

    def _has_come(self, key: int) -> bool:
        """A turn that was awaited; whether it was the last."""
        awaited = self._awaited.get(key, 0)
        if awaited > 1:
            self._awaited[key] = awaited - 1
        elif awaited:
            del self._awaited[key]
        return awaited == 1

    def _enter(
        self, history: int, slot: int, held: int, room: int, marks: Sequence[Mark], passed: dict[int, int] | None
    ) -> None:
        """Gives a prefix its room, each beginning of it that is shared in an entry of its own: see `is_shared`.

        held: of the room; passed: marks, as `Beliefs` has them.
        """
        entries, key, at = self.entries, history, len(marks)
        while at:
            at -= 1
            mark = marks[at]
            tokens = mark.tokens
            if tokens < room:
                mark_key = mark.key
                mark_slot = entries.slot(mark_key, self.number)
                known = None if passed is None else passed.get(mark_key)
                if entries.held(mark_slot) or (known is not None and known >> MARK_BITS != history):
                    self._put(key, slot, held, room - tokens)
                    key, slot, held, room = mark_key, mark_slot, tokens, tokens
        self._put(key, slot, held, room)  # the shortest beginning comes last: it is evicted last
        if self.tokens > self.capacity > 0 or self._count > ENTRIES_KEPT:
            self._shrink()

    def _put(self, key: int, slot: int, held: int, own: int) -> None:
        """Makes an entry the newest, with so many tokens held and as its own; slot: where it is, 0 for a new one."""
        entries = self.entries
        if not slot:
            slot = self._add(key, self.used)
        elif key not in self._awaited:
            entries.renew(slot, self.used)
        own = own if own < _MOST else _MOST
        self.tokens += own - entries.own(slot)
        entries.set(slot, held if held < _MOST else _MOST, own)

    def _empty(self, slot: int) -> None:
        if self.entries.key(slot) in self._awaited:
            self.entries.set(slot, 0, 0)
        else:
            self._remove(slot)

    def _add(self, key: int, end: int) -> int:
        slot = self.entries.add(key, end)
        self._count += 1
        return slot

    def _remove(self, slot: int) -> None:
        self.entries.remove(slot)
        self._count -= 1

    def _shrink(self) -> None:
        over = self.tokens - self.capacity if self.capacity else 0
        surplus = self._count - ENTRIES_KEPT
        if surplus > 0:
            surplus += ENTRIES_KEPT // 8  # the next ones have room
        if over > 0 or surplus > 0:
            self._evict(over, surplus)

    def _evict(self, over: int, surplus: int) -> None:
        """At least so many tokens, and so many entries."""
        entries, end = self.entries, self.used
        slot = entries.oldest(end)
        while over > 0 or surplus > 0:
            if slot == end:
                if end == self.ahead:
                    return
                end = self.ahead
                slot = entries.oldest(end)
                continue
            following = entries.newer(slot)
            own, held = entries.own(slot), entries.held(slot)
            going = own if surplus > 0 or own < over else over
            self.tokens -= going
            self.evicted += going
            over -= going
            if going < own:
                entries.set(slot, held - going if held > going else 0, own - going)
            else:
                surplus -= 1
                self._empty(slot)
            slot = following
