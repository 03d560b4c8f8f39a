from .text_digest cimport DIGEST_BYTES, TextPoint

cdef class Kept:
    cdef Py_buffer view
    cdef object data  # whose buffer it is

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

cdef class FoundMessage:
    cdef readonly bytes digest  # None where nothing was hashed; an item's is longer: the bytes may be a message's, too
    cdef readonly bint is_item
    cdef public object unit  # what it adds to a chain: see chat_messages.pyi; None: not known
    cdef public object decoded
    cdef Kept _kept
    cdef Py_ssize_t _start
    cdef Py_ssize_t _end
