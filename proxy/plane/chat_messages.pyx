# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The messages of a chat, or items, found in its body without decoding those that are plain texts or known."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.ref cimport PyObject
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.string cimport memcmp, memcpy, memset

from .body_parts cimport (
    ESCAPES,
    String,
    ascii_of,
    follows,
    is_ascii,
    is_named,
    json_space_end,
    json_t,
    json_value_end,
    named,
    string,
)
from .text_digest cimport DIGEST_BYTES, TextPoint

cdef extern from "json_text.h" nogil:
    enum:
        JSON_BEYOND_ASCII
    Py_ssize_t json_unescaped(json_t, Py_ssize_t size, unsigned char *to)
    bint utf8_is_valid(json_t, Py_ssize_t size)

cdef extern from "Python.h":
    PyObject *new_bytes "PyBytes_FromStringAndSize"(const char *, Py_ssize_t) except NULL
    int resize_bytes "_PyBytes_Resize"(PyObject **, Py_ssize_t) except -1
    char *start_of "PyBytes_AS_STRING"(PyObject *)
    void Py_DECREF(PyObject *)
    Py_ssize_t PY_SSIZE_T_MAX

cdef tuple USUAL_ROLES = ("user", "assistant", "tool", "system", "developer")


cdef struct Members:
    String role
    String content
    String name
    String call  # the id of the one that it answers
    String kind  # from here on of items alone
    String output
    String id
    String status


cdef class Kept:
    """A buffer that stays where it is as long as a message in it is held."""

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


cdef class PlainMessage:
    """A message that is one text, whose other members are at most a name and the id of the call that it answers.

    The text stays where it is in the body until somebody asks for it: of a long chat, most are only hashed.
    """

    tool_calls = None
    function_call = None

    @property
    def utf8(self):
        cdef PyObject *text
        if self._utf8 is None:
            if self._has_escapes:
                text = new_bytes(NULL, self._written_size)
                json_unescaped(self._written, self._written_size, <unsigned char *>start_of(text))
                resize_bytes(&text, self.size)
                self._utf8 = <bytes>text  # counts once more
                Py_DECREF(text)
            else:
                self._utf8 = PyBytes_FromStringAndSize(<const char *>self._written, self.size)
        return self._utf8

    @property
    def content(self):
        return self.utf8.decode()

    cdef int digest_by(self, TextPoint point, unsigned char *to) except -1:
        if self._point is point:
            memcpy(to, self._digest, DIGEST_BYTES)
        else:
            point.digest(PyBytes_AS_STRING(self.utf8), self.size, to)
        return 0


cdef class FoundMessage:
    """A message that is more than one text: where it lies, and what somebody has made of it.

    unit: what it adds to a chain, where that is known of an earlier one with the same bytes. Its letter, kind and size are
    those of the unit, and mean nothing without one. decoded: once it has been.
    """

    @property
    def role(self):
        if self.unit is None:
            return self.decoded.role
        return self.unit[UNIT_HEAD_BYTES:].split(b"\xff", 1)[0].decode("utf-8", "surrogatepass")

    @property
    def letter(self):
        return self._head.letter

    @property
    def is_call(self):
        return self._head.is_call

    @property
    def kind(self):
        return self._head.kind

    @property
    def size(self):
        return self._head.size

    @property
    def raw(self):
        """Its bytes, as a view."""
        return memoryview(self._kept.data)[self._start:self.end]


def messages(data, TextPoint point=None, known=None, *, bint are_items=False):
    """The messages of a chat, as any buffer of bytes: a `PlainMessage`, or a `FoundMessage`.

    Beside them the places in the list of those of which nothing is known. None where it is no list of objects. Those are
    whole if they are valid, which nobody has looked at.

    point: by which texts, and messages that are no plain ones, are hashed as they are found, while the CPU has them at
    hand. known: tells, by the digest of such a message, what it adds to a chain, or None. are_items: they are those of
    Responses, where a message, or what a tool has put out, may be plain.
    """
    cdef Kept kept = held(data)
    found = listed(kept, 0, PY_SSIZE_T_MAX, point, known, are_items, False)
    if found is None or json_space_end(<json_t>kept.view.buf, found[2], kept.view.len) != kept.view.len:
        return None
    return found[:2]


def messages_at(
    data, Py_ssize_t at, Py_ssize_t most, TextPoint point, known=None, *, bint are_items=False, bint is_rest=False
):
    """The same of a list that begins at `at`, whatever follows it. Beside them where it ends, and what it weighs.

    is_rest: of what is behind one of its messages, which ends at `at`, and of which there must be some.
    most: None too where plain and known messages weigh more, as `bones` weighs them. Others are not weighed.
    """
    if at < 0:
        raise ValueError(f"a list begins at 0 or behind it, not at {at}")
    return listed(held(data), at, most, point, known, are_items, is_rest)


