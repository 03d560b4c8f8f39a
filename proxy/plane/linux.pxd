"""What compiled modules call of Linux."""

from cpython.buffer cimport Py_buffer
from libc.errno cimport EAGAIN, EINTR, errno
from libc.string cimport memset, strerror

cdef extern from "sys/epoll.h" nogil:
    ctypedef union epoll_data_t:
        int fd
    struct epoll_event:
        unsigned int events
        epoll_data_t data
    int epoll_create1(int flags)
    int epoll_ctl(int epoll, int what, int fd, epoll_event *event)
    int epoll_wait(int epoll, epoll_event *events, int most, int timeout_ms)
    enum: EPOLL_CLOEXEC
    enum: EPOLL_CTL_ADD
    enum: EPOLL_CTL_DEL
    enum: EPOLL_CTL_MOD
    enum: EPOLLERR
    enum: EPOLLHUP
    enum: EPOLLIN
    enum: EPOLLOUT

cdef extern from "sys/uio.h" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len

cdef extern from "sys/socket.h" nogil:
    struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
    Py_ssize_t recv(int fd, void *data, size_t size, int flags)
    Py_ssize_t send(int fd, const void *data, size_t size, int flags)
    Py_ssize_t sendmsg(int fd, const msghdr *message, int flags)
    int shutdown(int fd, int how)
    enum: MSG_NOSIGNAL
    enum: MSG_PEEK
    enum: SHUT_WR

cdef extern from "sys/ioctl.h" nogil:
    int ioctl(int fd, unsigned long what, ...)
    enum: TIOCOUTQ

cdef extern from "unistd.h" nogil:
    int close(int fd)

cdef enum:
    PARTS = 16  # written by one system call


cdef inline Py_ssize_t send_parts(int fd, const Py_buffer *views, int count) noexcept:
    """How many bytes the kernel takes at once of at most `PARTS`; the negative number of an error."""
    cdef iovec vector[PARTS]
    cdef msghdr message
    cdef Py_ssize_t sent, size = 0
    cdef int at
    for at in range(count):
        vector[at].iov_base, vector[at].iov_len = views[at].buf, views[at].len
        size += views[at].len
    if not size:
        return 0
    if count == 1:
        sent = send(fd, views[0].buf, size, MSG_NOSIGNAL)
    else:
        memset(&message, 0, sizeof(message))
        message.msg_iov, message.msg_iovlen = vector, count
        sent = sendmsg(fd, &message, MSG_NOSIGNAL)
    if sent < 0 and errno != EAGAIN and errno != EINTR:
        return -errno
    return max(sent, 0)


cdef inline bint is_unread(int fd) noexcept:
    """Whether bytes lie in the socket, or its end, or an error."""
    cdef char first
    return fd >= 0 and (recv(fd, &first, 1, MSG_PEEK) >= 0 or (errno != EAGAIN and errno != EINTR))


cdef inline bint is_undelivered(int fd) noexcept:
    """Whether the peer's machine has not acknowledged all that was sent."""
    cdef int left = 0
    return fd >= 0 and ioctl(fd, TIOCOUTQ, &left) == 0 and left > 0


cdef inline int watch(int epoll, int fd, unsigned int before, unsigned int wanted) noexcept:
    """Has an epoll look for the `wanted` events of a descriptor, where it looked for those `before`; 0: for none.

    The number of an error, or 0.
    """
    cdef epoll_event event
    cdef int what = EPOLL_CTL_DEL if not wanted else EPOLL_CTL_MOD if before else EPOLL_CTL_ADD
    event.events, event.data.fd = wanted, fd
    return errno if epoll_ctl(epoll, what, fd, &event) < 0 else 0


cdef inline object os_error(int number):
    return OSError(number, strerror(number).decode())
