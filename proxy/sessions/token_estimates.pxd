cimport cython

cdef double _OUTPUT_DECAY, _NOISE, _FORGET, _ERROR_LIMIT, _LEAP, _LEAST_TOKENS
cdef long long _MOST_TOKENS
cdef tuple _FIRST_VARIANCES, _HIGHEST, _LOWEST
cdef _Model _UNKNOWN


@cython.final
cdef class _Model:
    cdef readonly list means, variances
    cdef readonly object output_tokens

    @cython.locals(at=Py_ssize_t, total=double)
    cdef double expected(self, tuple added) except? -1.0
    @cython.locals(at=Py_ssize_t, kind=Py_ssize_t, size=double, doubt=double, share=double, gain=double, variance=double)
    cdef learn(self, tuple added, double tokens)


@cython.final
cdef class TokenEstimator:
    cdef int _capacity
    cdef object _models
    cdef public object replicated

    cpdef learn(self, str model, tuple added, new_tokens, completion_tokens)
    @cython.locals(known=_Model)
    cpdef take(self, str model, tuple added, new_tokens, completion_tokens)
    @cython.locals(known=_Model)
    cpdef estimate(self, str model, tuple added)
    @cython.locals(known=_Model)
    cpdef expected_output(self, str model, session_mean, cap)
    cpdef adopt(self, theirs)
    @cython.locals(known=_Model)
    cdef _Model _known(self, str model)


cdef double _bounded(double value, double least, double most) noexcept
cpdef output_mean(mean, double tokens, double decay)
