# cython: language_level=3, annotation_typing=False, infer_types=True
# cython: boundscheck=False, wraparound=False, initializedcheck=False
"""The entries of all books: where a key has one, and the order in which those of a book were used.

What is held of a prompt is looked up in the books that hold it, however many workers there are. So one table has the
entries of all books, in arrays of 32 bytes an entry. In these, lists go from slot to slot: the entries of one key, and
those of each book in the order of their use. In a dict, where what is used again moves to the end, an entry would take
90 to 140 bytes, and nothing would tell which books have one.
"""

from __future__ import annotations

from array import array

GROWTH = 16  # free slots are made so many at once, and a sixteenth of those that are


class Entries:
    """Slot 0 is nowhere, and holds nothing. Books are numbered from 1."""

    __slots__ = ("_also", "_arrays", "_first", "_free", "_held", "_keys", "_newer", "_numbers", "_older", "_own")

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # by key: its entry that was added last
        self._arrays = tuple(array(code, bytes(8 if code == "Q" else 4)) for code in "Qiiiiii")
        self._see()
        self._free = 0  # the first of the free slots, each of which has the next one as its newer

    def __len__(self) -> int:
        """Keys that have an entry."""
        return len(self._first)

    # -- entries

    def slot(self, key: int, number: int) -> int:
        """Of the key's entry in the book of this number, until that is removed; 0: none."""
        slot = self._first.get(key, 0)
        while slot and self._numbers[slot] != number:
            slot = self._also[slot]
        return slot

    def first(self, key: int) -> int:
        """The slot of its newest entry in any book; 0: none."""
        return self._first.get(key, 0)

    def also(self, slot: int) -> int:
        """Of the same key in another book, until each has come; 0: that was the last."""
        return self._also[slot]

    def number(self, slot: int) -> int:
        """Of its book."""
        return self._numbers[slot]

    def key(self, slot: int) -> int:
        return self._keys[slot]

    def held(self, slot: int) -> int:
        """Tokens from the prompt's start."""
        return self._held[slot]

    def own(self, slot: int) -> int:
        """What it takes that no other entry counts."""
        return self._own[slot]

    def set(self, slot: int, held: int, own: int) -> None:
        """Raises OverflowError for less than nothing."""
        if held < 0 or own < 0:
            raise OverflowError("an entry of less than no tokens")
        self._held[slot] = held
        self._own[slot] = own

    # -- lists

    def open(self, number: int) -> int:
        """A new list of this book, which begins and ends with this slot."""
        slot = self._take(0)
        self._numbers[slot] = number
        self._older[slot] = self._newer[slot] = slot
        return slot

    def close(self, end: int) -> None:
        """A list that is empty."""
        self._newer[end] = self._free
        self._free = end

    def add(self, key: int, end: int) -> int:
        """A new entry, of nothing yet, as the newest of the list; its slot. The book must not have one of the key."""
        slot = self._take(key)
        self._numbers[slot] = self._numbers[end]
        self._also[slot] = self._first.get(key, 0)
        self._first[key] = slot
        self._link(slot, end)
        return slot

    def renew(self, slot: int, end: int) -> None:
        """It is the newest of the list from here on."""
        if self._older[end] != slot:
            self._unlink(slot)
            self._link(slot, end)

    def remove(self, slot: int) -> None:
        key = self._keys[slot]
        before = self._first[key]
        if before != slot:
            while self._also[before] != slot:
                before = self._also[before]
            self._also[before] = self._also[slot]
        elif self._also[slot]:
            self._first[key] = self._also[slot]
        else:
            del self._first[key]
        self._unlink(slot)
        self._held[slot] = self._own[slot] = 0
        self._newer[slot] = self._free
        self._free = slot

    def oldest(self, end: int) -> int:
        """The slot of the list that was used longest ago; the list's own if it is empty."""
        return self._newer[end]

    def newer(self, slot: int) -> int:
        """The next one in its list; the list's own slot comes last."""
        return self._newer[slot]

    def newest(self, end: int) -> int:
        return self._older[end]

    def older(self, slot: int) -> int:
        return self._older[slot]

    # -- inside

    def _link(self, slot: int, end: int) -> None:
        newest = self._older[end]
        self._older[slot] = newest
        self._newer[slot] = end
        self._newer[newest] = self._older[end] = slot

    def _unlink(self, slot: int) -> None:
        before, after = self._older[slot], self._newer[slot]
        self._newer[before] = after
        self._older[after] = before

    def _take(self, key: int) -> int:
        """A free slot. Raises OverflowError where the key is not of 64 bits."""
        if not self._free:
            self._grow()
        slot = self._free
        self._keys[slot] = key
        self._free = self._newer[slot]
        return slot

    def _grow(self) -> None:
        size = len(self._arrays[0])
        more = GROWTH + size // 16
        self._keys = _NO_KEYS
        self._held = self._own = self._older = self._newer = self._numbers = self._also = _NO_NUMBERS  # nothing looks
        for numbers in self._arrays:
            numbers.frombytes(bytes(numbers.itemsize * more))
        self._see()
        for slot in range(size, size + more):
            self._newer[slot] = slot + 1
        self._newer[size + more - 1] = 0
        self._free = size

    def _see(self) -> None:
        keys, self._held, self._own, self._older, self._newer, self._numbers, self._also = self._arrays
        self._keys = keys


_NO_KEYS = array("Q")
_NO_NUMBERS = array("i")