cdef Kept held(data):
    cdef Kept kept = Kept.__new__(Kept)
    PyObject_GetBuffer(data, &kept.view, PyBUF_SIMPLE)
    kept.data = data
    return kept


cdef tuple listed(Kept kept, Py_ssize_t at, Py_ssize_t most, TextPoint point, known, bint are_items, bint is_rest):
    cdef json_t data = <json_t>kept.view.buf
    cdef Py_ssize_t size = kept.view.len, end, weight = 2, escapes = 0  # the list, and what is around it
    cdef list found = [], others = []
    cdef PlainMessage message
    cdef FoundMessage other
    at = json_space_end(data, at, size)
    if at >= size or data[at] != (c"," if is_rest else c"["):
        return None
    at = json_space_end(data, at + 1, size)
    if not is_rest and at < size and data[at] == c"]":
        return found, others, at + 1, weight
    while at < size and data[at] == c"{":
        message = PlainMessage.__new__(PlainMessage)
        weight += 1  # the comma before it, or none
        message._kept, message._point = kept, point
        end = read_plain(message, data, at, size, are_items, &weight, &escapes)
        if weight + escapes // ESCAPES > most:
            return None
        if end >= 0:
            message.end, message.weighs = end, weight + escapes // ESCAPES
            found.append(message)
        else:
            end = json_value_end(data, at, size)
            if end < 0:
                return None
            other = found_message(kept, at, end, point, known, are_items)
            if other.unit is None:
                others.append(len(found))
            else:
                weight += other._head.weighs
            other.weighs = weight + escapes // ESCAPES
            found.append(other)
        at = json_space_end(data, end, size)
        if at < size and data[at] == c"]":
            return found, others, at + 1, weight + escapes // ESCAPES
        if at >= size or data[at] != c",":
            return None
        at = json_space_end(data, at + 1, size)
    return None


cdef FoundMessage found_message(
    Kept kept, Py_ssize_t start, Py_ssize_t end, TextPoint point, known, bint is_item
):
    cdef FoundMessage message = FoundMessage.__new__(FoundMessage)
    cdef unsigned char digest[DIGEST_BYTES + 1]
    message._kept, message._start, message.end, message.is_item = kept, start, end, is_item
    if point is not None:
        point.digest(<json_t>kept.view.buf + start, end - start, digest)
        digest[DIGEST_BYTES] = c"i"
        message.digest = PyBytes_FromStringAndSize(<const char *>digest, DIGEST_BYTES + is_item)
        if known is not None:
            message.unit = known(message.digest)
            if message.unit is not None:
                message._head = head_of(message.unit)
    return message


cdef Py_ssize_t read_plain(
    PlainMessage message,
    json_t data,
    Py_ssize_t at,
    Py_ssize_t size,
    bint is_item,
    Py_ssize_t *weight,
    Py_ssize_t *escapes,
) except -2:
    """Where the object at `at` ends; -1 if it is no plain message. A member that is null is as good as none.

    Adds what it weighs, and its escapes.
    """
    cdef String name
    cdef Members members
    cdef String *member
    cdef bint is_text
    cdef int more = 1
    memset(&members, 0, sizeof(members))
    while more > 0:
        weight[0] += 1  # the brace or comma before a member
        at = named(data, json_space_end(data, at + 1, size), size, &name)
        if at < 0:
            return -1
        member = member_of(&members, data, &name, is_item)
        is_text = member == &members.content or member == &members.output
        if at + 4 <= size and memcmp(data + at, b"null", 4) == 0 and not is_text and member != &members.role:
            if member != NULL and member.end:  # the last of a name counts
                return -1
            at += 4
        elif member == NULL or member.end:
            return -1
        else:
            if is_text and at < size and data[at] == c"[":
                at = one_text(data, at, size, member, weight)
            else:
                at = string(data, at, size, member)
            if at < 0 or not (is_text or is_ascii(member)):
                return -1
            escapes[0] += member.escapes
        more = follows(data, &at, size)
    if more < 0 or (is_item and not is_plain_item(data, &members)):
        return -1
    return at + 1 if is_told(message, data, &members) else -1


cdef bint is_told(PlainMessage message, json_t data, Members *members) except -1:
    """Whether it is one text that is valid, by somebody. The message is told all of it."""
    cdef bint is_output = members.output.end > 0
    cdef String *text = &members.output if is_output else &members.content
    if not text.end or not (is_output or members.role.end) or not text_at(message, data, text):
        return False
    message.role = "tool" if is_output else role_of(data, &members.role)
    message.name = ascii_of(data, &members.name) if members.name.end else None
    message.tool_call_id = ascii_of(data, &members.call) if members.call.end else None
    return True


