cimport cython


cdef int _UNIT_BYTES, _STEP_BYTES, _CALL_BYTES, _CHARACTER_BYTES


@cython.final
cdef class CallPlaces:
    cdef bint _as_they_are
    cdef long long _count
    cdef dict _open, _answered
    cdef set _fresh

    cpdef begin_round(self)
    cpdef str call(self, id)
    cpdef str result(self, id)


@cython.final
cdef class _Call:
    cdef readonly str id
    cdef readonly bytes by_place, by_id


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
    cdef object _steps, _said
    cdef readonly str role
    cdef readonly long long size, memory_bytes
    cdef readonly object text, kind
    cdef readonly bint is_cut
    cdef public bint is_call
    cdef public int letter
    cdef public long long weighs

    @cython.locals(said=list)
    cpdef key_after(self, previous, CallPlaces places, unit_key, cuts=*)
    @cython.locals(found=Py_ssize_t)
    cpdef Py_ssize_t _memory(self) except -1
    cpdef _pack(self)
    cdef _add_step(self, step)
    cdef _end_step(self)
    cdef _hashed(self, state, previous, list said)
