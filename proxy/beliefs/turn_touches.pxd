cimport cython

from .beliefs cimport Beliefs


@cython.final
cdef class TurnTouches:
    cdef Beliefs _beliefs
    cdef object _entry, _held, _decode, _prefill, _prompt_tokens, _source
    cdef dict _legs
    cdef object _since
    cdef object _reach_tokens
    cdef bint _is_on_decode

    cpdef sent(self)
    cpdef prefilled(self, object cached)
    cpdef answering(self)
    cpdef settled(self)
    cpdef answered(self, object cached)
    cpdef close(self)
    cdef _expect(self, object worker)
    cdef _lend(self, object source)
    cdef _found(self, object worker, object cached)
    cdef _touch(self, object worker)
    cdef _compare(self, object worker, object held, object cached, object evidence)
