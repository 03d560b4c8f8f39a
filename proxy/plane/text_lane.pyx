# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Events of a stream that bring text and nothing else, passed from the worker's socket to the client's.

Nearly every event is like that. `openai/plain_events` tells by what bytes they are known: those before and behind the
text. Such an event is looked at, its text kept until somebody asks, and it is sent on with its chunk's frame in one
write, from the buffer that it was read into. Everything else takes the long way, through the worker's connection.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.string cimport memcmp, memcpy

from .http1 cimport AnswerParser, Span, spans
from .http1 import NotHttp
from .poller cimport SocketTransport
from .receiver cimport Receiver

cdef extern from "time.h" nogil:
    struct timespec:
        long tv_sec
        long tv_nsec
    int clock_gettime(int clock, timespec *now)
    enum: CLOCK_MONOTONIC

cdef enum:
    TEXT_BYTES = 2048  # kept; then the long way takes them
    LINE_BYTES = 18    # of a chunk's size in hexadecimal digits, and its line end


cdef class TextLane(Receiver):
    """One stream's events. It is open while `arm` was called last, and then sees what the worker sends first.

    connection: the worker's; it gets what is not plain by `parsed`, or `unparsable`.
    """

    cdef SocketTransport _worker
    cdef SocketTransport _client
    cdef AnswerParser _parser
    cdef object _connection
    cdef bytes _before, _behind
    cdef char *_text
    cdef int _text_bytes, _events
    cdef readonly double heard_s  # when it last passed something on, by the monotonic clock; 0: not yet

    def __init__(
        self,
        SocketTransport worker not None,
        AnswerParser parser not None,
        connection not None,
        SocketTransport client not None,
    ):
        self._worker, self._parser, self._connection, self._client = worker, parser, connection, client

    def __dealloc__(self):
        PyMem_Free(self._text)

    def arm(self, bytes before not None, bytes behind not None):
        """From here on, events are plain that have only text between these bytes."""
        self._before, self._behind = before, behind
        if self._worker is not None:
            self._worker.receiver = self

    def disarm(self):
        """What comes next may not be plain although it looks so: an event is incomplete, say."""
        if self._worker is not None and self._worker.receiver is self:
            self._worker.receiver = None

    def close(self):
        self.disarm()
        self._worker = self._client = self._parser = self._connection = None

    def taken(self):
        """The text that was passed on since this was last asked, and in how many events."""
        text, events = PyUnicode_DecodeUTF8(self._text, self._text_bytes, NULL), self._events
        self._text_bytes = self._events = 0
        return text, events

    cdef int take(self, char *data, Py_ssize_t size) except -1:
        cdef Py_ssize_t length = 0
        cdef char *start
        cdef SocketTransport client = self._client  # held here, as the lane may be closed meanwhile
        connection = self._connection
        try:
            self._parser.parse(data, size)
        except NotHttp:
            connection.unparsable()
            return 0
        start = self._framed(data, size, &length)
        if start == NULL:
            connection.parsed(self._parser.body(), size)
            return 0
        self._hear()
        self._keep_texts()  # first: the client may send its next turn at once
        return client.send_piece(start, length)

    cdef char *_framed(self, char *data, Py_ssize_t size, Py_ssize_t *length) except? NULL:
        """The events as chunks of the client's, in place: NULL if anything in `data` is not plain."""
        cdef AnswerParser parser = self._parser
        cdef const Span *span
        cdef Py_ssize_t place, line_bytes, room = TEXT_BYTES - self._text_bytes
        cdef char line[LINE_BYTES]
        cdef char *end = NULL
        cdef char *start = NULL
        cdef char *at
        if parser.is_whole or not parser.count or not parser.status:
            return NULL
        for place in range(parser.count):
            span = &spans[place]
            at = <char *>span.at
            line_bytes = size_line(span.size, line)
            room -= span.size
            if room < 0 or not self._is_plain(at, span.size):
                return NULL
            if at - (data if end == NULL else end) < line_bytes or at + span.size + 2 > data + size:
                return NULL  # its frame has not come whole
            if end == NULL:
                start = at - line_bytes
            elif at - line_bytes != end:
                return NULL  # there is more between two chunks than the size of the second
            end = at + span.size + 2  # behind the line end that llhttp has seen there
        line_bytes = size_line(spans[0].size, line)
        memcpy(start, line, line_bytes)
        length[0] = end - start
        return start

    cdef bint _is_plain(self, const char *event, Py_ssize_t size) except -1:
        cdef Py_ssize_t before = PyBytes_GET_SIZE(self._before), behind = PyBytes_GET_SIZE(self._behind), at
        cdef bint is_ascii = True
        cdef unsigned char code
        if size < before + behind or memcmp(event, PyBytes_AS_STRING(self._before), before) != 0:
            return False
        if memcmp(event + size - behind, PyBytes_AS_STRING(self._behind), behind) != 0:
            return False
        for at in range(before, size - behind):
            code = event[at]
            if code < 0x20 or code == c'"' or code == c"\\":
                return False
            is_ascii &= code < 0x80
        if not is_ascii:
            try:
                PyUnicode_DecodeUTF8(event + before, size - before - behind, NULL)
            except UnicodeDecodeError:
                return False
        return True

    cdef int _keep_texts(self) except -1:
        cdef Py_ssize_t before = PyBytes_GET_SIZE(self._before), around = before + PyBytes_GET_SIZE(self._behind)
        cdef Py_ssize_t place, wanted = self._text_bytes
        cdef const Span *span
        cdef char *more
        for place in range(self._parser.count):
            wanted += spans[place].size - around
        if wanted > self._text_bytes:
            more = <char *>PyMem_Realloc(self._text, wanted + 64)
            if more == NULL:
                raise MemoryError
            self._text = more
        for place in range(self._parser.count):
            span = &spans[place]
            if span.size == around:  # before the first text there is nowhere to copy to, not even nothing
                continue
            memcpy(self._text + self._text_bytes, span.at + before, span.size - around)
            self._text_bytes += span.size - around
        self._events += self._parser.count
        return 0

    cdef int _hear(self) except -1:
        cdef timespec now
        cdef double before_s = self.heard_s
        clock_gettime(CLOCK_MONOTONIC, &now)
        self.heard_s = now.tv_sec + now.tv_nsec * 1e-9
        if self.heard_s - before_s > 0.25:
            self._connection.answers()
        return 0


cdef Py_ssize_t size_line(size_t size, char *line) noexcept:
    """Writes what stands before a chunk of so many bytes, and returns how long it is."""
    cdef Py_ssize_t digits = 1, at
    while size >> (4 * digits):
        digits += 1
    for at in range(digits):
        line[at] = b"0123456789abcdef"[size >> (4 * (digits - 1 - at)) & 15]
    line[digits], line[digits + 1] = c"\r", c"\n"
    return digits + 2
