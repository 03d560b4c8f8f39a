# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""HTTP/1.1 parsed by llhttp: requests as one call for a head and one for each part of a body, answers as values.

`llhttp/` holds release 9.4.3 as its authors publish it. Nothing lenient is switched on.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdlib cimport realloc

cdef enum:
    SUCCESSFUL = 200  # lower statuses are informational: the real answer follows
    PASSED_BYTES = 256 * 1024  # of trailers, or of extensions between two parts of a body, at most: as of a head


class NotHttp(ValueError):
    """The bytes are not HTTP/1.1."""


@cython.no_gc  # what it holds refers to nothing; a parser of requests adds a connection, and is collected
cdef class Parser:
    """What requests and answers have in common: header lines, which may come in pieces."""

    cdef int _execute(self, const char *data, Py_ssize_t size) except -1:
        """What llhttp says of these bytes."""
        cdef int said
        if self._is_at_work:
            raise RuntimeError("called while it parses")
        self._is_at_work = True
        said = llhttp_execute(&self._state, data, size)
        self._is_at_work = False
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return said

    cdef int _line(self) except -1:
        """A header line is complete."""
        return 0


cdef int header_field(llhttp_t *state, const char *at, size_t size) noexcept:
    cdef Parser parser = <Parser>state.data
    try:
        if parser._value is not None:
            parser._line()
            parser._name = parser._value = None
        parser._name = lowered(at, size) if parser._name is None else parser._name + lowered(at, size)
    except BaseException as exc:
        parser._failure = exc
        return HPE_USER
    return 0


cdef int header_value(llhttp_t *state, const char *at, size_t size) noexcept:
    cdef Parser parser = <Parser>state.data
    try:
        parser._value = at[:size] if parser._value is None else parser._value + at[:size]
    except BaseException as exc:
        parser._failure = exc
        return HPE_USER
    return 0


cdef bytes lowered(const char *at, size_t size):
    cdef bytes made = PyBytes_FromStringAndSize(NULL, size)
    cdef char *to = PyBytes_AS_STRING(made)
    cdef size_t place
    for place in range(size):
        to[place] = at[place] | 32 if c"A" <= at[place] <= c"Z" else at[place]
    return made


