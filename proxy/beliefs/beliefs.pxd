cimport cython

from .cache_book cimport CacheBook
from .entries cimport Entries

cdef long long _MASK


@cython.final
cdef class Beliefs:
    cdef object _view, _numbers
    cdef Py_ssize_t _marks_kept
    cdef readonly dict _books, _marks, _passed
    cdef readonly Entries _entries
    cdef dict _numbered, _legs
    cdef readonly list _closed
    cdef public object leg_numbers, replicated

    @cython.locals(held=cython.longlong, tokens=cython.longlong, number=int, book=CacheBook, shared=cython.longlong)
    cpdef dict held(self, object views, object entry, long long most, object observed=*, object by_tokens=*)
    cpdef why_lost(self, object was)
    cpdef residency(self, object worker, object tokens)
    cpdef passed(self, object history, object marks)
    @cython.locals(book=CacheBook)
    cpdef ended(self, object history, object holders, object marks)
    @cython.locals(book=CacheBook, legs=dict, slot=int, since=cython.longlong)
    cpdef sent(self, object leg, object by=*)
    @cython.locals(book=CacheBook, legs=dict)
    cpdef ended_leg(self, object end, object by=*)
    @cython.locals(book=CacheBook)
    cpdef found(self, object found, object by=*)
    @cython.locals(book=CacheBook)
    cpdef forget(self, object history, object workers)
    cpdef CacheBook book(self, object worker)
    cdef _note_holders(self, dict holders, object key, long long most)
    cdef dict _longest(self, object entry)
    @cython.locals(book=CacheBook)
    cdef CacheBook _book(self, object worker, object incarnation=*)
    @cython.locals(book=CacheBook)
    cdef CacheBook _open(self, object worker, object view)
    @cython.locals(book=CacheBook)
    cdef _close(self, object worker)
    @cython.locals(last=CacheBook)
    cdef _clear(self)


cdef list _with_point(CacheBook book, object leg)
