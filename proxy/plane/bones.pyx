# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""How deep a JSON text is nested and how much there is in it, in one pass that makes no objects."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer

cdef extern from "json_text.h" nogil:
    ctypedef const unsigned char *json_t
    Py_ssize_t json_string_end(json_t, Py_ssize_t at, Py_ssize_t size, int *kinds, Py_ssize_t *escapes)

cdef enum:
    DEEPEST = 1024  # levels whose kind is kept
    ESCAPES = 16  # that take as long to read as one value


cdef struct Bones:
    Py_ssize_t depth
    Py_ssize_t elements
    Py_ssize_t weight


def bones(data):
    """Of a JSON text, as any buffer of bytes: the deepest level, the elements of all lists, and its weight.

    The outermost list or object is level 1. An empty list counts as one element. Of lists below level 1,024 none are
    counted. The weight is at least the number of values and a 16th of the number of escapes in strings: what takes time
    to decode. For a text that is not JSON the figures mean nothing.
    """
    cdef Py_buffer view
    cdef Bones found
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        found = counted(<json_t>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return found.depth, found.elements, found.weight


cdef Bones counted(json_t data, Py_ssize_t size) noexcept nogil:
    cdef Bones found
    cdef unsigned char is_list[DEEPEST + 1]
    cdef Py_ssize_t at = 0, level = 0, escapes = 0
    cdef unsigned char code
    cdef int kinds = 0
    found.depth = found.elements = 0
    found.weight = 1
    is_list[0] = 0
    while at < size:
        code = data[at]
        at += 1
        if code == c'"':
            at = json_string_end(data, at, size, &kinds, &escapes)
            if at < 0:  # so it is not JSON
                break
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
    found.weight += escapes / ESCAPES
    return found
