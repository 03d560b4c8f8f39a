# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The body of a request whose size is known, read from its socket to where it belongs: no part of it is copied."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcpy

from .http1 cimport RequestParser
from .poller cimport SocketTransport
from .receiver cimport Receiver


cdef class BodyBuffer(Receiver):
    """What came with the head is added; the rest is read from the socket to behind it, and the parser told of it."""

    cdef bytes _body          # of the size that it will have
    cdef Py_ssize_t _filled   # bytes of it that have come
    cdef SocketTransport _transport  # None: it is not read now
    cdef RequestParser _parser

    def __init__(self, Py_ssize_t size):
        """MemoryError if there is none for so many bytes."""
        self._body = PyBytes_FromStringAndSize(NULL, size)

    @property
    def filled(self):
        return self._filled

    def add(self, bytes data not None):
        """ValueError where that is more than the body."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        if size > PyBytes_GET_SIZE(self._body) - self._filled:
            raise ValueError("more than the body's size")
        memcpy(PyBytes_AS_STRING(self._body) + self._filled, PyBytes_AS_STRING(data), size)
        self._filled += size

    def read(self, SocketTransport transport not None, RequestParser parser not None):
        """Reads the rest. The parser has been fed all that was added."""
        if self._filled < PyBytes_GET_SIZE(self._body):
            self._transport, self._parser = transport, parser
            transport.receiver = self

    def taken(self):
        """What has come. No more is read, and none kept."""
        self._leave()
        body, self._body = self._body, b""
        filled, self._filled = self._filled, 0
        return body if filled == len(body) else body[:filled]

    cdef char *room(self, char *usual, Py_ssize_t *size) noexcept:
        size[0] = PyBytes_GET_SIZE(self._body) - self._filled
        return PyBytes_AS_STRING(self._body) + self._filled

    cdef int take(self, char *data, Py_ssize_t size) except -1:
        cdef RequestParser parser = self._parser
        self._filled += size
        if self._filled == PyBytes_GET_SIZE(self._body):
            self._leave()
        return parser.pass_by(data, size)

    cdef int _leave(self) except -1:
        if self._transport is not None and self._transport.receiver is self:
            self._transport.receiver = None
        self._transport = self._parser = None
        return 0
