cimport cython

from .entries cimport Entries

cdef long long _MOST


@cython.final
cdef class CacheBook:
    cdef readonly str incarnation
    cdef readonly int number, used, ahead
    cdef readonly Entries entries
    cdef readonly long long tokens, evicted, reported, capacity
    cdef readonly dict _awaited
    cdef dict _marks
    cdef long long _count, _believed, _counts, _counted
    cdef object _missed

    cpdef int slot(self, object key) except -1
    cpdef long long held(self, object key)
    cpdef long long used_since(self, int slot)
    cpdef bint clear(self, int most) except -1
    cpdef adopt(self, long long believed, long long counts, object missed)
    cpdef report(self, long long capacity)
    cpdef bint is_shared(self, object history, object mark) except -1
    cpdef touch(self, object history, long long tokens, object marks=*)
    @cython.locals(awaited=int)
    cpdef expect(self, object history, int slot, long long tokens, object marks=*)
    cpdef long long pass_on(self, object key, long long tokens)
    cpdef take_back(self, object key, long long passed)
    cpdef begin(self, object history, long long tokens, object marks=*)
    cpdef withdraw(self, object key)
    cpdef forget(self, object key)
    cpdef found(self, object history, long long since, long long held, long long cached)
    cdef _cut(self, object history, long long tokens)
    cdef long long _excused(self, long long held)
    cdef long long _block(self)
    cdef _raise(self, long long tokens)
    cdef _believe(self, long long capacity)
    @cython.locals(awaited=int)
    cdef bint _has_come(self, object key) except -1
    @cython.locals(tokens=cython.longlong)
    cdef _enter(
        self, object history, int slot, long long held, long long room, object marks, dict passed
    )
    cdef _put(self, object key, int slot, long long held, long long own)
    cdef _empty(self, int slot)
    cdef int _add(self, object key, int end) except -1
    cdef _remove(self, int slot)
    cdef _shrink(self)
    cdef _evict(self, long long over, long long surplus)
