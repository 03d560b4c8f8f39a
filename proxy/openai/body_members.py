"""A JSON body's members: what they hold, and the body with some of them changed.

Unchanged members are sent on without being copied. `places_in` finds where each member lies without parsing its value
a second time. A body that two parsers could read differently, because a name occurs twice or is written with escapes,
is encoded anew, and so is every short body. So a worker never sees another request than the one that was routed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from .. import plane
from ..errors import UNREADABLE, RequestError

Fields = dict[str, msgspec.Raw]
Part = bytes | memoryview
T = TypeVar("T")
Places = dict[str, tuple[int, int]]
"""Start of each member's name and end of its value."""

SHORT_BYTES = 16_384
"""Up to this size, encoding the members anew takes no longer than finding their positions: about 5 us."""

NULL = msgspec.Raw(b"null")
_ANY: msgspec.json.Decoder[msgspec.Raw] = msgspec.json.Decoder(msgspec.Raw)
_MOST_MEMBERS = 256  # a microsecond each; no client library sends more

# The body has already been decoded as JSON, so only a brace or a comma can come before a name.
_NAME = re.compile(rb'[ \t\n\r]*[{,][ \t\n\r]*("[^"\\]*"[ \t\n\r]*:[ \t\n\r]*)')
_END = re.compile(rb"[ \t\n\r]*\}")


class Members(Fields):
    """A body's members, each value verbatim, and the body itself. Never changed: edits are made on a copy."""

    __slots__ = ("body", "places")

    def __init__(self, fields: Fields, body: Part, places: Places | None = None) -> None:
        """places: where the members lie in the body, if that is known; a member without a place is not in it."""
        super().__init__(fields)
        self.body = body
        self.places = places


def located(body: bytes, unchecked: str | None) -> Members | None:
    """A long body's members, found by compiled code in a sixth of the time that decoding takes.

    None where they must be decoded, as anything about them is unusual. unchecked: the member of which nobody has made
    sure that it is JSON. DecodeError if another one is not. Not worth it for bodies of up to SHORT_BYTES.
    """
    found = plane.members(body) if plane.IS_BUILT else None
    if found is None:
        return None
    view = memoryview(body)
    fields = {name: msgspec.Raw(view[start:end]) for name, _, start, end in found}
    if len(fields) < len(found):  # a name occurs twice
        return None
    for name, value in fields.items():
        if name != unchecked:
            _ANY.decode(value)
    return Members(fields, body, {name: (begins, end) for name, begins, _, end in found})


class Edited(Fields):
    """Members of a body of which the proxy has changed some, and those that it came with.

    own: members of the proxy's own that every leg carries, although a client's member of that name is never forwarded.
    """

    __slots__ = ("original", "own")

    original: Fields
    own: Fields

    @classmethod
    def of(cls, fields: Fields, changes: Fields, own: Fields | None = None) -> Edited:
        edited = cls(fields)
        edited.update(changes)
        edited.original = fields.original if isinstance(fields, Edited) else fields
        edited.own = {**(fields.own if isinstance(fields, Edited) else {}), **(own or {})}
        return edited


def spliced(fields: Fields, original: Fields) -> tuple[Part, ...]:
    """The JSON of `fields` in pieces. A value that is the same object in both is not copied from the original body."""
    if isinstance(original, Edited):
        original = original.original
    if not isinstance(original, Members):
        return (msgspec.json.encode(fields),)
    places = original.places
    if places is None and (len(original.body) <= SHORT_BYTES or (places := _places(original)) is None):
        return (msgspec.json.encode(fields),)
    is_same = all(fields.get(name) is value for name, value in original.items())
    if is_same and len(fields) == len(original) == len(places):
        return (original.body,)
    view, parts = memoryview(original.body), list[Part]((b"{",))
    for start, end in _unchanged_ranges(fields, original, places):
        parts += (view[start:end], b",")
    others = {name: value for name, value in fields.items() if original.get(name) is not value}
    if others:
        parts.append(msgspec.json.encode(others)[1:])
    else:
        parts[-1] = b"}" if len(parts) > 1 else b"{}"
    return tuple(parts)


