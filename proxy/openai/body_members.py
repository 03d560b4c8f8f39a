"""Edits a JSON body member by member, without copying the members that stay.

The bytes of unchanged members are reused. `_positions` finds where each member lies without parsing its value a second
time. A body that two parsers could read differently, because a name occurs twice or is written with escapes, is encoded
anew, and so is every short body. So a worker never sees another request than the one that was routed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

Fields = dict[str, msgspec.Raw]
Part = bytes | memoryview

SHORT_BYTES = 16_384
"""Up to this size, encoding the members anew takes no longer than finding their positions: about 5 us."""

_MOST_MEMBERS = 256  # a microsecond each; no client library sends more

# The body has already been decoded as JSON, so only a brace or a comma can come before a name.
_NAME = re.compile(rb'[ \t\n\r]*[{,][ \t\n\r]*("[^"\\]*"[ \t\n\r]*:[ \t\n\r]*)')
_END = re.compile(rb"[ \t\n\r]*\}")


class Members(Fields):
    """A body's members, each value verbatim, and the body itself. Never changed: edits are made on a copy."""

    __slots__ = ("body",)

    def __init__(self, fields: Fields, body: bytes) -> None:
        super().__init__(fields)
        self.body = body


def spliced(fields: Fields, original: Fields) -> tuple[Part, ...]:
    """The JSON of `fields` in pieces. A value that is the same object in both is not copied from the original body."""
    positions = _positions(original) if isinstance(original, Members) else None
    if positions is None:
        return (msgspec.json.encode(fields),)
    assert isinstance(original, Members), "it has positions"
    if len(fields) == len(original) and all(fields.get(name) is value for name, value in original.items()):
        return (original.body,)
    view, parts = memoryview(original.body), list[Part]((b"{",))
    for start, end in _unchanged_ranges(fields, original, positions):
        parts += (view[start:end], b",")
    others = {name: value for name, value in fields.items() if original.get(name) is not value}
    if others:
        parts.append(msgspec.json.encode(others)[1:])
    else:
        parts[-1] = b"}" if len(parts) > 1 else b"{}"
    return tuple(parts)


def _unchanged_ranges(fields: Fields, original: Fields, positions: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start = end = 0  # of a run of unchanged members
    for (name, value), position in zip(original.items(), positions, strict=True):
        if fields.get(name) is value:
            start, end = start or position[0], position[1]
        elif start:
            yield start, end
            start = 0
    if start:
        yield start, end


def _positions(members: Members) -> list[tuple[int, int]] | None:
    """Start of each member's name and end of its value; None where the body holds anything else.

    Each value is compared with the bytes after the next name. Every JSON value shows where it ends, except a number,
    and what follows a number cannot belong to one. So each step leads from one member to the next. If the body ends
    after as many steps as there are names, no name occurs twice.
    """
    body, at = members.body, 0
    if len(body) <= SHORT_BYTES or len(members) > _MOST_MEMBERS:
        return None
    positions = list[tuple[int, int]]()
    for value in members.values():
        found = _NAME.match(body, at)
        if found is None or not body.startswith(value, found.end()):
            return None
        at = found.end() + memoryview(value).nbytes
        positions.append((found.start(1), at))
    return positions if _END.match(body, at) else None


def decoded(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the worker will reject it


def members(raw: msgspec.Raw) -> Fields | None:
    try:
        return msgspec.json.decode(raw, type=Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def encoded(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
