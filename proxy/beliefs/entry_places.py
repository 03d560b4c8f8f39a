"""Which books have an entry of a key, and where: so what is held of a prompt is looked up in the books that hold it,
however many workers there are.

The place of an entry is its book's number and a slot there (`entries`). Nearly all keys have one place or two, which
are packed into one number: 32 or 36 bytes. Where many workers hold the same beginning, a dict has them.
"""

from __future__ import annotations

from collections.abc import Mapping

_NUMBER_BITS = 25  # of a book: a proxy sees fewer workers come in its life
_SLOT_BITS = 20  # of an entry: 30 times as many as a book keeps, as each turn under way may have another one
_PLACE_BITS = _NUMBER_BITS + _SLOT_BITS  # two of them are three of CPython's digits
_ONE = 1 << _PLACE_BITS  # below it there is one place at most
_NUMBER = (1 << _NUMBER_BITS) - 1
_SLOT = (1 << _SLOT_BITS) - 1
_PACKED = 1 << (4 * _PLACE_BITS)  # four places at most


class EntryPlaces:
    """Books are numbered from 1; a slot is never 0."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: dict[int, int | dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def slot(self, key: int, number: int) -> int:
        """Of the key's entry in this book; 0: none."""
        found = self._places.get(key, 0)
        if isinstance(found, dict):
            return found.get(number, 0)
        while found:
            if found & _NUMBER == number:
                return found >> _NUMBER_BITS & _SLOT
            found >>= _PLACE_BITS
        return 0

    def of(self, key: int) -> Mapping[int, int]:
        """The slots of its entries, by the numbers of all books that have one."""
        found = self._places.get(key, 0)
        if isinstance(found, dict):
            return found
        if found < _ONE:  # nearly always
            return {found & _NUMBER: found >> _NUMBER_BITS} if found else {}
        places: dict[int, int] = {}
        while found:
            places[found & _NUMBER] = found >> _NUMBER_BITS & _SLOT
            found >>= _PLACE_BITS
        return places

    def add(self, key: int, number: int, slot: int) -> None:
        """The book must not have an entry of it yet."""
        found = self._places.get(key, 0)
        if not isinstance(found, int):
            found[number] = slot
            return
        packed = found << _PLACE_BITS | slot << _NUMBER_BITS | number
        self._places[key] = packed
        if packed >= _PACKED:
            self._places[key] = dict(self.of(key))

    def remove(self, key: int, number: int) -> None:
        """The book must have an entry of it."""
        found = self._places[key]
        if isinstance(found, int) and found < _ONE:  # it is the only place
            del self._places[key]
            return
        places = dict(self.of(key)) if isinstance(found, int) else found
        del places[number]
        if isinstance(found, int) or len(places) <= 2:
            packed = 0
            for left, slot in places.items():
                packed = packed << _PLACE_BITS | slot << _NUMBER_BITS | left
            self._places[key] = packed