def _unchanged_ranges(fields: Fields, original: Fields, places: Places) -> Iterator[tuple[int, int]]:
    start = end = 0  # of a run of unchanged members
    for name, value in original.items():
        place = places.get(name)
        if place is not None and fields.get(name) is value:
            start, end = start or place[0], place[1]
        elif start:
            yield start, end
            start = 0
    if start:
        yield start, end


def _places(members: Members) -> Places | None:
    if len(members) > _MOST_MEMBERS:
        return None
    assert isinstance(members.body, bytes), "the places in shared memory are known"
    return places_in(members.body, members)


def places_in(body: bytes, members: Fields) -> Places | None:
    """Where each member lies; None where the body holds anything else.

    Each value is compared with the bytes after the next name. Every JSON value shows where it ends, except a number,
    and what follows a number cannot belong to one. So each step leads from one member to the next. If the body ends
    after as many steps as there are names, no name occurs twice.
    """
    at, places = 0, Places()
    for name, value in members.items():
        found = _NAME.match(body, at)
        if found is None or not body.startswith(value, found.end()):
            return None
        at = found.end() + memoryview(value).nbytes
        places[name] = found.start(1), at
    return places if _END.match(body, at) else None


def decoded(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except UNREADABLE:
        return None  # the worker will reject it


def value_of(fields: Fields, name: str) -> Any:
    """None where it is missing, too."""
    return decoded(fields[name]) if name in fields else None


def members(raw: msgspec.Raw) -> Fields | None:
    try:
        return msgspec.json.decode(raw, type=Fields)
    except UNREADABLE:
        return None


def encoded(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


# -- numbers that Python's JSON has and JSON has not

_NUMBERS = (b"NaN", b"Infinity", b"-Infinity")
_STRING_OR_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*+"|-?(?:NaN|Infinity)', re.DOTALL)
_MARKS = {number: b'"%b"' % secrets.token_hex(16).encode() for number in _NUMBERS}


def without_nan(data: bytes) -> bytes | None:
    """The same with null in place of NaN and the infinities; None where there are none. Workers write them."""
    return _replaced(data, dict.fromkeys(_NUMBERS, b"null"))


def marked_nan(data: bytes) -> bytes | None:
    """As `without_nan`, with strings in their place that `unmarked_nan` finds again."""
    return _replaced(data, _MARKS)


def answer_as(body: bytes, kind: type[T]) -> T | None:
    """A worker's answer, with null for numbers that JSON has not; None for one that cannot be read so."""
    try:
        return msgspec.json.decode(without_nan(body) or body, type=kind)
    except UNREADABLE:
        return None


def unmarked_nan(data: bytes) -> bytes:
    for number, mark in _MARKS.items():
        data = data.replace(mark, number)
    return data


def _replaced(data: bytes, by: dict[bytes, bytes]) -> bytes | None:
    if b"NaN" not in data and b"Infinity" not in data:
        return None
    new = _STRING_OR_NUMBER.sub(lambda found: by.get(found[0], found[0]), data)
    return None if new == data else new


def given(fields: Fields, name: str) -> bool:
    return name in fields and fields[name] != NULL


def required(fields: Fields, name: str) -> msgspec.Raw:
    if not given(fields, name):
        raise RequestError(f"{name}: is missing", param=name)
    return fields[name]


def pruned(value: object) -> object:
    """Without what has no effect on a prompt: members that are null, and marks of caching."""
    if isinstance(value, dict):
        return {
            name: pruned(member) for name, member in value.items() if member is not None and name != "cache_control"
        }
    if isinstance(value, list):
        return [pruned(member) for member in value]
    return value
