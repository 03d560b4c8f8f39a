"""A body again as its own bytes, with members put in, replaced or left out; what stays is not copied.

Where the members stand is found without parsing their values a second time (`_places`). A body that could be read in
two ways, with a name that is there twice or is written with escapes, has no such places: its members are written anew,
as all of a short body are, so that a worker never sees another request than the one that was routed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

Fields = dict[str, msgspec.Raw]
Part = bytes | memoryview

SHORT_BYTES = 16_384
"""Up to here writing the members anew takes no longer than finding their places, about 5 us."""

_MOST_MEMBERS = 256  # a microsecond each: more are no client library's

# The decoder has taken the whole for JSON, so nothing else than a brace or a comma can stand before a name.
_NAME = re.compile(rb'[ \t\n\r]*[{,][ \t\n\r]*("[^"\\]*"[ \t\n\r]*:[ \t\n\r]*)')
_END = re.compile(rb"[ \t\n\r]*\}")


class Members(Fields):
    """A body's members, each value verbatim, and the body itself; never changed, as what is sent starts as a copy."""

    __slots__ = ("body",)

    def __init__(self, fields: Fields, body: bytes) -> None:
        super().__init__(fields)
        self.body = body


def spliced(fields: Fields, original: Fields) -> tuple[Part, ...]:
    """The JSON of `fields` in pieces; a value that is the same object in both is taken from the original's body."""
    places = _places(original) if isinstance(original, Members) else None
    if places is None:
        return (msgspec.json.encode(fields),)
    assert isinstance(original, Members), "it has places"
    if len(fields) == len(original) and all(fields.get(name) is value for name, value in original.items()):
        return (original.body,)
    view, parts = memoryview(original.body), list[Part]((b"{",))
    for start, end in _stretches(fields, original, places):
        parts += (view[start:end], b",")
    others = {name: value for name, value in fields.items() if original.get(name) is not value}
    if others:
        parts.append(msgspec.json.encode(others)[1:])
    else:
        parts[-1] = b"}" if len(parts) > 1 else b"{}"
    return tuple(parts)


def _stretches(fields: Fields, original: Fields, places: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """From where to where the body stays as it is: members that follow each other go on together."""
    start = end = 0
    for (name, value), place in zip(original.items(), places, strict=True):
        if fields.get(name) is value:
            start, end = start or place[0], place[1]
        elif start:
            yield start, end
            start = 0
    if start:
        yield start, end


def _places(members: Members) -> list[tuple[int, int]] | None:
    """From each member's name to the end of its value; None where the body is not just these, one after the other.

    Each value is compared with what stands behind the next name. A JSON value shows its own end, all but a number, and
    that is followed by what no number holds; so each step leads from one member to the next, and at the end after as
    many steps as there are names, no name was there twice.
    """
    body, at = members.body, 0
    if len(body) <= SHORT_BYTES or len(members) > _MOST_MEMBERS:
        return None
    places = list[tuple[int, int]]()
    for value in members.values():
        found = _NAME.match(body, at)
        if found is None or not body.startswith(value, found.end()):
            return None
        at = found.end() + memoryview(value).nbytes
        places.append((found.start(1), at))
    return places if _END.match(body, at) else None


def decoded(raw: msgspec.Raw) -> Any:
    """A member's value, None where it is no JSON (the worker will say so)."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def members(raw: msgspec.Raw) -> Fields | None:
    """An object's members, each verbatim; None where the value is no object."""
    try:
        return msgspec.json.decode(raw, type=Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def encoded(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
