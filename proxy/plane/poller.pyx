# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Plain TCP sockets, read and written by compiled code, with one epoll for all of them.

The event loop watches the epoll's own descriptor. So the loop is woken once for all sockets that have news, and each
of them costs one system call and one call of its protocol.

Towards protocols a `SocketTransport` is a transport of asyncio: it calls `connection_made`, `data_received`,
`eof_received`, `pause_writing`, `resume_writing` and `connection_lost` in the order that asyncio promises.
"""

import asyncio
import os
import socket as sockets
from collections import deque

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, EINTR, EINVAL, errno
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from .linux cimport (
    EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT, MSG_NOSIGNAL,
    SHUT_WR, close, epoll_create1, epoll_ctl, epoll_event, epoll_wait, iovec, msghdr, recv, send, sendmsg, shutdown,
)

cdef enum:
    READ_BYTES = 256 * 1024
    FULL_BYTES = 64 * 1024  # unsent, from which on a protocol is asked to write no more
    ROOM_BYTES = 16 * 1024  # unsent, from which on it may go on
    EVENTS = 256            # looked at before the event loop does other work
    PARTS = 16              # written by one system call


cdef class Poller:
    """All sockets of one event loop. It belongs to the loop that runs when the first socket is adopted."""

    cdef object _loop
    cdef int _epoll
    cdef list _transports  # by file descriptor
    cdef char *_buffer     # what was read last, until it is copied

    def __cinit__(self):
        self._epoll = -1
        self._transports = []
        self._buffer = NULL

    def __dealloc__(self):
        free(self._buffer)
        if self._epoll >= 0:
            close(self._epoll)

    def adopt(self, socket, protocol):
        """A transport for a connected socket, which it owns from here on. `protocol.connection_made` has been called.

        OSError if the socket can't be watched; it is still the caller's then.
        """
        cdef SocketTransport transport
        cdef int fd = socket.fileno()
        if self._epoll < 0:
            self._open()
        socket.setblocking(False)
        if socket.proto == sockets.IPPROTO_TCP or socket.family != sockets.AF_UNIX:
            socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
        transport = SocketTransport.__new__(SocketTransport)
        transport._poller, transport._socket, transport._protocol, transport._fd = self, socket, protocol, fd
        transport._reads = True
        transport._watch()
        while len(self._transports) <= fd:
            self._transports.append(None)
        self._transports[fd] = transport
        protocol.connection_made(transport)
        return transport

    def close(self):
        """Ends all connections that are still open."""
        for transport in self._transports:
            if transport is not None:
                transport.abort()
        if self._epoll >= 0:
            self._loop.remove_reader(self._epoll)
            close(self._epoll)
            self._epoll = -1

    cdef int _open(self) except -1:
        self._loop = asyncio.get_running_loop()
        if self._buffer == NULL:
            self._buffer = <char *>malloc(READ_BYTES)
            if self._buffer == NULL:
                raise MemoryError
        self._epoll = epoll_create1(EPOLL_CLOEXEC)
        if self._epoll < 0:
            raise OSError(errno, os.strerror(errno))
        self._loop.add_reader(self._epoll, self._pump)
        return 0

    def _pump(self):
        """Serves the sockets that have news. What remains wakes the event loop again."""
        cdef epoll_event events[EVENTS]
        cdef SocketTransport transport
        cdef unsigned int news
        cdef int count, at
        if self._epoll < 0:
            return
        count = epoll_wait(self._epoll, events, EVENTS, 0)
        for at in range(count):
            # A socket that an earlier event closed is gone. If its number is another's already, reading that finds
            # nothing: what an event says is only a reason to look.
            found = self._transports[events[at].data.fd]
            if found is None:
                continue
            transport, news = <SocketTransport>found, events[at].events
            if news & (EPOLLOUT | EPOLLHUP | EPOLLERR) and transport._unsent_bytes:
                transport._flush()
            if news & (EPOLLIN | EPOLLHUP | EPOLLERR) and transport._reads and transport._fd >= 0:
                transport._read()


cdef class SocketTransport:
    """One connected socket: a transport as asyncio's protocols know it."""

    cdef Poller _poller
    cdef object _socket
    cdef object _protocol
    cdef object _unsent       # a deque of bytes; None while all has been sent
    cdef Py_ssize_t _skipped  # bytes of the first of them that have been sent
    cdef Py_ssize_t _unsent_bytes
    cdef unsigned int _watched
    cdef int _fd              # -1: closed
    cdef bint _reads, _is_at_end, _is_closing, _is_full, _ends, _is_ended
    cdef object __weakref__

    # -- what protocols call

    def write(self, data):
        """Sends at once what the kernel takes, and keeps the rest."""
        if self._ends:
            raise RuntimeError("nothing can be written after write_eof")
        if not self._is_closing:
            self._send(data)

    def writelines(self, parts):
        """As one `write` of all parts, without joining them."""
        cdef Py_buffer views[PARTS]
        cdef iovec vector[PARTS]
        cdef msghdr message
        cdef Py_ssize_t sent = 0, size
        cdef int count = 0, at, error = 0
        parts = tuple(parts)
        if self._ends:
            raise RuntimeError("nothing can be written after write_eof")
        if self._is_closing:
            return
        if self._unsent_bytes or len(parts) > PARTS:
            self._send(b"".join(parts))
            return
        try:
            for part in parts:
                PyObject_GetBuffer(part, &views[count], PyBUF_SIMPLE)
                vector[count].iov_base, vector[count].iov_len = views[count].buf, views[count].len
                count += 1
            memset(&message, 0, sizeof(message))
            message.msg_iov, message.msg_iovlen = vector, count
            sent = sendmsg(self._fd, &message, MSG_NOSIGNAL)
            if sent < 0:
                error, sent = errno, 0
        finally:
            for at in range(count):
                PyBuffer_Release(&views[at])
        if error and error != EAGAIN and error != EINTR:
            self._fail(error)
            return
        for part in parts:
            size = len(part)
            if sent < size:
                self._keep(part, sent)
            sent = max(0, sent - size)

    def write_eof(self):
        """Ends the writing side, once all has been sent."""
        if not self._ends and not self._is_closing:
            self._ends = True
            if not self._unsent_bytes:
                self._shut()

    def can_write_eof(self):
        return True

    def get_write_buffer_size(self):
        return self._unsent_bytes

    def pause_reading(self):
        if not self._is_closing:
            self._reads = False
            self._watch()

    def resume_reading(self):
        if not self._is_closing and not self._is_at_end:
            self._reads = True
            self._watch()

    def is_reading(self):
        return self._reads

    def is_closing(self):
        return self._is_closing

    def close(self):
        """Sends what is unsent first, and reads no more."""
        if not self._is_closing:
            self._is_closing, self._reads = True, False
            if self._unsent_bytes:
                self._watch()
            else:
                self._lose(None)

    def abort(self):
        self._lose(None)

    def get_protocol(self):
        return self._protocol

    def set_protocol(self, protocol):
        self._protocol = protocol

    def get_extra_info(self, name, default=None):
        if name == "socket":
            return self._socket
        try:
            if name == "peername":
                return self._socket.getpeername()
            if name == "sockname":
                return self._socket.getsockname()
        except OSError:
            pass
        return default

    # -- sending

    cdef int _send(self, data) except -1:
        cdef Py_buffer view
        cdef Py_ssize_t sent = 0, size
        cdef int error = 0
        if not self._unsent_bytes:
            if PyBytes_CheckExact(data):
                size = PyBytes_GET_SIZE(data)
                sent = send(self._fd, PyBytes_AS_STRING(data), size, MSG_NOSIGNAL)
                error = errno
            else:
                PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
                size = view.len
                sent = send(self._fd, view.buf, size, MSG_NOSIGNAL)
                error = errno
                PyBuffer_Release(&view)
            if sent == size:
                return 0
            if sent < 0:
                if error != EAGAIN and error != EINTR:
                    return self._fail(error)
                sent = 0
        return self._keep(data, sent)

    cdef int _keep(self, data, Py_ssize_t sent) except -1:
        """Keeps what is behind the first `sent` bytes: bytes as they are, of any other buffer a copy."""
        if not PyBytes_CheckExact(data):
            data, sent = bytes(memoryview(data)[sent:]), 0
        if PyBytes_GET_SIZE(data) == sent:
            return 0
        if self._unsent is None:
            self._unsent = deque()
        if not self._unsent:
            self._skipped = sent
        self._unsent.append(data)
        self._unsent_bytes += PyBytes_GET_SIZE(data) - sent
        self._watch()
        if self._unsent_bytes > FULL_BYTES and not self._is_full:
            self._is_full = True
            self._tell("pause_writing")
        return 0

    cdef int _flush(self) except -1:
        cdef Py_ssize_t sent, size
        while self._unsent:
            data = self._unsent[0]
            size = PyBytes_GET_SIZE(data) - self._skipped
            sent = send(self._fd, PyBytes_AS_STRING(data) + self._skipped, size, MSG_NOSIGNAL)
            if sent < 0:
                return 0 if errno == EAGAIN or errno == EINTR else self._fail(errno)
            self._unsent_bytes -= sent
            if sent < size:
                self._skipped += sent
                break
            self._unsent.popleft()
            self._skipped = 0
        if not self._unsent_bytes:
            self._unsent = None
            if self._is_closing:
                return self._lose(None)
            if self._ends:
                self._shut()
            self._watch()
        if self._is_full and self._unsent_bytes <= ROOM_BYTES and not self._is_closing:
            self._is_full = False
            self._tell("resume_writing")
        return 0

    cdef int _shut(self) except -1:
        if not self._is_ended:
            self._is_ended = True
            shutdown(self._fd, SHUT_WR)  # an error shows when the socket is read
        return 0

    # -- reading

    cdef int _read(self) except -1:
        cdef Py_ssize_t size = recv(self._fd, self._poller._buffer, READ_BYTES, 0)
        if size > 0:
            data = PyBytes_FromStringAndSize(self._poller._buffer, size)
            try:
                self._protocol.data_received(data)
            except Exception as exc:
                self._report(exc)
                self._lose(exc)
        elif size == 0:
            self._is_at_end, self._reads = True, False
            self._watch()
            if not self._tell("eof_received"):
                self.close()
        elif errno != EAGAIN and errno != EINTR:
            self._fail(errno)
        return 0

    cdef int _watch(self) except -1:
        """Has epoll look for what is wanted. A socket of which nothing is wanted is not in it, as it always tells of
        errors, and would wake the event loop again and again."""
        cdef epoll_event event
        cdef unsigned int wanted = 0
        cdef int what
        if self._fd < 0:
            return 0
        if self._reads:
            wanted |= EPOLLIN
        if self._unsent_bytes:
            wanted |= EPOLLOUT
        if wanted == self._watched:
            return 0
        what = EPOLL_CTL_DEL if not wanted else EPOLL_CTL_MOD if self._watched else EPOLL_CTL_ADD
        event.events, event.data.fd = wanted, self._fd
        if epoll_ctl(self._poller._epoll, what, self._fd, &event) < 0:
            raise OSError(errno, os.strerror(errno))
        self._watched = wanted
        return 0

    # -- the end

    cdef int _fail(self, int error) except -1:
        return self._lose(OSError(error, os.strerror(error)))

    cdef int _lose(self, exc) except -1:
        """Closes the socket now, and tells the protocol later, as it may just be writing."""
        cdef int fd = self._fd
        if fd < 0:
            return 0
        self._is_closing, self._reads, self._fd = True, False, -1
        self._unsent, self._unsent_bytes, self._watched = None, 0, 0
        self._poller._transports[fd] = None
        self._socket.close()  # epoll forgets it with that
        self._poller._loop.call_soon(self._tell_lost, exc)
        return 0

    def _tell_lost(self, exc):
        protocol, self._protocol = self._protocol, None
        protocol.connection_lost(exc)

    cdef object _tell(self, str name):
        """What the protocol's method returns; None where it fails, which is reported."""
        try:
            return getattr(self._protocol, name)()
        except Exception as exc:
            self._report(exc)
            return None

    cdef int _report(self, exc) except -1:
        told = {"message": "a protocol failed", "exception": exc, "transport": self, "protocol": self._protocol}
        self._poller._loop.call_exception_handler(told)
        return 0
