from .text_digest cimport DIGEST_BYTES, TextPoint

cdef class Kept:
    cdef Py_buffer view

cdef class PlainMessage:
    cdef readonly str role
    cdef readonly str name
    cdef readonly str tool_call_id
    cdef readonly Py_ssize_t size  # bytes of its text
    cdef Kept _kept  # what holds it
    cdef const unsigned char *_written
    cdef Py_ssize_t _written_size
    cdef bint _has_escapes
    cdef bytes _utf8  # once it has been asked for
    cdef TextPoint _point  # of `_digest`, which was made as the text was found; None: there is none
    cdef unsigned char _digest[DIGEST_BYTES]
    cdef int digest_by(self, TextPoint point, unsigned char *to) except -1
