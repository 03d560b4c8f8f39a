# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""How deep a JSON text is nested and how much there is in it, in one pass that makes no objects."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #define ONES 0x0101010101010101ull
    #define HIGHS 0x8080808080808080ull
    /* Not 0 if one of the eight bytes is 0; exact, as only whether there is one counts. */
    static inline unsigned long long has_zero(unsigned long long v) { return (v - ONES) & ~v & HIGHS; }
    #define HAS(v, code) has_zero((v) ^ (ONES * (unsigned char)(code)))
    """
    uint64_t HAS(uint64_t eight, char code) nogil

cdef enum:
    DEEPEST = 1024  # levels whose kind is kept


cdef struct Bones:
    Py_ssize_t depth
    Py_ssize_t elements
    Py_ssize_t weight


def bones(data):
    """Of a JSON text, as any buffer of bytes: the deepest level, the elements of all lists, and its weight.

    The outermost list or object is level 1. An empty list counts as one element. Of lists below level 1,024 none are
    counted. The weight is at least the number of values, and of escapes in strings: what takes time to decode. For a
    text that is not JSON the figures mean nothing.
    """
    cdef Py_buffer view
    cdef Bones found
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        found = counted(<const char *>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return found.depth, found.elements, found.weight


cdef Bones counted(const char *data, Py_ssize_t size) noexcept nogil:
    cdef Bones found
    cdef unsigned char is_list[DEEPEST + 1]
    cdef Py_ssize_t at = 0, level = 0
    cdef char code
    found.depth = found.elements = 0
    found.weight = 1
    is_list[0] = 0
    while at < size:
        code = data[at]
        at += 1
        if code == c'"':
            at = string_end(data, at, size, &found.weight)
        elif code == c",":
            found.weight += 1
            if level <= DEEPEST:
                found.elements += is_list[level]
        elif code == c"[" or code == c"{":
            level += 1
            found.weight += 1
            if level > found.depth:
                found.depth = level
            if level <= DEEPEST:
                is_list[level] = code == c"["
                found.elements += is_list[level]
        elif (code == c"]" or code == c"}") and level > 0:
            level -= 1
    return found


cdef Py_ssize_t string_end(const char *data, Py_ssize_t at, Py_ssize_t size, Py_ssize_t *escapes) noexcept nogil:
    """Behind the quotation mark that ends the string at `at`; `size` if there is none. Counts its escapes."""
    cdef uint64_t eight
    while at < size:
        while at + 8 <= size:
            memcpy(&eight, data + at, 8)
            if HAS(eight, c'"') or HAS(eight, c"\\"):
                break
            at += 8
        while at < size:
            at += 1
            if data[at - 1] == c'"':
                return at
            if data[at - 1] == c"\\":
                at += 1  # whatever it is, it does not end the string
                escapes[0] += 1
            if at & 7 == 0:
                break
    return size
