# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""What a JSON body is made of, without decoding it: its members, how deep they are, and how much is in them."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING

cdef enum:
    MOST_MEMBERS = 256  # of a body; no client library sends more
    DEEPEST = 1024  # levels whose kind is kept


cdef struct Bones:
    Py_ssize_t depth
    Py_ssize_t elements
    Py_ssize_t weight


cdef struct Member:
    String name
    Py_ssize_t begins  # with the quotation mark before its name
    Py_ssize_t start  # of its value
    Py_ssize_t end


def members(bytes body not None):
    """Of each member of an object: name, where that begins, and where its value begins and ends.

    None where anything is unusual, be it valid or not: a name with escapes or beyond ASCII, or hundreds of members.
    What the values are is not looked at: of valid JSON they are whole.
    """
    cdef json_t data = <json_t>PyBytes_AS_STRING(body)
    cdef Py_ssize_t size = len(body), at
    cdef Member one
    cdef list found = []
    at = json_space_end(data, 0, size)
    if at >= size or data[at] != c"{":
        return None
    one.end = at
    at = json_space_end(data, at + 1, size)
    if at < size and data[at] == c"}":
        return found if json_space_end(data, at + 1, size) == size else None
    while len(found) < MOST_MEMBERS:
        if not next_member(data, size, &one):
            return None
        found.append((ascii_of(data, &one.name), one.begins, one.start, one.end))
        at = json_space_end(data, one.end, size)
        if at < size and data[at] == c"}":
            return found if json_space_end(data, at + 1, size) == size else None
        if at >= size or data[at] != c",":
            return None
        one.end = at
    return None


def value_start(bytes body not None, bytes wanted not None):
    """Where the value of the first member with this name begins, as `members` would tell it.

    None where there is none, or what comes before it is unusual. The value itself, and what comes behind, is not
    looked at.
    """
    cdef json_t data = <json_t>PyBytes_AS_STRING(body)
    cdef Py_ssize_t size = len(body)
    cdef Member one
    one.end = json_space_end(data, 0, size)
    if one.end >= size or data[one.end] != c"{":
        return None
    while begin_member(data, size, &one):
        if is_named(data, &one.name, PyBytes_AS_STRING(wanted), len(wanted)):
            return one.start
        one.end = json_value_end(data, one.start, size)
        if one.end < 0:
            return None
        one.end = json_space_end(data, one.end, size)
        if one.end >= size or data[one.end] != c",":
            return None
    return None


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


cdef bint begin_member(json_t data, Py_ssize_t size, Member *one) noexcept nogil:
    """Goes on to where the value begins of the member behind the brace or comma at the end of this one; false if there
    is none, or it is not plain."""
    one.begins = json_space_end(data, one.end + 1, size)
    one.start = named(data, one.begins, size, &one.name)
    return one.start >= 0


cdef bint next_member(json_t data, Py_ssize_t size, Member *one) noexcept nogil:
    """As `begin_member`, and on to its end."""
    if not begin_member(data, size, one):
        return False
    one.end = json_value_end(data, one.start, size)
    return one.end >= 0


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
    found.weight += escapes // ESCAPES
    return found
