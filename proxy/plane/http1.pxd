from libc.stdint cimport uint8_t, uint16_t

cdef extern from "stdbool.h":
    ctypedef bint flag "bool"  # a byte, as each open stream has a parser; a `bint` takes four

cdef extern from "llhttp/llhttp.h":
    ctypedef struct llhttp_t:
        void *data
        uint8_t method
        uint8_t http_major
        uint8_t http_minor
        uint8_t upgrade
        uint16_t status_code
    ctypedef int (*llhttp_cb)(llhttp_t *) noexcept
    ctypedef int (*llhttp_data_cb)(llhttp_t *, const char *at, size_t size) noexcept
    ctypedef struct llhttp_settings_t:
        llhttp_cb on_message_begin
        llhttp_data_cb on_url
        llhttp_data_cb on_header_field
        llhttp_data_cb on_header_value
        llhttp_data_cb on_chunk_extension_name
        llhttp_data_cb on_chunk_extension_value
        llhttp_cb on_headers_complete
        llhttp_data_cb on_body
        llhttp_cb on_message_complete
    ctypedef enum llhttp_type_t:
        HTTP_REQUEST
        HTTP_RESPONSE
    ctypedef enum llhttp_errno_t:
        HPE_OK
        HPE_PAUSED_UPGRADE
        HPE_USER
    void llhttp_settings_init(llhttp_settings_t *)
    void llhttp_init(llhttp_t *, llhttp_type_t, const llhttp_settings_t *)
    llhttp_errno_t llhttp_execute(llhttp_t *, const char *data, size_t size)
    int llhttp_should_keep_alive(const llhttp_t *)
    void llhttp_resume_after_upgrade(llhttp_t *)
    const char *llhttp_get_error_pos(const llhttp_t *)
    const char *llhttp_method_name(int method)


cdef struct Span:
    const char *at
    size_t size


cdef class Parser:
    cdef llhttp_t _state
    cdef bytes _name
    cdef bytes _value
    cdef object _failure  # raised in a callback, where llhttp cannot pass it on
    cdef flag _is_at_work

    cdef int _execute(self, const char *data, Py_ssize_t size) except -1
    cdef int _line(self) except -1


cdef class RequestParser(Parser):
    cdef readonly bytes method
    cdef readonly bytes target
    cdef readonly list headers
    cdef readonly dict fields
    cdef readonly str version
    cdef readonly bint keeps_alive, offers_upgrade
    cdef object _connection
    cdef bint _is_in_head, _is_in_place

    cdef int pass_by(self, const char *data, Py_ssize_t size) except -1


cdef Span *spans  # the parts of the body in what was parsed last, by whichever parser of answers


cdef class AnswerParser(Parser):
    cdef public dict headers
    cdef int count  # of `spans`
    cdef int _passed_bytes
    cdef readonly uint16_t status
    cdef readonly flag is_whole, is_followed, can_be_kept, lasts_until_closed
    cdef flag _is_sized

    cdef int parse(self, const char *data, Py_ssize_t size) except -1
    cdef bytes body(self)
    cdef int _pass(self, size_t size) noexcept
    cdef int _found(self, const char *at, size_t size) except -1
