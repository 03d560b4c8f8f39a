cdef class PlainMessage:
    cdef readonly str role
    cdef readonly bytes utf8  # its text
    cdef readonly str name
    cdef readonly str tool_call_id
