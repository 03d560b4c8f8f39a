# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The keys of messages that are one text, which nearly all are: SHA-256, by the CPU's instructions, over the digest of the
text and what comes before it."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from .chat_messages cimport FoundMessage, PlainMessage
from .text_digest cimport DIGEST_BYTES, TextPoint, polyval_add, polyval_end, polyval_start, polyval_t

from .text_digest import IS_FAST as HAS_POINTS

cdef extern from "sha256.h" nogil:
    ctypedef struct sha256_t:
        pass
    int sha256_is_there()
    void sha256_start(sha256_t *)
    void sha256_add(sha256_t *, const void *data, size_t size)
    uint64_t sha256_end(sha256_t *)

IS_FAST = bool(sha256_is_there() and HAS_POINTS)
"""Whether this CPU has the instructions for this and for digests. Without them `hashlib` is as fast."""

cdef bytes UNIT = b"UT"


cdef class TextHash:
    """Hashes that begin with the same secret block."""

    cdef sha256_t _root
    cdef TextPoint _point
    cdef int _dropped_bits
    cdef dict _before
    cdef Py_ssize_t _longest

    def __init__(
        self, bytes secret not None, TextPoint point not None, int bits, dict before not None, Py_ssize_t longest
    ):
        """secret: 64 bytes, a block of SHA-256. bits: of a key. before: what comes before a text in a run, by the role
        that says it. longest: bytes of a text that is not long.
        """
        if PyBytes_GET_SIZE(secret) != 64 or not IS_FAST:
            raise ValueError("the secret must have 64 bytes, and the CPU the instructions for SHA-256")
        sha256_start(&self._root)
        sha256_add(&self._root, PyBytes_AS_STRING(secret), 64)
        self._point = point
        self._dropped_bits = 64 - bits
        self._before = before
        self._longest = longest

    def key(self, uint64_t previous, bytes before not None, bytes text not None):
        """Of the first 8 bytes, little-endian, of the hash of `U`, `previous` in 8 bytes, what comes before, `T`, and
        the digest of the text."""
        return self._key(previous, before, text)

    def message_key(self, uint64_t previous, bytes before not None, PlainMessage message not None):
        """As `key`, of a message's text, which may have been hashed as it was found."""
        cdef unsigned char digest[DIGEST_BYTES]
        message.digest_by(self._point, digest)
        return self._hashed(UNIT, previous, before, digest)

    def cuts(
        self,
        bytes domain not None,
        uint64_t previous,
        bytes before not None,
        bytes text not None,
        list offsets not None,
    ):
        """Keys of the beginnings of a text, in order: as `key` hashes them, behind another letter and another mark.

        domain: the letter in place of `U`, and the mark in place of `T`. offsets: where they end, rising.
        """
        cdef polyval_t state
        cdef const char *start = PyBytes_AS_STRING(text)
        cdef Py_ssize_t at = 0, offset
        cdef unsigned char digest[DIGEST_BYTES]
        cdef list keys = []
        if PyBytes_GET_SIZE(domain) != 2:
            raise ValueError("a letter and a mark")
        polyval_start(&state)
        for offset in offsets:
            if not at <= offset <= PyBytes_GET_SIZE(text):
                raise ValueError("offsets rise, and lie in the text")
            polyval_add(&self._point.point, &state, start + at, offset - at)
            at = offset
            polyval_end(&self._point.point, &state, digest)
            keys.append(self._hashed(domain, previous, before, digest))
        return keys

    def unit_key(self, uint64_t previous, bytes start not None):
        """Of the hash of `U`, `previous` in 8 bytes, and what comes behind them."""
        cdef sha256_t hash = self._begun(c"U", previous)
        sha256_add(&hash, PyBytes_AS_STRING(start), PyBytes_GET_SIZE(start))
        return sha256_end(&hash) >> self._dropped_bits

    def run(self, list messages not None, Py_ssize_t at, uint64_t previous, Py_ssize_t size, Py_ssize_t around, places):
        """Of the messages from `at` on, as far as each is known, or one text by one of the roles: keys, each chained to the
        one before it, what the prompt then measures, and a letter for who says each: of a text the first one of its role.
        At last the texts of more than `long_bytes`: of each the key before it, what is hashed before it, the text, and what
        the prompt measures before its message.

        size: of the prompt before them. around: what a message has beside its text. places: of tool calls; None where no
        message has had any, and then the run ends before the first that has.
        """
        cdef list keys = [], ends = [], long_ones = []
        cdef bytearray letters = bytearray()
        cdef PlainMessage message
        cdef FoundMessage found
        cdef unsigned char digest[DIGEST_BYTES]
        cdef bytes before
        unit_key = self.unit_key
        while 0 <= at < len(messages):
            if type(messages[at]) is PlainMessage:
                message = <PlainMessage>messages[at]
                before = self._before_text(message, places)
                if before is None:
                    break
                if message.size > self._longest:
                    long_ones.append((previous, before, message, size))
                if places is not None:  # calls behind it are of another round
                    places.begin_round()
                message.digest_by(self._point, digest)
                previous = self._hashed(UNIT, previous, before, digest)
                size += around + message.size
                letters.append(PyBytes_AS_STRING(before)[0])
            elif type(messages[at]) is FoundMessage and places is not None:
                found = <FoundMessage>messages[at]
                if found.unit is None:
                    break
                if not found.unit.is_call:
                    places.begin_round()
                previous = found.unit.key_after(previous, places, unit_key)
                size += found.unit.size
                letters.append(found.unit.letter)
            else:
                break
            keys.append(previous)
            ends.append(size)
            at += 1
        return keys, ends, letters, long_ones

    cdef bytes _before_text(self, PlainMessage message, places):
        """What comes before the text of this message; None where it has to be hashed by itself."""
        cdef bytes before = self._before.get(message.role)
        if before is None or message.name or not message.size:
            return None
        if message.tool_call_id:
            return None if places is None else self._answering(before, places.result(message.tool_call_id))
        return before

    cdef bytes _answering(self, bytes before, str call):
        """before: a role, and what ends each of its three parts."""
        return before[:-1] + call.encode() + before[-1:]

    cdef uint64_t _key(self, uint64_t previous, bytes before, bytes text) noexcept:
        cdef unsigned char digest[DIGEST_BYTES]
        self._point.digest(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text), digest)
        return self._hashed(UNIT, previous, before, digest)

    cdef uint64_t _hashed(self, bytes domain, uint64_t previous, bytes before, const unsigned char *digest) noexcept:
        cdef sha256_t hash = self._begun(PyBytes_AS_STRING(domain)[0], previous)
        cdef unsigned char end[1 + DIGEST_BYTES]
        end[0] = PyBytes_AS_STRING(domain)[1]
        memcpy(end + 1, digest, DIGEST_BYTES)
        sha256_add(&hash, PyBytes_AS_STRING(before), PyBytes_GET_SIZE(before))
        sha256_add(&hash, end, 1 + DIGEST_BYTES)
        return sha256_end(&hash) >> self._dropped_bits

    cdef sha256_t _begun(self, char domain, uint64_t previous) noexcept:
        cdef sha256_t hash = self._root
        cdef unsigned char start[9]
        cdef int place
        start[0] = domain
        for place in range(8):
            start[place + 1] = previous >> (8 * place) & 0xFF
        sha256_add(&hash, start, 9)
        return hash
