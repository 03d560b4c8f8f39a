# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""A JSON body's members, and the messages of a chat, found without decoding what nobody reads."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.ref cimport PyObject
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeASCII
from libc.string cimport memcmp, memcpy

from .text_digest cimport DIGEST_BYTES, TextPoint

cdef extern from "json_text.h" nogil:
    ctypedef const unsigned char *json_t
    enum:
        JSON_BEYOND_ASCII
    Py_ssize_t json_space_end(json_t, Py_ssize_t at, Py_ssize_t size)
    Py_ssize_t json_string_end(json_t, Py_ssize_t at, Py_ssize_t size, int *kinds, Py_ssize_t *escapes)
    Py_ssize_t json_value_end(json_t, Py_ssize_t at, Py_ssize_t size)
    Py_ssize_t json_unescaped(json_t, Py_ssize_t size, unsigned char *to)
    bint utf8_is_valid(json_t, Py_ssize_t size)

cdef extern from "Python.h":
    PyObject *new_bytes "PyBytes_FromStringAndSize"(const char *, Py_ssize_t) except NULL
    int resize_bytes "_PyBytes_Resize"(PyObject **, Py_ssize_t) except -1
    char *start_of "PyBytes_AS_STRING"(PyObject *)
    void Py_DECREF(PyObject *)
    Py_ssize_t PY_SSIZE_T_MAX

cdef enum:
    MOST_MEMBERS = 256  # of a body; no client library sends more
    ESCAPES = 16  # that weigh as much as one value, as in `bones`

cdef tuple USUAL_ROLES = ("user", "assistant", "tool", "system", "developer")


cdef struct String:
    Py_ssize_t start
    Py_ssize_t end
    int kinds
    Py_ssize_t escapes


cdef struct Member:
    String name
    Py_ssize_t begins  # with the quotation mark before its name
    Py_ssize_t start  # of its value
    Py_ssize_t end


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


def members(bytes body not None):
    """Of each member of an object: name, where that begins, and where its value begins and ends.

    None where anything is unusual, be it valid or not: a name with escapes or beyond ASCII, or hundreds of members.
    What the values are is not looked at: of valid JSON they are whole.
    """
    cdef json_t data = <json_t>PyBytes_AS_STRING(body)
    cdef Py_ssize_t size = len(body), at
    cdef Member one
    cdef list found = []
    at = json_space_end(data, 0, size)
    if at >= size or data[at] != c"{":
        return None
    one.end = at
    at = json_space_end(data, at + 1, size)
    if at < size and data[at] == c"}":
        return found if json_space_end(data, at + 1, size) == size else None
    while len(found) < MOST_MEMBERS:
        if not next_member(data, size, &one):
            return None
        found.append((ascii_of(data, &one.name), one.begins, one.start, one.end))
        at = json_space_end(data, one.end, size)
        if at < size and data[at] == c"}":
            return found if json_space_end(data, at + 1, size) == size else None
        if at >= size or data[at] != c",":
            return None
        one.end = at
    return None


def value_start(bytes body not None, bytes wanted not None):
    """Where the value of the first member with this name begins, as `members` would tell it.

    None where there is none, or what comes before it is unusual. The value itself, and what comes behind, is not
    looked at.
    """
    cdef json_t data = <json_t>PyBytes_AS_STRING(body)
    cdef Py_ssize_t size = len(body)
    cdef Member one
    one.end = json_space_end(data, 0, size)
    if one.end >= size or data[one.end] != c"{":
        return None
    while begin_member(data, size, &one):
        if is_named(data, &one.name, PyBytes_AS_STRING(wanted), len(wanted)):
            return one.start
        one.end = json_value_end(data, one.start, size)
        if one.end < 0:
            return None
        one.end = json_space_end(data, one.end, size)
        if one.end >= size or data[one.end] != c",":
            return None
    return None


def messages(data, TextPoint point=None):
    """The messages of a chat, as any buffer of bytes: a `PlainMessage`, or where another message begins and ends.

    Beside them the places of those others in the list. None where it is no list of objects. The others are whole if
    they are valid, which nobody has looked at.

    point: by which texts are hashed as they are found, while the CPU has them at hand.
    """
    cdef Kept kept = held(data)
    cdef json_t start = <json_t>kept.view.buf
    cdef Py_ssize_t end
    found = listed(kept, json_space_end(start, 0, kept.view.len), PY_SSIZE_T_MAX, point)
    if found is None:
        return None
    end = found[2]
    return found[:2] if json_space_end(start, end, kept.view.len) == kept.view.len else None


def messages_at(data, Py_ssize_t at, Py_ssize_t most, TextPoint point):
    """The same of a list that begins at `at`, whatever follows it. Beside them where it ends, and what it weighs.

    most: None too where the plain messages weigh more, as `bones` weighs them. Others are not weighed.
    """
    if at < 0:
        raise ValueError(f"a list begins at 0 or behind it, not at {at}")
    return listed(held(data), at, most, point)


cdef Kept held(data):
    cdef Kept kept = Kept.__new__(Kept)
    PyObject_GetBuffer(data, &kept.view, PyBUF_SIMPLE)
    return kept


