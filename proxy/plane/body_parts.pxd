"""What finds members of JSON objects, for all that look into bodies."""

from cpython.unicode cimport PyUnicode_DecodeASCII
from libc.string cimport memcmp

cdef extern from "json_text.h" nogil:
    ctypedef const unsigned char *json_t
    Py_ssize_t json_space_end(json_t, Py_ssize_t at, Py_ssize_t size)
    Py_ssize_t json_string_end(json_t, Py_ssize_t at, Py_ssize_t size, int *kinds, Py_ssize_t *escapes)
    Py_ssize_t json_value_end(json_t, Py_ssize_t at, Py_ssize_t size)


cdef enum:
    ESCAPES = 16  # that take as long to read as one value


cdef struct String:
    Py_ssize_t start
    Py_ssize_t end
    int kinds
    Py_ssize_t escapes


cdef inline Py_ssize_t string(json_t data, Py_ssize_t at, Py_ssize_t size, String *found) noexcept nogil:
    """Behind the string at `at`, of which `found` is told; -1 if there is none."""
    if at >= size or data[at] != c'"':
        return -1
    found.start = at + 1
    found.kinds = 0
    found.escapes = 0
    at = json_string_end(data, at + 1, size, &found.kinds, &found.escapes)
    found.end = at - 1
    return at


cdef inline Py_ssize_t named(json_t data, Py_ssize_t at, Py_ssize_t size, String *name) noexcept nogil:
    """Where the value begins, of the member whose name is at `at`; -1 if none does, or its name is not plain."""
    name.end = 0
    at = string(data, at, size, name)
    if at < 0 or not is_ascii(name):
        return -1
    at = json_space_end(data, at, size)
    if at >= size or data[at] != c":":
        return -1
    return json_space_end(data, at + 1, size)


cdef inline bint is_ascii(const String *found) noexcept nogil:
    """Whether it says what is written; also of a string that is not there."""
    return not found.end or not (found.kinds or found.escapes)


cdef inline bint is_named(json_t data, const String *name, const char *wanted, Py_ssize_t size) noexcept nogil:
    return name.end - name.start == size and memcmp(data + name.start, wanted, size) == 0


cdef inline str ascii_of(json_t data, const String *found):
    return PyUnicode_DecodeASCII(<const char *>data + found.start, found.end - found.start, NULL)


cdef inline int follows(json_t data, Py_ssize_t *at, Py_ssize_t size) noexcept nogil:
    """Behind a member: 1 where another one follows, 0 where the object ends, -1 where neither is so. `at` goes on to the
    comma or the brace."""
    at[0] = json_space_end(data, at[0], size)
    if at[0] >= size:
        return -1
    return 1 if data[at[0]] == c"," else (0 if data[at[0]] == c"}" else -1)
