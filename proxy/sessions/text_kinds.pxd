cimport cython

cdef int _SAMPLE, _START, _UNITS, _UNREAD, _TOKEN_IDS, _HEAD
cdef list _NOTHING
cdef bytes _FOLLOWING, _HANGUL, _NO_MARKS, _BY_TWENTIETHS

cpdef bytes sample(text)
@cython.locals(size=Py_ssize_t, following=Py_ssize_t)
cpdef int text_kind(bytes sampled) except -1
cpdef int kind_of(text) except -1
@cython.locals(
    found=list, known=cython.longlong, end=cython.longlong, size=cython.longlong, texts=tuple, kind=int, first=Py_ssize_t,
    count=Py_ssize_t, unread=Py_ssize_t, head=Py_ssize_t, at=Py_ssize_t
)
cpdef tuple added(chain, covered)
@cython.locals(flat=list, kind=Py_ssize_t)
cdef tuple _amounts(list found)
@cython.locals(third=Py_ssize_t)
cdef int _of_three_bytes(bytes sampled) except -1
