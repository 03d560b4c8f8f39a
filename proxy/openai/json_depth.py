"""Checks how deep a JSON body is nested without decoding it: no objects are made, and nothing recurses."""

from __future__ import annotations

from itertools import accumulate

from ..errors import RequestError

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
