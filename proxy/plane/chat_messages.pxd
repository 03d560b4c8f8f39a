from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t

from .text_digest cimport DIGEST_BYTES, TextPoint

cdef enum:
    UNIT_HEAD_BYTES = 16

cdef struct UnitHead:  # see `sessions/message_units`
    int letter
    bint is_call
    int kind
    uint32_t size
    uint32_t weighs
    Py_ssize_t before
    Py_ssize_t answers

cdef inline uint32_t number(const unsigned char *at, int size) noexcept nogil:
    cdef uint32_t found = 0
    while size > 0:
        size -= 1
        found = found << 8 | at[size]
    return found

cdef inline int read_head(const unsigned char *unit, Py_ssize_t size, UnitHead *head) except -1:
    """ValueError if that is no packed unit."""
    if size < UNIT_HEAD_BYTES:
        raise ValueError("a unit has a head")
    head.letter, head.is_call, head.kind = unit[0], unit[1], unit[2]
    head.size, head.weighs = number(unit + 4, 4), number(unit + 8, 4)
    head.before, head.answers = number(unit + 12, 2), number(unit + 14, 2)
    if not head.before or size < UNIT_HEAD_BYTES + head.before + head.answers:
        raise ValueError("a unit begins with who says it")
    return 0

cdef inline UnitHead head_of(bytes unit) except *:
    cdef UnitHead head
    read_head(<const unsigned char *>PyBytes_AS_STRING(unit), PyBytes_GET_SIZE(unit), &head)
    return head

cdef class Kept:
    cdef Py_buffer view
    cdef object data  # whose buffer it is

cdef class PlainMessage:
    cdef readonly str role
    cdef readonly str name
    cdef readonly str tool_call_id
    cdef readonly Py_ssize_t size  # bytes of its text
    cdef readonly Py_ssize_t end  # where it ends
    cdef readonly Py_ssize_t weighs  # with all before it that are plain or known
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
    cdef readonly bytes unit  # what it adds to a chain, as `sessions/message_units` packs it; None: it is not known
    cdef public object decoded
    cdef UnitHead _head  # of `unit`
    cdef Kept _kept
    cdef Py_ssize_t _start
    cdef readonly Py_ssize_t end
    cdef readonly Py_ssize_t weighs
