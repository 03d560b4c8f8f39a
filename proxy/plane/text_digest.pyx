# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Keyed digests of texts: POLYVAL, by the CPU's instruction for carry-less products."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE

IS_FAST = bool(polyval_is_there())
"""Whether this CPU has the instruction. Without it no `TextPoint` must be made."""


cdef class TextPoint:
    """A secret point at which texts are evaluated: what they come to says nothing to those who do not know it.

    It must not be shown to anyone all the same, as it is no random function of the text: see docs/prefix-keys.md.
    """

    def __init__(self, bytes secret not None):
        if PyBytes_GET_SIZE(secret) != DIGEST_BYTES or not IS_FAST:
            raise ValueError("a point has 16 bytes, and the CPU the instruction for carry-less products")
        polyval_point(&self.point, <const unsigned char *>PyBytes_AS_STRING(secret))

    def open(self):
        """A text of which nothing has come yet."""
        cdef TextDigest text = TextDigest.__new__(TextDigest)
        text._point = self
        polyval_start(&text._state)
        return text

    def digest_of(self, data):
        """16 bytes, of a whole text, as any buffer of bytes."""
        cdef Py_buffer view
        cdef unsigned char told[DIGEST_BYTES]
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            self.digest(view.buf, view.len, told)
        finally:
            PyBuffer_Release(&view)
        return PyBytes_FromStringAndSize(<const char *>told, DIGEST_BYTES)

    def digests_of(self, data, Py_ssize_t start, list ends not None):
        """Of the beginnings of what is in a buffer from `start` on: a list, as far as its bytes reach.

        ends: of the beginnings, in bytes from `start`, rising.
        """
        cdef Py_buffer view
        cdef polyval_t state
        cdef unsigned char told[DIGEST_BYTES]
        cdef Py_ssize_t at = 0, end
        cdef list found = []
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            polyval_start(&state)
            for end in ends:
                if start < 0 or end < at or end > view.len - start:
                    break
                polyval_add(&self.point, &state, <const char *>view.buf + start + at, end - at)
                at = end
                polyval_end(&self.point, &state, told)
                found.append(PyBytes_FromStringAndSize(<const char *>told, DIGEST_BYTES))
        finally:
            PyBuffer_Release(&view)
        return found

    cdef void digest(self, const void *text, size_t size, unsigned char *to) noexcept nogil:
        cdef polyval_t state
        polyval_start(&state)
        polyval_add(&self.point, &state, text, size)
        polyval_end(&self.point, &state, to)


cdef class TextDigest:
    """A text that comes in pieces, made by `TextPoint.open`."""

    cdef TextPoint _point
    cdef polyval_t _state

    def __init__(self):
        raise TypeError("a TextPoint opens it")

    def update(self, data):
        """data: any buffer of bytes."""
        cdef Py_buffer view
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            polyval_add(&self._point.point, &self._state, view.buf, view.len)
        finally:
            PyBuffer_Release(&view)

    def copy(self):
        cdef TextDigest twin = TextDigest.__new__(TextDigest)
        twin._point, twin._state = self._point, self._state
        return twin

    def digest(self):
        """16 bytes, of what has come so far."""
        cdef unsigned char told[DIGEST_BYTES]
        polyval_end(&self._point.point, &self._state, told)
        return PyBytes_FromStringAndSize(<const char *>told, DIGEST_BYTES)
