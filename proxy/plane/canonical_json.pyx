# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The one form of a tool call's arguments, however they were written: see `openai/prompts/tool_calls`."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc

cdef extern from "json_text.h" nogil:
    ctypedef const unsigned char *json_t
    int json_hex(json_t four)
    unsigned char *json_put(unsigned char *to, unsigned int code)

cdef enum:
    ESCAPE = 6  # bytes of one by number
    HELD = -1


def canonical_json(bytes text not None):
    """The canonical form of a whole text in UTF-8, which may hold lone surrogates; None where it may end in an escape
    that is not complete."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(text), written
    cdef unsigned char *to = <unsigned char *>PyMem_Malloc(size + 1)
    if to == NULL:
        raise MemoryError
    try:
        written = canonical(<json_t>PyBytes_AS_STRING(text), size, to)
        return None if written == HELD else PyBytes_FromStringAndSize(<const char *>to, written)
    finally:
        PyMem_Free(to)


cdef Py_ssize_t canonical(json_t data, Py_ssize_t size, unsigned char *start) noexcept nogil:
    """to: has room for as many bytes; the form is never longer."""
    cdef unsigned char *to = start
    cdef Py_ssize_t at = 0
    cdef bint is_inside = False
    cdef unsigned char code
    while at < size:
        code = data[at]
        if code == c'"':
            is_inside = not is_inside
        elif not is_inside:
            if code == c" " or code == c"\t" or code == c"\r" or code == c"\n":
                at += 1
                continue
        elif code == c"\\":
            at = unescaped(data, at, size, &to)
            if at == HELD:
                return HELD
            continue
        to[0] = code
        to += 1
        at += 1
    return to - start


cdef Py_ssize_t unescaped(json_t data, Py_ssize_t at, Py_ssize_t size, unsigned char **to) noexcept nogil:
    """Behind the escape at `at`, whose form is written; `HELD` where it may not be complete."""
    cdef unsigned char kind
    cdef int code, low
    if at + 1 >= size:
        return HELD
    kind = data[at + 1]
    if kind == c"u":
        if not has_ascii(data, at, size, ESCAPE):
            return HELD
        code = json_hex(data + at + 2)
        if 0xD800 <= code < 0xDC00:
            if not has_ascii(data, at, size, 2 * ESCAPE):
                return HELD
            low = json_hex(data + at + ESCAPE + 2) if data[at + 6] == c"\\" and data[at + 7] == c"u" else -1
            if 0xDC00 <= low < 0xE000:
                to[0] = json_put(to[0], 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
                return at + 2 * ESCAPE
        if code >= 0:
            if code == c'"' or code == c"\\":
                to[0] = json_put(to[0], c"\\")
            to[0] = json_put(to[0], code)
            return at + ESCAPE
    elif kind == c"/" or kind == c"b" or kind == c"f" or kind == c"n" or kind == c"r" or kind == c"t":
        to[0] = json_put(to[0], short_of(kind))
        return at + 2
    to[0] = json_put(to[0], c"\\")
    if kind < 0x80:
        to[0] = json_put(to[0], kind)
        return at + 2
    return at + 1  # the letter after it is written as any other


cdef bint has_ascii(json_t data, Py_ssize_t at, Py_ssize_t size, int count) noexcept nogil:
    """Whether so many letters follow; of others it is not told how many they are."""
    cdef int place
    if at + count > size:
        return False
    for place in range(count):
        if data[at + place] >= 0x80:
            return False
    return True


cdef unsigned char short_of(unsigned char kind) noexcept nogil:
    if kind == c"b":
        return 8
    if kind == c"f":
        return 12
    if kind == c"n":
        return 10
    if kind == c"r":
        return 13
    return 9 if kind == c"t" else kind
