from cpython.buffer cimport Py_buffer

from .receiver cimport Receiver

cdef enum:
    FIRST_BYTES = 32 * 1024  # read at once; the rest of a long body can then be read to where it belongs
    READ_BYTES = 256 * 1024  # once as much has come as was read
    FULL_BYTES = 64 * 1024  # unsent, from which on a protocol is asked to write no more
    ROOM_BYTES = 16 * 1024  # unsent, from which on it may go on
    EVENTS = 256            # looked at before the event loop does other work


cdef class Poller:
    cdef object _loop
    cdef int _epoll
    cdef list _transports  # by file descriptor
    cdef char *_buffer     # what was read last, until it is copied

    cdef int _open(self) except -1


cdef class SocketTransport:
    cdef Receiver receiver    # None: the protocol gets what is received
    cdef Poller _poller
    cdef object _protocol
    cdef object _unsent       # a deque of bytes; None while all has been sent
    cdef Py_ssize_t _unsent_bytes
    cdef int _fd              # -1: closed
    cdef unsigned char _watched
    cdef unsigned char _reads, _is_at_end, _is_closing, _is_full, _ends  # a byte each, as a stream has two transports
    cdef unsigned char _has_more  # probably: the last read took all that it could

    cdef int send_piece(self, const char *data, Py_ssize_t size) except -1
    cdef int _write(self, tuple parts) except -1
    cdef int _keep(self, part, const Py_buffer *view, Py_ssize_t sent) except -1
    cdef int _flush(self) except -1
    cdef int _serve(self, unsigned int news) except -1
    cdef int _read(self) except -1
    cdef int _watch(self) except -1
    cdef int _ask(self, unsigned int wanted) noexcept
    cdef bint _is_usurped(self) except -1
    cdef int _lose(self, exc) except -1
    cdef int _let_go(self) except -2
    cdef int _tell(self, str name) except -1
    cdef int _report(self, exc, bint ends) except -1
