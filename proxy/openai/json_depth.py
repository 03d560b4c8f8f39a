"""How deep a JSON text is nested, found without decoding it: no object is made, and nothing recurses."""

from __future__ import annotations

from itertools import accumulate

from ..errors import RequestError

DEPTH_LIMIT = 64

_LONG = 4096  # bytes from which on it pays to leap from bracket to bracket before anything is copied
_LAYERS = 8  # deeper than nearly all that has many brackets

# What bears on depth: brackets, and what opens and ends strings.
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_DROPPED = bytes(code for code in range(256) if code not in b'[]{}"')
# The same where strings hold escapes: backslashes too, and what may stand behind them, all as one letter.
_FOLDED = bytes.maketrans(b"{}tbfru/", b"[]nnnnnn")
_DROPPED_BESIDE_ESCAPES = bytes(code for code in range(256) if code not in b'[]{}"\\nbfrtu/')
_STEPS = bytes.maketrans(b"[]", b"\x01\xff")  # as signed bytes: one level down, one up


def check_depth(body: bytes, limit: int = DEPTH_LIMIT) -> None:
    """RequestError where lists and objects lie in each other more than `limit` levels deep, the outermost included.

    Exact for JSON; a text that is none may pass, as the decoder refuses it.
    """
    if len(body) > _LONG and not _opens_more(body, limit):
        return
    skeleton = _skeleton(body)
    if skeleton.count(b"[") <= limit:  # those in strings included: nearly always decided here
        return
    # Two quotes that meet end one string and begin the next, or hold an empty one: what is inside stays inside.
    nest = b"".join(skeleton.replace(b'""', b"").split(b'"')[::2])
    layers = min(_LAYERS, limit)
    for layer in range(layers):
        if nest.count(b"[") + layer <= limit:
            return
        nest = nest.replace(b"[]", b"")  # the innermost: what holds them is one level less deep
    if limit - layers + 1 in accumulate(memoryview(nest.translate(_STEPS)).cast("b")):
        raise RequestError(f"the body is nested deeper than {limit} levels (json_depth_limit)")


def _skeleton(body: bytes) -> bytes:
    """Its brackets, and the quotes around its strings."""
    if b"\\" not in body:
        return body.translate(_BRACKETS, _DROPPED)
    escaped = body.translate(_FOLDED, _DROPPED_BESIDE_ESCAPES)
    return escaped.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, b"\\n")


def _opens_more(body: bytes, limit: int) -> bool:
    """Whether more than so many lists and objects open in all, those in strings included."""
    found = 0
    for opener in (b"[", b"{"):
        at = body.find(opener)
        while at >= 0:
            found += 1
            if found > limit:
                return True
            at = body.find(opener, at + 1)
    return False
