"""The entries of one book, each in one of two lists in the order in which they were used.

A list goes from slot to slot in arrays: 24 bytes an entry. In a dict, where what is used again moves to the end, an
entry would take 90 to 140, and nothing would tell which books have one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice

from .entry_places import EntryPlaces

USED, AHEAD = 0, 1
"""The slots that begin and end the lists: what turns have used, and what turns that were sent will use."""

GROWTH = 16  # free slots are made so many at once


class Entries:
    """`held[slot]` tokens from the prompt's start are held; `own[slot]` is what it takes that no other entry counts."""

    __slots__ = ("_free", "_newer", "_number", "_older", "_places", "count", "held", "keys", "own")

    def __init__(self, places: EntryPlaces, number: int) -> None:
        self._places = places
        self._number = number
        self._free = 0  # the first of the free slots, each of which has the next one as its newer
        self.count = 0
        self.keys = array("Q", (0, 0))
        self.held = array("I", (0, 0))
        self.own = array("I", (0, 0))
        self._older = array("I", (USED, AHEAD))
        self._newer = array("I", (USED, AHEAD))

    def add(self, key: int, end: int) -> int:
        """A new entry, of nothing yet, as the newest of the list; its slot."""
        if not self._free:
            self._grow()
        older, newer, slot = self._older, self._newer, self._free
        self._free = newer[slot]
        self.keys[slot] = key
        self._places.add(key, self._number, slot)
        newest = older[end]
        older[slot], newer[slot] = newest, end
        newer[newest] = older[end] = slot
        self.count += 1
        return slot

    def _grow(self) -> None:
        size = len(self.keys)
        self._free = size
        self.keys.frombytes(bytes(8 * GROWTH))
        for numbers in (self.held, self.own, self._older):
            numbers.frombytes(bytes(4 * GROWTH))
        self._newer.extend(range(size + 1, size + GROWTH))
        self._newer.append(0)

    def renew(self, slot: int, end: int) -> None:
        """It is the newest of the list from here on."""
        older, newer = self._older, self._newer
        newest = older[end]
        if newest != slot:
            before, after = older[slot], newer[slot]
            newer[before], older[after] = after, before
            older[slot], newer[slot] = newest, end
            newer[newest] = older[end] = slot

    def remove(self, slot: int) -> None:
        self._places.remove(self.keys[slot], self._number)
        older, newer = self._older, self._newer
        before, after = older[slot], newer[slot]
        newer[before], older[after] = after, before
        self.held[slot] = self.own[slot] = 0
        newer[slot], self._free = self._free, slot
        self.count -= 1

    def remove_some(self, most: int) -> None:
        for end in (USED, AHEAD):
            for slot in islice(self.oldest_first(end), most):
                self.remove(slot)

    def oldest_first(self, end: int) -> Iterator[int]:
        """Slots; each may be removed when it has come."""
        newer = self._newer
        slot = newer[end]
        while slot != end:
            following = newer[slot]
            yield slot
            slot = following

    def newest_first(self, *ends: int) -> Iterator[int]:
        """Slots of these lists, one list after the other."""
        older = self._older
        for end in ends:
            slot = older[end]
            while slot != end:
                yield slot
                slot = older[slot]