cdef String *member_of(Members *members, json_t data, const String *name, bint is_item) noexcept nogil:
    """Where the member of that name is told; NULL: a plain message has none such."""
    if is_named(data, name, b"role", 4):
        return &members.role
    if is_named(data, name, b"content", 7):
        return &members.content
    if is_named(data, name, b"name", 4):
        return &members.name
    if not is_item:
        return &members.call if is_named(data, name, b"tool_call_id", 12) else NULL
    if is_named(data, name, b"type", 4):
        return &members.kind
    if is_named(data, name, b"call_id", 7):
        return &members.call
    if is_named(data, name, b"output", 6):
        return &members.output
    if is_named(data, name, b"id", 2):
        return &members.id
    return &members.status if is_named(data, name, b"status", 6) else NULL


cdef bint is_plain_item(json_t data, Members *members) noexcept nogil:
    """Whether it is a message, or what a tool has put out, and has nothing that is read of the other one."""
    cdef String *kind = &members.kind
    if not members.output.end:
        return not members.call.end and (not kind.end or is_named(data, kind, b"message", 7))
    if members.role.end or members.content.end or members.name.end:
        return False
    return is_named(data, kind, b"function_call_output", 20) or is_named(data, kind, b"custom_tool_call_output", 23)


cdef Py_ssize_t one_text(json_t data, Py_ssize_t at, Py_ssize_t size, String *text, Py_ssize_t *weight) noexcept nogil:
    """Behind the list at `at` of one part that is a text, which is told; -1 if it is anything else, or unusual."""
    cdef String name, kind
    cdef int more = 1
    kind.start = kind.end = text.end = 0
    at = json_space_end(data, at + 1, size)
    if at >= size or data[at] != c"{":
        return -1
    weight[0] += 1  # the list's bracket
    while more > 0:
        weight[0] += 1
        at = named(data, json_space_end(data, at + 1, size), size, &name)
        if at < 0:
            return -1
        if is_named(data, &name, b"text", 4) and not text.end:
            at = string(data, at, size, text)
        elif is_named(data, &name, b"type", 4) and not kind.end:
            at = string(data, at, size, &kind)
        elif is_named(data, &name, b"cache_control", 13):
            at = plain_strings_end(data, at, size, weight)
        else:
            return -1
        if at < 0:
            return -1
        more = follows(data, &at, size)
    at = json_space_end(data, at + 1, size)
    if more < 0 or not text.end or not kind.end or at >= size or data[at] != c"]":
        return -1
    if is_named(data, &kind, b"text", 4) or is_named(data, &kind, b"input_text", 10):
        return at + 1
    return at + 1 if is_named(data, &kind, b"output_text", 11) else -1


cdef Py_ssize_t plain_strings_end(json_t data, Py_ssize_t at, Py_ssize_t size, Py_ssize_t *weight) noexcept nogil:
    """Behind the object at `at`, whose members are strings of plain ASCII; -1 if it is anything else."""
    cdef String name, value
    cdef int more = 1
    if at >= size or data[at] != c"{":
        return -1
    while more > 0:
        weight[0] += 1
        at = named(data, json_space_end(data, at + 1, size), size, &name)
        if at < 0:
            return -1
        value.end = 0
        at = string(data, at, size, &value)
        if at < 0 or not is_ascii(&value):
            return -1
        more = follows(data, &at, size)
    return -1 if more < 0 else at + 1


cdef str role_of(json_t data, const String *found):
    cdef Py_ssize_t size
    cdef const char *text
    for usual in USUAL_ROLES:  # one object for each
        text = PyUnicode_AsUTF8AndSize(usual, &size)
        if is_named(data, found, text, size):
            return usual
    return ascii_of(data, found)


cdef bint text_at(PlainMessage message, json_t data, const String *found) except -1:
    """Whether it is valid. Its message is told where it is, how long it is, and its digest."""
    cdef json_t start = data + found.start
    cdef Py_ssize_t size = found.end - found.start
    cdef unsigned char *said = NULL
    if found.kinds & JSON_BEYOND_ASCII and not utf8_is_valid(start, size):
        return False
    message._written, message._written_size, message._has_escapes = start, size, found.escapes > 0
    try:
        if found.escapes:
            said = <unsigned char *>PyMem_Malloc(size)
            if said == NULL:
                raise MemoryError
            size = json_unescaped(start, size, said)
            if size < 0:
                return False
        message.size = size
        if message._point is not None:
            message._point.digest(start if said == NULL else said, size, message._digest)
    finally:
        PyMem_Free(said)
    return True
