cimport cython


@cython.final
cdef class Entries:
    cdef dict _first
    cdef tuple _arrays
    cdef unsigned long long[::1] _keys
    cdef int[::1] _held, _own, _older, _newer, _numbers, _also
    cdef int _free

    cpdef int slot(self, object key, int number) except -1
    cpdef int first(self, object key) except -1
    cpdef int also(self, int slot) noexcept
    cpdef int number(self, int slot) noexcept
    cpdef unsigned long long key(self, int slot) noexcept
    cpdef long long held(self, int slot) noexcept
    cpdef long long own(self, int slot) noexcept
    cpdef set(self, int slot, long long held, long long own)
    cpdef int open(self, int number) except -1
    cpdef void close(self, int end) noexcept
    cpdef int add(self, object key, int end) except -1
    cpdef void renew(self, int slot, int end) noexcept
    cpdef remove(self, int slot)
    cpdef int oldest(self, int end) noexcept
    cpdef int newer(self, int slot) noexcept
    cpdef int newest(self, int end) noexcept
    cpdef int older(self, int slot) noexcept
    cdef void _link(self, int slot, int end) noexcept
    cdef void _unlink(self, int slot) noexcept
    cdef int _take(self, object key) except -1
    cdef _grow(self)
    cdef _see(self)
