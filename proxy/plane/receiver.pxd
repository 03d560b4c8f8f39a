cdef class Receiver:
    cdef char *room(self, char *usual, Py_ssize_t *size) noexcept
    cdef int take(self, char *data, Py_ssize_t size) except -1
