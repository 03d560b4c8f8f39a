# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""What a session keeps of its newest prompt, read and written without an object for each unit.

The layout is told in `sessions/kept_units.py`, whose Python does the same where this is not built.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef extern from *:
    ctypedef long long int128_t "__int128"

cdef extern from "stdbool.h":
    ctypedef bint flag "bool"  # a byte

ctypedef unsigned char byte_t

cdef enum:
    HEAD_AT = 16  # before it is what the session has learnt
    UNITS_AT = 41
    UNIT_BYTES = 14
    REASONED = 1
    BLOCKS = 2
    REPLY_REASONED = 4
    REPLY_ALONE = 8
    MOST_PLACES = 4
    MOST_TURNS = 0xFFFF

cdef int64_t MOST = 0xFFFFFFFF  # tokens


cdef inline uint64_t loaded(const byte_t *data, int size) noexcept nogil:
    cdef uint64_t value = 0
    cdef int place
    for place in range(size):
        value |= <uint64_t>data[place] << (8 * place)
    return value


cdef inline void store(byte_t *data, uint64_t value, int size) noexcept nogil:
    cdef int place
    for place in range(size):
        data[place] = value >> (8 * place) & 0xFF


cdef class PackedUnits:
    cdef bytes _data
    cdef const byte_t *_units
    cdef readonly int entries, count, in_prompt, opener, opener_cuts
    cdef readonly uint32_t round_tokens, head_tokens
    cdef readonly uint64_t head_mask
    cdef readonly flag reasoned, is_blocks, reply_reasoned, has_reply_alone

    def __cinit__(self, bytes data not None):
        cdef const byte_t *head = <const byte_t *>PyBytes_AS_STRING(data) + HEAD_AT
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        self._data, self._units = data, head + (UNITS_AT - HEAD_AT)
        if size == HEAD_AT:  # of a session without units
            return
        if size < UNITS_AT or (size - UNITS_AT) % UNIT_BYTES:
            raise ValueError("kept units have another layout")
        self.entries = (size - UNITS_AT) // UNIT_BYTES
        self.round_tokens = loaded(head, 4)
        self.count, self.in_prompt = loaded(head + 4, 2), loaded(head + 6, 2)
        self.opener, self.opener_cuts = loaded(head + 8, 2), loaded(head + 10, 2)
        self.reasoned, self.is_blocks = head[12] & REASONED, head[12] & BLOCKS
        self.reply_reasoned, self.has_reply_alone = head[12] & REPLY_REASONED, head[12] & REPLY_ALONE
        self.head_mask, self.head_tokens = loaded(head + 13, 8), loaded(head + 21, 4)
        if not self.opener <= self.in_prompt <= self.count <= self.count + self.opener_cuts <= self.entries:
            raise ValueError("kept units have another layout")

    def is_of(self, bytes data not None):
        return self._data is data

    cdef const byte_t *_at(self, Py_ssize_t place) except NULL:
        if not 0 <= place < self.entries:
            raise IndexError(f"no unit is kept at {place}")
        return self._units + place * UNIT_BYTES

    cdef uint64_t _key(self, Py_ssize_t place) noexcept:
        return loaded(self._units + place * UNIT_BYTES, 8)

    cdef int64_t _tokens(self, Py_ssize_t place) noexcept:
        return loaded(self._units + place * UNIT_BYTES + 8, 4)

    def key(self, Py_ssize_t place):
        return loaded(self._at(place), 8)

    def tokens(self, Py_ssize_t place):
        return loaded(self._at(place) + 8, 4)

    def turn(self, Py_ssize_t place):
        return loaded(self._at(place) + 12, 2)

    def slice(self, Py_ssize_t start, Py_ssize_t end):
        end = min(end, self.entries)
        if not 0 <= start < end:
            return b""
        return PyBytes_FromStringAndSize(<const char *>self._units + start * UNIT_BYTES, (end - start) * UNIT_BYTES)

    @property
    def newest_key(self):
        return None if self.is_blocks or not self.in_prompt else self._key(self.in_prompt - 1)

    def shared(self, dict sizes not None):
        cdef Py_ssize_t low = 0, high = self.count, middle
        if high and self._key(high - 1) in sizes:  # nearly always: the session goes on
            return high
        while low < high:
            middle = (low + high) // 2
            if self._key(middle) in sizes:
                low = middle + 1
            else:
                high = middle
        return low

    def place(self, Py_ssize_t shared, dict sizes not None):
        if not shared:
            return None
        self._at(shared - 1)
        cdef Py_ssize_t at = shared - 1
        cdef int64_t tokens = self._tokens(at)
        while at and self._tokens(at - 1) == tokens:
            at -= 1
        return sizes[self._key(at)], tokens

    def kept(self, Py_ssize_t shared, tuple since not None, int64_t tokens, keys not None, ends not None):
        cdef int64_t size, known, end
        cdef uint64_t key
        cdef Py_ssize_t at = len(keys)
        size, known = since
        shared = self._within(known or tokens, shared)
        while shared:
            key = self._key(shared - 1)
            at -= 1
            while at >= 0 and <uint64_t>keys[at] != key:
                at -= 1
            if at < 0:
                raise KeyError(key)
            end = ends[at]
            if end <= size or not known:
                return shared, (end, self._tokens(shared - 1))
            shared -= 1
        return 0, (0, 0)

    def within(self, int64_t tokens, Py_ssize_t shared):
        return self._within(tokens, shared)

    cdef Py_ssize_t _within(self, int64_t tokens, Py_ssize_t shared) except -1:
        cdef Py_ssize_t low = 0, high = shared, middle
        if not shared or (self._at(shared - 1) and self._tokens(shared - 1) <= tokens):  # nearly always
            return shared
        while low < high:
            middle = (low + high) // 2
            if tokens < self._tokens(middle):
                high = middle
            else:
                low = middle + 1
        return low

    def index_keys(self, Py_ssize_t long_blocks):
        cdef Py_ssize_t place
        cdef set keys = set()
        if self.opener < self.count:
            keys.add(self._key(self.opener))
        if self.is_blocks:
            for place in range(long_blocks, self.in_prompt):
                keys.add(self._key(place))
        elif max(self.opener, self.in_prompt - 2) < self.count:
            keys.add(self._key(max(self.opener, self.in_prompt - 2)))
        if self.count > self.in_prompt:
            keys.add(self._key(self.in_prompt) ^ self.head_mask)
        for place in range(self.count, self.count + self.opener_cuts):
            keys.add(self._key(place))
        return keys