cdef bytes stripped(bytes value):
    """Without spaces and tabs at its end; llhttp has skipped those before it."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(value)
    cdef char *at = PyBytes_AS_STRING(value)
    while size and (at[size - 1] == c" " or at[size - 1] == c"\t"):
        size -= 1
    return value if size == PyBytes_GET_SIZE(value) else at[:size]


# -- requests


cdef llhttp_settings_t of_requests


cdef class RequestParser(Parser):
    """Tells `connection` of requests, as they come:

    `on_message_begin()`, `on_head()`, `on_body(data)` for each part, or `on_body_in_place(size)` for one that a
    `BodyBuffer` has, `on_message_complete()`. What the head says stands here during `on_head`. headers: pairs of bytes,
    names in lower case. fields: the same as text; of a repeated one the first.
    """

    def __init__(self, connection):
        llhttp_init(&self._state, HTTP_REQUEST, &of_requests)
        self._state.data = <void *>self
        self._connection = connection
        self.method = self.target = b""
        self.version = ""

    def feed(self, bytes data not None):
        """How many bytes were parsed: all, or those up to the end of a head that offers an upgrade.

        NotHttp where they are not HTTP/1.1. Whatever `connection` raises is raised here.
        """
        cdef const char *start = PyBytes_AS_STRING(data)
        cdef int said = self._execute(start, PyBytes_GET_SIZE(data))
        if said == HPE_PAUSED_UPGRADE:
            llhttp_resume_after_upgrade(&self._state)
            return llhttp_get_error_pos(&self._state) - start
        if said != HPE_OK:
            raise NotHttp
        return PyBytes_GET_SIZE(data)

    cdef int pass_by(self, const char *data, Py_ssize_t size) except -1:
        """As `feed`, of a part of a body that lies where it belongs."""
        self._is_in_place = True
        try:
            if self._execute(data, size) != HPE_OK:
                raise NotHttp
        finally:
            self._is_in_place = False
        return 0

    cdef int _line(self) except -1:
        cdef bytes value
        if self._is_in_head:  # else it is a trailer, which is ignored
            value = stripped(self._value)
            self.headers.append((self._name, value))
            name = self._name.decode("latin-1")
            if name not in self.fields:
                self.fields[name] = value.decode("latin-1")
        return 0


cdef int request_begins(llhttp_t *state) noexcept:
    cdef RequestParser parser = <RequestParser>state.data
    try:
        parser.target, parser.headers, parser.fields = b"", [], {}
        parser._name = parser._value = None
        parser._is_in_head = True
        parser._connection.on_message_begin()
    except BaseException as exc:
        parser._failure = exc
        return HPE_USER
    return 0


cdef int request_target(llhttp_t *state, const char *at, size_t size) noexcept:
    cdef RequestParser parser = <RequestParser>state.data
    try:
        parser.target = at[:size] if not parser.target else parser.target + at[:size]
    except BaseException as exc:
        parser._failure = exc
        return HPE_USER
    return 0


cdef int request_head(llhttp_t *state) noexcept:
    cdef RequestParser parser = <RequestParser>state.data
    try:
        if parser._value is not None:
            parser._line()
            parser._name = parser._value = None
        parser._is_in_head = False
        parser.method = llhttp_method_name(state.method)
        parser.version = "1.1" if state.http_minor == state.http_major == 1 else f"{state.http_major}.{state.http_minor}"
        parser.keeps_alive, parser.offers_upgrade = llhttp_should_keep_alive(state), state.upgrade
        parser._connection.on_head()
        parser.headers = parser.fields = None
    except BaseException as exc:
        parser._failure = exc
        return HPE_USER
    return state.upgrade  # 1: there is no body


cdef int request_body(llhttp_t *state, const char *at, size_t size) noexcept:
    cdef RequestParser parser = <RequestParser>state.data
    try:
        if parser._is_in_place:
            parser._connection.on_body_in_place(size)
        else:
            parser._connection.on_body(at[:size])
    except BaseException as exc:
        parser._failure = exc
        return HPE_USER
    return 0


cdef int request_whole(llhttp_t *state) noexcept:
    cdef RequestParser parser = <RequestParser>state.data
    try:
        parser._connection.on_message_complete()
    except BaseException as exc:
        parser._failure = exc
        return HPE_USER
    return 0


# -- answers


cdef llhttp_settings_t of_answers
spans = NULL  # shared by all parsers: what is parsed is looked at before anything else is
cdef Py_ssize_t room = 0


@cython.no_gc  # as its headers are bytes
cdef class AnswerParser(Parser):
    """One answer after another. Informational ones are skipped, and so are trailers and chunks' extensions.

    status: 0 until the answer's head has come. headers: names in lower case; of a repeated one the last. is_whole: it
    has come to its end. is_followed: so have bytes behind it. can_be_kept: the connection can serve another request.
    lasts_until_closed: nothing else ends it.
    """

    def __init__(self):
        llhttp_init(&self._state, HTTP_RESPONSE, &of_answers)
        self._state.data = <void *>self
        self.next()

    def next(self):
        """The bytes that follow are of the next answer."""
        self.status, self.headers, self._passed_bytes = 0, {}, 0
        self.is_whole = self.is_followed = self.can_be_kept = self.lasts_until_closed = self._is_sized = False

    def feed(self, bytes data not None):
        """The part of the answer's body that is in `data`. NotHttp where it is no HTTP, unless that is behind its end."""
        self.parse(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        return self.body()

    cdef int parse(self, const char *data, Py_ssize_t size) except -1:
        """As `feed`; `spans` then says where the parts of the body lie, until anything else is parsed."""
        cdef int said
        self.count = 0
        said = self._execute(data, size)
        if said != HPE_OK:
            if not self.is_whole:
                raise NotHttp
            self.is_followed = True
        return 0

    cdef bytes body(self):
        """The parts that the last `parse` found, joined."""
        cdef Py_ssize_t at
        if self.count == 0:
            return b""
        if self.count == 1:
            return spans[0].at[: spans[0].size]
        return b"".join([spans[at].at[: spans[at].size] for at in range(self.count)])

    cdef int _line(self) except -1:
        self.headers[self._name] = stripped(self._value)
        if self._name == b"content-length" or self._name == b"transfer-encoding":
            self._is_sized = True
        return 0

    cdef int _pass(self, size_t size) noexcept:
        self._passed_bytes += size
        return HPE_USER if self._passed_bytes > PASSED_BYTES else 0

    cdef int _found(self, const char *at, size_t size) except -1:
        global spans, room
        cdef Span *more
        if self.count == room:
            more = <Span *>realloc(spans, (room or 8) * 2 * sizeof(Span))
            if more == NULL:
                raise MemoryError
            spans, room = more, (room or 8) * 2
        spans[self.count].at, spans[self.count].size = at, size
        self.count += 1
        return 0


cdef int answer_begins(llhttp_t *state) noexcept:
    cdef AnswerParser parser = <AnswerParser>state.data
    parser._name = parser._value = None
    if parser.is_whole:  # no request is open for this one
        parser.is_followed = True
    elif not parser.status:
        parser.headers = {}
        parser._is_sized = False
    return 0


cdef int answer_field(llhttp_t *state, const char *at, size_t size) noexcept:
    cdef AnswerParser parser = <AnswerParser>state.data
    return parser._pass(size) if parser.status else header_field(state, at, size)


cdef int answer_value(llhttp_t *state, const char *at, size_t size) noexcept:
    cdef AnswerParser parser = <AnswerParser>state.data
    return parser._pass(size) if parser.status else header_value(state, at, size)


cdef int answer_extension(llhttp_t *state, const char *at, size_t size) noexcept:
    return (<AnswerParser>state.data)._pass(size)


cdef int answer_head(llhttp_t *state) noexcept:
    cdef AnswerParser parser = <AnswerParser>state.data
    try:
        if parser._value is not None and not parser.is_followed:
            parser._line()
        parser._name = parser._value = None
    except BaseException as exc:
        parser._failure = exc
        return HPE_USER
    if not parser.is_followed and state.status_code >= SUCCESSFUL:
        parser.status = state.status_code
        parser.lasts_until_closed = not (parser._is_sized or state.status_code == 204 or state.status_code == 304)
    return state.upgrade


cdef int answer_body(llhttp_t *state, const char *at, size_t size) noexcept:
    cdef AnswerParser parser = <AnswerParser>state.data
    if not parser.status or parser.is_whole:  # of an informational answer, or behind the end
        return 0
    parser._passed_bytes = 0
    try:
        parser._found(at, size)
    except BaseException as exc:
        parser._failure = exc
        return HPE_USER
    return 0


cdef int answer_whole(llhttp_t *state) noexcept:
    cdef AnswerParser parser = <AnswerParser>state.data
    if not parser.is_whole and parser.status:  # else it was an informational one
        parser.is_whole = True
        parser.can_be_kept = llhttp_should_keep_alive(state) and not parser.lasts_until_closed
    return 0


llhttp_settings_init(&of_requests)
of_requests.on_message_begin = request_begins
of_requests.on_url = request_target
of_requests.on_header_field = header_field
of_requests.on_header_value = header_value
of_requests.on_headers_complete = request_head
of_requests.on_body = request_body
of_requests.on_message_complete = request_whole
llhttp_settings_init(&of_answers)
of_answers.on_message_begin = answer_begins
of_answers.on_header_field = answer_field
of_answers.on_header_value = answer_value
of_answers.on_headers_complete = answer_head
of_answers.on_chunk_extension_name = answer_extension
of_answers.on_chunk_extension_value = answer_extension
of_answers.on_body = answer_body
of_answers.on_message_complete = answer_whole
