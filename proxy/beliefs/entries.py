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

    def slot(self, key: int) -> int:
        """0: it has no entry."""
        return self._places.slot(key, self._number)

    def add(self, key: int, end: int) -> int:
        """A new entry, of nothing yet, as the newest of the list; its slot."""
        slot = self._free
        if slot:
            self._free = self._newer[slot]
            self.keys[slot] = key
        else:
            slot = len(self.keys)
            self.keys.append(key)
            for numbers in (self.held, self.own, self._older, self._newer):
                numbers.append(0)
        self._places.add(key, self._number, slot)
        self._link(slot, end)
        self.count += 1
        return slot

    def renew(self, slot: int, end: int) -> None:
        """It is the newest of the list from here on."""
        if self._older[end] != slot:
            self._unlink(slot)
            self._link(slot, end)

    def remove(self, slot: int) -> None:
        self._places.remove(self.keys[slot], self._number)
        self._unlink(slot)
        self.held[slot] = self.own[slot] = 0
        self._newer[slot], self._free = self._free, slot
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

    def _link(self, slot: int, end: int) -> None:
        older, newer = self._older, self._newer
        newest = older[end]
        older[slot], newer[slot] = newest, end
        newer[newest] = older[end] = slot

    def _unlink(self, slot: int) -> None:
        older, newer = self._older, self._newer
        before, after = older[slot], newer[slot]
        newer[before], older[after] = after, before
