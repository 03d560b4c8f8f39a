cimport cython


cdef int _SAID, _CALLED, _RESULT


@cython.final
cdef class CallPlaces:
    cdef bint _as_they_are, _is_whole
    cdef readonly long long count
    cdef dict _open, _answered
    cdef set _fresh

    cpdef begin_round(self)
    cpdef str call(self, id)
    cpdef str result(self, id)


@cython.final
cdef class _Call:
    cdef readonly str id
    cdef readonly object key


@cython.final
cdef class _LongText:
    cdef readonly bytes text
    cdef readonly object offset


@cython.final
cdef class MessageUnit:
    cdef object _hasher
    cdef bytes _before
    cdef str _answers
    cdef bint _is_part
    cdef list _steps, _said
    cdef readonly long long size
    cdef readonly object text, kind
    cdef readonly bint is_cut
    cdef public bint is_call
    cdef public int letter

    @cython.locals(said=list)
    cpdef key_after(self, previous, CallPlaces places, unit_key, cuts=*)
    @cython.locals(letter=cython.int, answers=bytes, said=bytes, result=bytes, found=list)
    cpdef _packed(self, Py_ssize_t room, int kind, weighs)
    cdef _add_step(self, step)
    cdef _end_step(self)
    cdef _hashed(self, state, previous, list said)