cdef class TokenLine:
    cdef int64_t _ends[MOST_PLACES]
    cdef int64_t _known[MOST_PLACES]
    cdef int _count

    def __cinit__(self, *places):
        if len(places) >= MOST_PLACES:
            raise ValueError("a line has three places")
        self._ends[0] = self._known[0] = 0
        self._count = 1
        for end, tokens in places:
            self._add(end, tokens)

    cdef void _add(self, int64_t end, int64_t tokens) noexcept:
        cdef int place = 0
        while place < self._count and self._ends[place] != end:
            place += 1
        self._ends[place], self._known[place] = end, tokens
        self._count = max(self._count, place + 1)

    cdef int64_t _at(self, int64_t end) noexcept:
        cdef int low = 0, high = self._count, middle
        cdef int64_t start, tokens
        cdef int128_t more, size
        while low < high:
            middle = (low + high) // 2
            if self._ends[middle] < end:
                low = middle + 1
            else:
                high = middle
        low = min(low, self._count - 1)
        if not low or end >= self._ends[low]:
            return min(self._known[low], MOST)
        start, tokens = self._ends[low - 1], self._known[low - 1]
        more, size = <int128_t>(self._known[low] - tokens) * (end - start), self._ends[low] - start
        return <int64_t>max(0, min(tokens + more // size, MOST))

    def at(self, int64_t end):
        return self._at(end)

    def packed(self, keys not None, ends not None, places not None, turn):
        cdef Py_ssize_t place
        cdef bytes units = PyBytes_FromStringAndSize(NULL, len(places) * UNIT_BYTES)
        cdef byte_t *unit = <byte_t *>PyBytes_AS_STRING(units)
        cdef uint64_t stamp = min(turn, MOST_TURNS)
        for place in places:
            store(unit, keys[place], 8)
            store(unit + 8, self._at(ends[place]), 4)
            store(unit + 12, stamp, 2)
            unit += UNIT_BYTES
        return units
