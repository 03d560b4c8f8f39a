# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Plain TCP sockets, read and written by compiled code, with one epoll for all of them.

The event loop watches the epoll's own descriptor. So the loop is woken once for all sockets that have news, and each
of them costs one system call and one call of its protocol.

Towards protocols a `SocketTransport` is a transport of asyncio: it calls them in the order that asyncio promises.
"""

import asyncio
import contextvars
import socket as sockets
from collections import deque
from contextlib import suppress

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport EAGAIN, EBADF, EEXIST, EINTR, ENOENT, errno
from libc.stdlib cimport free, malloc

from .linux cimport (
    EPOLL_CLOEXEC, EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT, MSG_NOSIGNAL, PARTS, SHUT_WR, close, epoll_create1,
    epoll_event, epoll_wait, is_undelivered, is_unread, os_error, recv, send, send_parts, shutdown, watch,
)


cdef class Poller:
    """All sockets of one event loop. It belongs to the loop that runs when the first socket is adopted."""

    def __cinit__(self):
        self._epoll, self._transports = -1, []
        self._buffer = <char *>malloc(READ_BYTES)
        if self._buffer == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self._buffer)
        if self._epoll >= 0:
            close(self._epoll)

    def adopt(self, socket, protocol):
        """A transport for a connected socket, which it owns from here on. `protocol.connection_made` has been called.

        Whatever is raised, the socket is still the caller's: OSError if it can't be watched, what `connection_made`
        raises, RuntimeError in another event loop than that of the sockets before.
        """
        cdef SocketTransport transport
        cdef int error, fd = socket.fileno()
        if self._epoll < 0:
            self._open()
        elif self._loop is not asyncio.get_running_loop():
            raise RuntimeError("this poller serves the sockets of another event loop; close it there first")
        socket.setblocking(False)
        if socket.proto == sockets.IPPROTO_TCP or socket.family != sockets.AF_UNIX:
            socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
        self._transports.extend([None] * (fd + 1 - len(self._transports)))
        if self._transports[fd] is not None and not (<SocketTransport>self._transports[fd])._is_usurped():
            raise os_error(EEXIST)
        transport = SocketTransport.__new__(SocketTransport)
        transport._poller, transport._protocol = self, protocol
        transport._fd, transport._reads = fd, True
        error = transport._ask(EPOLLIN)
        if error:
            transport._fd = -1
            raise os_error(error)
        self._transports[fd] = transport
        try:
            protocol.connection_made(transport)
        except BaseException:
            if transport._fd < 0:  # it was ended meanwhile, and its descriptor closed
                socket.detach()
            transport._let_go()
            raise
        socket.detach()
        return transport

    def close(self):
        """Ends all connections that are still open. The next socket may be of another event loop."""
        for transport in self._transports:
            if transport is not None:
                transport.abort()
        if self._epoll >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._epoll)
            close(self._epoll)
            self._epoll = -1

    cdef int _open(self) except -1:
        self._loop = asyncio.get_running_loop()
        self._epoll = epoll_create1(EPOLL_CLOEXEC)
        if self._epoll < 0:
            raise os_error(errno)
        try:
            # Not in the context of who happens to be the first: all protocols would be called in that.
            contextvars.Context().run(self._loop.add_reader, self._epoll, self._pump)
        except BaseException:
            self.close()
            raise
        return 0

    def _pump(self):
        """Serves the sockets that have news. What remains, or is left by an exception, wakes the event loop again."""
        cdef epoll_event events[EVENTS]
        cdef int at
        for at in range(epoll_wait(self._epoll, events, EVENTS, 0)):
            # A socket that an earlier event closed is gone. If its number is another's already, reading that finds
            # nothing: what an event says is only a reason to look.
            found = self._transports[events[at].data.fd]
            try:
                if found is not None:
                    (<SocketTransport>found)._serve(events[at].events)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as exc:  # of its protocol; or no memory was left, and bytes are lost, or sent again
                (<SocketTransport>found)._report(exc, True)


class LentSocket(sockets.socket):
    """A transport's socket, for who looks at it now. It stays the transport's."""

    def __del__(self):
        self.detach()


cdef class SocketTransport:
    """One connected socket: a transport as asyncio's protocols know it."""

    def __cinit__(self):
        self._fd = -1

    def __dealloc__(self):
        if self._fd >= 0:  # of a poller that was not closed
            close(self._fd)

    # -- what protocols call

    def write(self, data):
        """Sends at once what the kernel takes, and keeps the rest."""
        self._write((data,))

    def writelines(self, parts):
        """As one `write` of all parts; few are not joined for that."""
        parts = tuple(parts)
        self._write(parts if len(parts) <= PARTS else (b"".join(parts),))

    def write_eof(self):
        """Ends the writing side, once all has been sent."""
        if not self._ends and not self._is_closing:
            self._ends = True
            if not self._unsent_bytes:
                shutdown(self._fd, SHUT_WR)  # an error shows when the socket is read

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
        return bool(self._reads)

    def is_closing(self):
        return bool(self._is_closing)

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
            return self._lent()
        if name in ("peername", "sockname"):
            with suppress(OSError):
                return getattr(self._lent(), f"get{name}")()
        return default

    def has_undelivered(self):
        return self._unsent_bytes > 0 or is_undelivered(self._fd)

    def has_unread(self):
        """Whether something has come that was not read: bytes, or the end."""
        return is_unread(self._fd)

    def _lent(self):
        """Its socket as an object, made when it is asked for: to keep one would take 88 bytes of each connection."""
        if self._fd >= 0:
            return LentSocket(fileno=self._fd)
        with sockets.socket() as closed:
            return closed

    # -- sending

    cdef int send_piece(self, const char *data, Py_ssize_t size) except -1:
        """As `write`, of bytes that the caller needs again."""
        cdef Py_ssize_t sent = 0
        if not self._unsent_bytes and not self._ends:
            sent = max(0, send(self._fd, data, size, MSG_NOSIGNAL))  # an error shows again when the rest is written
        return 0 if sent == size else self._write((data[sent:size],))

    cdef int _write(self, tuple parts) except -1:
        """parts: at most `PARTS`."""
        cdef Py_buffer views[PARTS]
        cdef Py_ssize_t sent = 0
        cdef int count = 0, at
        if self._ends:
            raise RuntimeError("nothing can be written after write_eof")
        if self._is_closing:
            return 0
        try:
            for part in parts:
                PyObject_GetBuffer(part, &views[count], PyBUF_SIMPLE)
                count += 1
            if not self._unsent_bytes:
                sent = send_parts(self._fd, views, count)
            try:
                for at in range(count if sent >= 0 else 0):
                    self._keep(parts[at], &views[at], sent)
                    sent = max(0, sent - views[at].len)
            except MemoryError as exc:  # nothing may follow what was sent
                return self._report(exc, True)
        finally:
            for at in range(count):
                PyBuffer_Release(&views[at])
        if sent < 0:
            self._lose(os_error(-sent))
        # Protocols are told last: they may write more, or end the connection.
        if self._unsent_bytes:
            self._watch()
            if self._unsent_bytes > FULL_BYTES and not self._is_full:
                self._is_full = True
                self._tell("pause_writing")
        return 0

    cdef int _keep(self, part, const Py_buffer *view, Py_ssize_t sent) except -1:
        """Keeps what is behind the first `sent` bytes: what can't be changed as it is, of any other buffer a copy."""
        if sent >= view.len:
            return 0
        self._unsent = self._unsent or deque()
        if not view.readonly:
            part = PyBytes_FromStringAndSize(<char *>view.buf + sent, view.len - sent)
        elif sent:
            part = memoryview(part).cast("B")[sent:]
        self._unsent.append(part)
        self._unsent_bytes += view.len - sent
        return 0

    cdef int _flush(self) except -1:
        cdef Py_ssize_t sent, size, error
        cdef Py_buffer view
        while self._unsent_bytes:
            PyObject_GetBuffer(self._unsent[0], &view, PyBUF_SIMPLE)
            size, sent = view.len, send(self._fd, view.buf, view.len, MSG_NOSIGNAL)
            error = errno
            PyBuffer_Release(&view)
            if sent < 0:
                if error != EAGAIN and error != EINTR:
                    return self._lose(os_error(error))
                break
            self._unsent_bytes -= sent
            if sent < size:
                self._unsent[0] = memoryview(self._unsent[0]).cast("B")[sent:]
                break
            self._unsent.popleft()
        if self._is_full and self._unsent_bytes <= ROOM_BYTES:
            self._is_full = False
            self._tell("resume_writing")  # which may write more, or end the connection
        if not self._unsent_bytes:
            self._unsent = None
            if self._is_closing:
                return self._lose(None)
            if self._ends:
                shutdown(self._fd, SHUT_WR)
            self._watch()
        return 0

    # -- what epoll says

    cdef int _serve(self, unsigned int news) except -1:
        if self._reads and news & (EPOLLIN | EPOLLHUP | EPOLLERR):
            self._read()
            if self._has_more and self._reads and self.receiver is not None:  # which may have come with what was read
                self._read()
            if news & (EPOLLHUP | EPOLLERR):
                # Writing would fail, and with it the connection, before all that the peer said at last is read.
                return 0
        if self._watched & EPOLLOUT and news & (EPOLLOUT | EPOLLHUP | EPOLLERR):
            self._flush()
        return 0

    cdef int _read(self) except -1:
        cdef Receiver receiver = self.receiver  # held here: it may leave this transport while it is at work
        cdef char *to = self._poller._buffer
        cdef Py_ssize_t size, most = READ_BYTES if self._has_more else FIRST_BYTES
        if receiver is not None:
            to = receiver.room(to, &most)
        size = recv(self._fd, to, most, 0)
        if size < 0:
            return 0 if errno == EAGAIN or errno == EINTR else self._lose(os_error(errno))
        self._has_more = size == most
        if not size:
            self._is_at_end, self._reads = True, False
            self._watch()
            if not self._protocol.eof_received():
                self.close()
        elif receiver is not None:
            receiver.take(to, size)
        else:
            self._protocol.data_received(PyBytes_FromStringAndSize(to, size))
        return 0

    cdef int _watch(self) except -1:
        """Has epoll look for what is wanted. A socket that it can't watch is lost: nothing would be heard of it."""
        cdef unsigned int wanted = (EPOLLIN if self._reads else 0) | (EPOLLOUT if self._unsent_bytes else 0)
        cdef int error = self._ask(wanted) if wanted != self._watched and self._fd >= 0 else 0
        return self._lose(os_error(error)) if error else 0

    cdef int _ask(self, unsigned int wanted) noexcept:
        """The error's number, or 0. A socket of which nothing is wanted is not in the epoll, as that always tells of
        errors, and would wake the event loop again and again."""
        cdef int error = watch(self._poller._epoll, self._fd, self._watched, wanted)
        if not error:
            self._watched = wanted
        return error

    # -- the end

    cdef bint _is_usurped(self) except -1:
        """Whether a stranger closed its descriptor, and the number is a new socket's. Then it is lost, and told of."""
        if not self._watched or self._ask(self._watched) != ENOENT:  # of one that is not watched nobody can tell
            return False
        self._let_go()
        exc = OSError(EBADF, "another has closed this connection's descriptor")
        self._poller._loop.call_soon(self._tell_lost, exc)
        return not self._report(exc, False)

    cdef int _lose(self, exc) except -1:
        """Closes the socket at once, and tells the protocol later, as it may just be writing."""
        if self._fd >= 0:
            close(self._let_go())
            if not self._poller._loop.is_closed():  # else nobody is left to be told
                self._poller._loop.call_soon(self._tell_lost, exc)
        return 0

    cdef int _let_go(self) except -2:
        """Its descriptor, out of the epoll: to close it alone would not do while a child process has a copy."""
        cdef int fd = self._fd
        if fd >= 0:
            if self._watched:
                self._ask(0)
            self._poller._transports[fd] = None
            self._is_closing, self._reads, self._fd = True, False, -1
            self._unsent, self._unsent_bytes, self._watched, self.receiver = None, 0, 0, None
        return fd

    def _tell_lost(self, exc):
        protocol, self._protocol = self._protocol, None
        protocol.connection_lost(exc)

    cdef int _tell(self, str name) except -1:
        try:
            getattr(self._protocol, name)()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self._report(exc, False)
        return 0

    cdef int _report(self, exc, bint ends) except -1:
        """ends: the connection, at once."""
        if ends:
            self._lose(exc)
        told = {"message": "a protocol failed", "exception": exc, "transport": self, "protocol": self._protocol}
        self._poller._loop.call_exception_handler(told)
        return 0
