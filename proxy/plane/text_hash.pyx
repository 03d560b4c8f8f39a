# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The keys of messages that are one text, which nearly all are: SHA-256, by the CPU's instructions, over the digest of the
text and what comes before it."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from .body_parts cimport json_t
from .chat_messages cimport UNIT_HEAD_BYTES, FoundMessage, PlainMessage, UnitHead, number, read_head
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
cdef const char *END = b"\xff"  # of each string before a text

cdef enum:
    STEP_BYTES = 3  # of a packed unit's step, before what it holds
    KEY_BYTES = 8


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

    def known_key(self, uint64_t previous, bytes unit not None, places not None):
        """Of a unit as `sessions/message_units` packs it, in a prompt whose calls have these places. ValueError if it is
        none."""
        return self._known_key(previous, <json_t>PyBytes_AS_STRING(unit), PyBytes_GET_SIZE(unit), places)

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
                if not found._head.is_call:
                    places.begin_round()
                previous = self._known_key(
                    previous, <json_t>PyBytes_AS_STRING(found.unit), PyBytes_GET_SIZE(found.unit), places
                )
                size += found._head.size
                letters.append(found._head.letter)
            else:
                break
            keys.append(previous)
            ends.append(size)
            at += 1
        return keys, ends, letters, long_ones

    cdef uint64_t _known_key(self, uint64_t previous, json_t unit, Py_ssize_t size, places) except? 0:
        cdef sha256_t hash = self._begun(c"U", previous)
        cdef UnitHead head
        cdef bytes answers
        cdef Py_ssize_t at, length
        cdef unsigned char letter
        cdef json_t said
        cdef uint64_t key
        cdef unsigned char part[1 + KEY_BYTES]
        read_head(unit, size, &head)
        at = UNIT_HEAD_BYTES + head.before
        if head.answers:
            answers = (<str>places.result(id_at(unit + at, head.answers))).encode("utf-8", "surrogatepass")
            sha256_add(&hash, unit + UNIT_HEAD_BYTES, head.before - 1)
            sha256_add(&hash, PyBytes_AS_STRING(answers), PyBytes_GET_SIZE(answers))
            sha256_add(&hash, END, 1)
            at += head.answers
        else:
            sha256_add(&hash, unit + UNIT_HEAD_BYTES, head.before)
        while at < size:
            letter = unit[at]
            length = number(unit + at + 1, 2) if at + STEP_BYTES <= size else size
            said = unit + at + STEP_BYTES
            at += STEP_BYTES + length
            if at > size or (letter == c"C" and length < KEY_BYTES):
                raise ValueError("a step ends in its unit")
            if letter == c"S":
                sha256_add(&hash, said, length)
                continue
            if letter == c"C":
                key = self._call_key(said, length, places)
            else:
                key = self._known_key(0, said, length, places)
            part_of(letter, key, part)
            sha256_add(&hash, part, sizeof(part))
        return sha256_end(&hash) >> self._dropped_bits

    cdef uint64_t _call_key(self, json_t call, Py_ssize_t size, places) except? 0:
        cdef uint64_t key = 0
        cdef int place
        cdef bytes id
        cdef sha256_t hash
        for place in range(KEY_BYTES):
            key |= <uint64_t>call[place] << (8 * place)
        id = (<str>places.call(id_at(call + KEY_BYTES, size - KEY_BYTES))).encode("utf-8", "surrogatepass")
        if not id:
            return key
        hash = self._begun(c"C", key)
        sha256_add(&hash, PyBytes_AS_STRING(id), PyBytes_GET_SIZE(id))
        sha256_add(&hash, END, 1)
        return sha256_end(&hash) >> self._dropped_bits

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
        return before[: len(before) - 1] + call.encode() + END

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
        cdef unsigned char start[1 + KEY_BYTES]
        part_of(domain, previous, start)
        sha256_add(&hash, start, sizeof(start))
        return hash


cdef void part_of(char kind, uint64_t key, unsigned char *to) noexcept:
    cdef int place
    to[0] = kind
    for place in range(KEY_BYTES):
        to[place + 1] = key >> (8 * place) & 0xFF


cdef str id_at(json_t start, Py_ssize_t size):
    return PyUnicode_DecodeUTF8(<const char *>start, size, "surrogatepass")
