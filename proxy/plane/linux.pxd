"""What compiled modules call of Linux."""

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
    enum: SHUT_WR

cdef extern from "unistd.h" nogil:
    int close(int fd)
