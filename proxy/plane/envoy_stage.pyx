# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""What Envoy tells a picker of a request, read from its bytes without an object for each header."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeASCII, PyUnicode_DecodeLatin1
from libc.stdint cimport uint64_t

ctypedef const unsigned char *bytes_t

cdef enum:
    REQUEST_HEADERS = 0x12  # fields of a `ProcessingRequest`: number and type, as they are encoded
    RESPONSE_HEADERS = 0x1A
    REQUEST_BODY = 0x22
    RESPONSE_BODY = 0x2A
    METADATA_CONTEXT = 0x42
    OBSERVABILITY_MODE = 0x50
    PROTOCOL_CONFIG = 0x5A
    FIRST_MESSAGE = 0x0A  # of a message, its field 1: headers, a header, a header's name, a body
    BODY_IS_LAST = 0x10
    HEAD_IS_LAST = 0x18
    RAW_VALUE = 0x1A
    REQUEST_BODY_MODE = 0x08
    RESPONSE_BODY_MODE = 0x10


cdef struct Part:
    Py_ssize_t start  # of what stands behind a field's number; -1: the field is not there
    Py_ssize_t end


cdef struct Modes:
    int request_body
    int response_body


def envoy_stage(data):
    """Of a `ProcessingRequest`, as any buffer of bytes: its stage, the headers, the piece of the body, whether it is the
    last, the two body modes or None, the encoded metadata, and whether it is only shown.

    The stage is the number of its field. None where anything is unusual, be it valid or not: trailers, fields that are
    not known or come twice, headers that come twice, have no value, a name that is not in lower case, or a value that
    HTTP does not allow.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return stage_of(<bytes_t>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


cdef tuple stage_of(bytes_t data, Py_ssize_t size):
    cdef Part stage, metadata, config
    cdef Modes modes
    cdef Py_ssize_t at = 0
    cdef unsigned char kind = 0, key
    cdef bint is_shown = False
    stage.start = stage.end = metadata.start = config.start = -1
    while at < size:
        key = data[at]
        if key == METADATA_CONTEXT:
            at = next_part(data, at, size, &metadata)
        elif key == PROTOCOL_CONFIG:
            at = next_part(data, at, size, &config)
        elif key == OBSERVABILITY_MODE and not is_shown:
            at = flag_end(data, at, size)
            is_shown = True
        elif key == REQUEST_HEADERS or key == RESPONSE_HEADERS or key == REQUEST_BODY or key == RESPONSE_BODY:
            at = next_part(data, at, size, &stage)
            kind = key
        else:
            return None
        if at < 0:
            return None
    if not kind or (config.start >= 0 and not read_modes(data, config, &modes)):
        return None
    told_modes = (modes.request_body, modes.response_body) if config.start >= 0 else None
    told_metadata = b"" if metadata.start < 0 else bytes_of(data, metadata)
    if kind == REQUEST_BODY or kind == RESPONSE_BODY:
        return with_body(data, stage, kind >> 3, told_modes, told_metadata, is_shown)
    return with_headers(data, stage, kind >> 3, told_modes, told_metadata, is_shown)


cdef tuple with_body(bytes_t data, Part stage, int number, modes, bytes metadata, bint is_shown):
    cdef Part body
    cdef Py_ssize_t at = stage.start
    cdef bint is_last = False
    body.start = body.end = -1
    if at < stage.end and data[at] == FIRST_MESSAGE:
        at = next_part(data, at, stage.end, &body)
    if 0 <= at < stage.end and data[at] == BODY_IS_LAST:
        at = flag_end(data, at, stage.end)
        is_last = True
    if at != stage.end:
        return None
    return number, {}, bytes_of(data, body), is_last, modes, metadata, is_shown


cdef tuple with_headers(bytes_t data, Part stage, int number, modes, bytes metadata, bint is_shown):
    cdef Part headers
    cdef Py_ssize_t at = stage.start
    cdef bint is_last = False
    headers.start = headers.end = -1
    if at < stage.end and data[at] == FIRST_MESSAGE:
        at = next_part(data, at, stage.end, &headers)
    if 0 <= at < stage.end and data[at] == HEAD_IS_LAST:
        at = flag_end(data, at, stage.end)
        is_last = True
    if at != stage.end:
        return None
    found = read_headers(data, headers)
    return None if found is None else (number, found, b"", is_last, modes, metadata, is_shown)


cdef dict read_headers(bytes_t data, Part headers):
    cdef Part header, name, value
    cdef Py_ssize_t at = headers.start
    cdef dict found = {}
    while at < headers.end:
        header.start = name.start = value.start = -1
        if data[at] != FIRST_MESSAGE:
            return None
        at = next_part(data, at, headers.end, &header)
        if at < 0 or header.start == header.end or data[header.start] != FIRST_MESSAGE:
            return None
        header.start = next_part(data, header.start, header.end, &name)
        if not 0 <= header.start < header.end or data[header.start] != RAW_VALUE:
            return None
        if next_part(data, header.start, header.end, &value) != header.end:
            return None
        if not is_usual_name(data, name) or not is_usual_value(data, value):
            return None
        key = PyUnicode_DecodeASCII(<const char *>data + name.start, name.end - name.start, NULL)
        if key in found:
            return None
        found[key] = PyUnicode_DecodeLatin1(<const char *>data + value.start, value.end - value.start, NULL)
    return found


cdef bint is_usual_name(bytes_t data, Part name) noexcept nogil:
    """One of HTTP's, in lower case."""
    cdef Py_ssize_t at = name.start
    if at < name.end and data[at] == c":":
        at += 1
    if at >= name.end or not c"a" <= data[at] <= c"z":
        return False
    while at < name.end:
        if not (c"a" <= data[at] <= c"z" or c"0" <= data[at] <= c"9" or data[at] == c"-"):
            return False
        at += 1
    return True


