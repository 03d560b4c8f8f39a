# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The keys of messages that are one text, which nearly all are: SHA-256 by the CPU's instructions, in one call."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t

from .body_parts cimport PlainMessage

cdef extern from "sha256.h" nogil:
    ctypedef struct sha256_t:
        pass
    int sha256_is_there()
    void sha256_start(sha256_t *)
    void sha256_add(sha256_t *, const void *data, size_t size)
    uint64_t sha256_end(sha256_t *)

IS_FAST = bool(sha256_is_there())
"""Whether this CPU has the instructions. Without them `hashlib` is as fast, and `TextHash` must not be made."""


cdef tuple NOTHING = ((), (), (), b"", ())


cdef class TextHash:
    """Hashes that begin with the same secret block."""

    cdef sha256_t _root
    cdef int _dropped_bits
    cdef dict _before
    cdef bytes _end
    cdef Py_ssize_t _longest
    cdef object _long_end

    def __init__(
        self, bytes secret not None, int bits, dict before not None, bytes end not None, Py_ssize_t longest, long_end
    ):
        """secret: 64 bytes, a block of SHA-256. bits: of a key.

        before, end: of texts in a run. What comes before one, by the role that says it, and what after it. Of a text of
        more than `longest` bytes only those are hashed here, and what `long_end` makes of the text comes after them.
        """
        if PyBytes_GET_SIZE(secret) != 64 or not IS_FAST:
            raise ValueError("the secret must have 64 bytes, and the CPU instructions for SHA-256")
        sha256_start(&self._root)
        sha256_add(&self._root, PyBytes_AS_STRING(secret), 64)
        self._dropped_bits = 64 - bits
        self._before = before
        self._end = end
        self._longest = longest
        self._long_end = long_end

    def key(self, uint64_t previous, bytes before not None, bytes text not None, bytes end not None):
        """Of the first 8 bytes, little-endian, of the hash of `U`, `previous` in 8 bytes, and the three parts."""
        return self._key(previous, before, text, PyBytes_GET_SIZE(text), end)

    def run(self, list messages not None, Py_ssize_t at, uint64_t previous, Py_ssize_t size, Py_ssize_t around):
        """Of the messages from `at` on, as far as each is one text by one of the roles: keys, each chained to the one
        before it, what the prompt then measures, the texts, and the first letters of the roles. At last the long texts:
        of each the key before it, what is hashed before it, the text, and what the prompt measures before its message.

        size: of the prompt before them. around: what a message has beside its text.
        """
        cdef list keys, ends, texts, long_ones
        cdef bytearray roles
        cdef bytes text, end, before = self._before_text(messages, at)
        cdef Py_ssize_t hashed
        if before is None:
            return NOTHING
        keys, ends, texts, roles, long_ones = [], [], [], bytearray(), []
        while before is not None:
            text = (<PlainMessage>messages[at]).utf8
            hashed, end = PyBytes_GET_SIZE(text), self._end
            if hashed > self._longest:
                long_ones.append((previous, before, text, size))
                hashed, end = self._longest, self._long_end(text)
            previous = self._key(previous, before, text, hashed, end)
            size += around + PyBytes_GET_SIZE(text)
            keys.append(previous)
            ends.append(size)
            texts.append(text)
            roles.append(PyBytes_AS_STRING(before)[0])
            at += 1
            before = self._before_text(messages, at)
        return keys, ends, texts, roles, long_ones

    cdef bytes _before_text(self, list messages, Py_ssize_t at):
        """What comes before the text of the message there; None where the run has ended."""
        if not 0 <= at < len(messages) or type(messages[at]) is not PlainMessage:
            return None
        cdef PlainMessage message = <PlainMessage>messages[at]
        before = self._before.get(message.role)
        if before is None or message.name or message.tool_call_id is not None:
            return None
        return before if PyBytes_GET_SIZE(message.utf8) else None

    cdef uint64_t _key(self, uint64_t previous, bytes before, bytes text, Py_ssize_t hashed, bytes end) noexcept:
        """hashed: so many bytes of the text."""
        cdef sha256_t hash = self._root
        cdef unsigned char start[9]
        cdef int place
        start[0] = c"U"
        for place in range(8):
            start[place + 1] = previous >> (8 * place) & 0xFF
        sha256_add(&hash, start, 9)
        sha256_add(&hash, PyBytes_AS_STRING(before), PyBytes_GET_SIZE(before))
        sha256_add(&hash, PyBytes_AS_STRING(text), hashed)
        sha256_add(&hash, PyBytes_AS_STRING(end), PyBytes_GET_SIZE(end))
        return sha256_end(&hash) >> self._dropped_bits
