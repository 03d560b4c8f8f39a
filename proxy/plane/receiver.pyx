# cython: language_level=3
"""What a `SocketTransport` may hand its bytes to, in compiled code."""


cdef class Receiver:
    """Takes what a socket receives in place of its protocol."""

    cdef char *room(self, char *usual, Py_ssize_t *size) noexcept:
        """Where it is read to, and how much of it at most, which is told and may be changed."""
        return usual

    cdef int take(self, char *data, Py_ssize_t size) except -1:
        """It may write into the data."""
        raise NotImplementedError