cdef bint is_usual_value(bytes_t data, Part value) noexcept nogil:
    cdef Py_ssize_t at
    for at in range(value.start, value.end):
        if data[at] == c"\r" or data[at] == c"\n" or data[at] == 0:
            return False
    return value.start < value.end


cdef bint read_modes(bytes_t data, Part config, Modes *modes) noexcept nogil:
    cdef Py_ssize_t at = config.start
    modes.request_body = modes.response_body = 0
    if at + 1 < config.end and data[at] == REQUEST_BODY_MODE and data[at + 1] < 0x80:
        modes.request_body = data[at + 1]
        at += 2
    if at + 1 < config.end and data[at] == RESPONSE_BODY_MODE and data[at + 1] < 0x80:
        modes.response_body = data[at + 1]
        at += 2
    return at == config.end


# -- fields: https://protobuf.dev/programming-guides/encoding


cdef Py_ssize_t next_part(bytes_t data, Py_ssize_t at, Py_ssize_t size, Part *part) noexcept nogil:
    """Where the field ends that begins there, a message, text or bytes; -1: it is not whole, or the part is known."""
    cdef uint64_t length = 0
    cdef int shift = 0
    if part.start >= 0:
        return -1
    at += 1
    while at < size and shift < 35:
        length |= <uint64_t>(data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            if length > <uint64_t>(size - at):
                return -1
            part.start = at
            part.end = at + <Py_ssize_t>length
            return part.end
    return -1


cdef Py_ssize_t flag_end(bytes_t data, Py_ssize_t at, Py_ssize_t size) noexcept nogil:
    """Where a field ends that is true; -1: it is something else."""
    return at + 2 if at + 1 < size and data[at + 1] == 1 else -1


cdef bytes bytes_of(bytes_t data, Part part):
    return PyBytes_FromStringAndSize(<const char *>data + part.start, part.end - part.start) if part.start >= 0 else b""
