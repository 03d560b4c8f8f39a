"""A JSON body's members: how deep they are nested, what they hold, and the body with some of them changed.

Unchanged members are sent on without being copied. `_positions` finds where each member lies without parsing its value
a second time. A body that two parsers could read differently, because a name occurs twice or is written with escapes,
is encoded anew, and so is every short body. So a worker never sees another request than the one that was routed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import msgspec

from ..errors import RequestError

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


# -- depth, without decoding: no objects are made, and nothing recurses

DEPTH_LIMIT = 64

_LONG = 4096  # bytes; above this, it pays to count brackets with `find` before anything is copied
_LAYERS = 8  # nearly all bodies with many brackets are less deep

# What decides the depth: brackets, and the quotation marks around strings.
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_DROPPED = bytes(code for code in range(256) if code not in b'[]{}"')
# The same where strings hold escapes: backslashes too, and the letters that may follow them, all written as `n`.
_FOLDED = bytes.maketrans(b"{}tbfru/", b"[]nnnnnn")
_DROPPED_BESIDE_ESCAPES = bytes(code for code in range(256) if code not in b'[]{}"\\nbfrtu/')
_STEPS = bytes.maketrans(b"[]", b"\x01\xff")  # +1 and -1 as signed bytes


def check_depth(body: bytes, limit: int = DEPTH_LIMIT) -> None:
    """RequestError if lists and objects are nested more than `limit` levels deep, the outermost included.

    Exact for JSON. Text that is not JSON may pass, as the decoder refuses it.
    """
    if len(body) > _LONG and not _opens_more_than(body, limit):
        return
    skeleton = _skeleton(body)
    if skeleton.count(b"[") <= limit:  # brackets in strings included; nearly every body passes here
        return
    # Two quotes in a row are an empty string, or the end of one string and the start of the next. Without them, every
    # bracket is still inside or outside of a string as before.
    nest = b"".join(skeleton.replace(b'""', b"").split(b'"')[::2])
    layers = min(_LAYERS, limit)
    for layer in range(layers):
        if nest.count(b"[") + layer <= limit:
            return
        nest = nest.replace(b"[]", b"")  # removes the innermost level
    if limit - layers + 1 in accumulate(memoryview(nest.translate(_STEPS)).cast("b")):
        raise RequestError(f"the body is nested deeper than {limit} levels (json_depth_limit)")


def _skeleton(body: bytes) -> bytes:
    """The body's brackets, braces written as such, and the quotation marks around its strings."""
    if b"\\" not in body:
        return body.translate(_BRACKETS, _DROPPED)
    escaped = body.translate(_FOLDED, _DROPPED_BESIDE_ESCAPES)
    return escaped.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, b"\\n")


def _opens_more_than(body: bytes, limit: int) -> bool:
    found = 0  # brackets in strings included
    for opener in (b"[", b"{"):
        at = body.find(opener)
        while at >= 0:
            found += 1
            if found > limit:
                return True
            at = body.find(opener, at + 1)
    return False
