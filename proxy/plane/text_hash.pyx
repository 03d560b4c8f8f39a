# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The keys of messages that are one short text, which nearly all are: SHA-256 by the CPU's instructions, in one call."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t

cdef extern from "sha256.h" nogil:
    ctypedef struct sha256_t:
        pass
    int sha256_is_there()
    void sha256_start(sha256_t *)
    void sha256_add(sha256_t *, const void *data, size_t size)
    uint64_t sha256_end(sha256_t *)

IS_FAST = bool(sha256_is_there())
"""Whether this CPU has the instructions. Without them `hashlib` is as fast, and `TextHash` must not be made."""


cdef class TextHash:
    """Hashes that begin with the same secret block."""

    cdef sha256_t _root

    def __init__(self, bytes secret not None):
        """secret: 64 bytes, a block of SHA-256."""
        if PyBytes_GET_SIZE(secret) != 64 or not IS_FAST:
            raise ValueError("the secret must have 64 bytes, and the CPU instructions for SHA-256")
        sha256_start(&self._root)
        sha256_add(&self._root, PyBytes_AS_STRING(secret), 64)

    def key(self, unsigned long long previous, bytes before not None, bytes text not None, bytes end not None):
        """The first 8 bytes, little-endian, of the hash of `U`, `previous` in 8 bytes, and the three parts."""
        cdef sha256_t hash = self._root
        cdef unsigned char start[9]
        cdef int place
        start[0] = c"U"
        for place in range(8):
            start[place + 1] = previous >> (8 * place) & 0xFF
        sha256_add(&hash, start, 9)
        sha256_add(&hash, PyBytes_AS_STRING(before), PyBytes_GET_SIZE(before))
        sha256_add(&hash, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
        sha256_add(&hash, PyBytes_AS_STRING(end), PyBytes_GET_SIZE(end))
        return sha256_end(&hash)
