from libc.stdint cimport uint64_t

cdef extern from "polyval.h" nogil:
    ctypedef struct polyval_point_t:
        pass
    ctypedef struct polyval_t:
        pass
    int polyval_is_there()
    void polyval_point(polyval_point_t *, const unsigned char *secret)
    void polyval_start(polyval_t *)
    void polyval_add(const polyval_point_t *, polyval_t *, const void *data, size_t size)
    void polyval_end(const polyval_point_t *, const polyval_t *, unsigned char *digest)

cdef enum:
    DIGEST_BYTES = 16

cdef class TextPoint:
    cdef polyval_point_t point
    cdef void digest(self, const void *text, size_t size, unsigned char *to) noexcept nogil