cdef tuple listed(Kept kept, Py_ssize_t at, Py_ssize_t most, TextPoint point):
    cdef json_t data = <json_t>kept.view.buf
    cdef Py_ssize_t size = kept.view.len, end, weight = 2, escapes = 0  # the list, and what is around it
    cdef list found = [], others = []
    cdef PlainMessage message
    if at >= size or data[at] != c"[":
        return None
    at = json_space_end(data, at + 1, size)
    if at < size and data[at] == c"]":
        return found, others, at + 1, weight
    while at < size and data[at] == c"{":
        message = PlainMessage.__new__(PlainMessage)
        weight += 1  # the comma before it, or none
        message._kept, message._point = kept, point
        end = read_plain(message, data, at, size, &weight, &escapes)
        if weight + escapes // ESCAPES > most:
            return None
        if end >= 0:
            found.append(message)
        else:
            end = json_value_end(data, at, size)
            if end < 0:
                return None
            others.append(len(found))
            found.append((at, end))
        at = json_space_end(data, end, size)
        if at < size and data[at] == c"]":
            return found, others, at + 1, weight + escapes // ESCAPES
        if at >= size or data[at] != c",":
            return None
        at = json_space_end(data, at + 1, size)
    return None


cdef Py_ssize_t read_plain(
    PlainMessage message, json_t data, Py_ssize_t at, Py_ssize_t size, Py_ssize_t *weight, Py_ssize_t *escapes
) except -2:
    """Where the object at `at` ends; -1 if it is no plain message. A member that is null is as good as none.

    Adds what it weighs, and its escapes.
    """
    cdef String name, role, content, author, call
    role.end = content.end = author.end = call.end = 0
    cdef String *member
    while True:
        weight[0] += 1  # the brace or comma before a member
        at = named(data, json_space_end(data, at + 1, size), size, &name)
        if at < 0:
            return -1
        member = NULL
        if is_named(data, &name, b"role", 4):
            member = &role
        elif is_named(data, &name, b"content", 7):
            member = &content
        elif is_named(data, &name, b"name", 4):
            member = &author
        elif is_named(data, &name, b"tool_call_id", 12):
            member = &call
        if at + 4 <= size and memcmp(data + at, b"null", 4) == 0 and member != &role and member != &content:
            if member != NULL and member.end:  # the last of a name counts
                return -1
            at += 4
        elif member == NULL or member.end:
            return -1
        else:
            at = string(data, at, size, member)
            if at < 0:
                return -1
            escapes[0] += member.escapes
        at = json_space_end(data, at, size)
        if at < size and data[at] == c"}":
            break
        if at >= size or data[at] != c",":
            return -1
    if not role.end or not content.end or not (is_ascii(&role) and is_ascii(&author) and is_ascii(&call)):
        return -1
    if not text_at(message, data, &content):
        return -1
    message.role = role_of(data, &role)
    message.name = ascii_of(data, &author) if author.end else None
    message.tool_call_id = ascii_of(data, &call) if call.end else None
    return at + 1


cdef bint begin_member(json_t data, Py_ssize_t size, Member *one) noexcept nogil:
    """Goes on to where the value begins of the member behind the brace or comma at the end of this one; false if there
    is none, or it is not plain."""
    one.begins = json_space_end(data, one.end + 1, size)
    one.start = named(data, one.begins, size, &one.name)
    return one.start >= 0


cdef bint next_member(json_t data, Py_ssize_t size, Member *one) noexcept nogil:
    """As `begin_member`, and on to its end."""
    if not begin_member(data, size, one):
        return False
    one.end = json_value_end(data, one.start, size)
    return one.end >= 0


cdef Py_ssize_t string(json_t data, Py_ssize_t at, Py_ssize_t size, String *found) noexcept nogil:
    """Behind the string at `at`, of which `found` is told; -1 if there is none."""
    if at >= size or data[at] != c'"':
        return -1
    found.start = at + 1
    found.kinds = 0
    found.escapes = 0
    at = json_string_end(data, at + 1, size, &found.kinds, &found.escapes)
    found.end = at - 1
    return at


cdef Py_ssize_t named(json_t data, Py_ssize_t at, Py_ssize_t size, String *name) noexcept nogil:
    """Where the value begins, of the member whose name is at `at`; -1 if none does, or its name is not plain."""
    name.end = 0
    at = string(data, at, size, name)
    if at < 0 or not is_ascii(name):
        return -1
    at = json_space_end(data, at, size)
    if at >= size or data[at] != c":":
        return -1
    return json_space_end(data, at + 1, size)


cdef bint is_ascii(const String *found) noexcept nogil:
    """Whether it says what is written; also of a string that is not there."""
    return not found.end or not (found.kinds or found.escapes)


cdef bint is_named(json_t data, const String *name, const char *wanted, Py_ssize_t size) noexcept nogil:
    return name.end - name.start == size and memcmp(data + name.start, wanted, size) == 0


cdef str ascii_of(json_t data, const String *found):
    return PyUnicode_DecodeASCII(<const char *>data + found.start, found.end - found.start, NULL)


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
