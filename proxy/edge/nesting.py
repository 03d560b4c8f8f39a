"""How deep a JSON text is nested, found without decoding it: no object is made, and nothing recurses."""

from __future__ import annotations

from itertools import accumulate

from ..errors import RequestError

DEPTH_LIMIT = 64

# What bears on depth: brackets, what opens and ends strings, and what may stand behind a backslash, all as one letter.
_FOLDED = bytes.maketrans(b"[{]}tbfru/", b"[[]]nnnnnn")
_DROPPED = bytes(code for code in range(256) if code not in b'[]{}"\\nbfrtu/')
_LONG = 4096  # bytes from which on it pays to leap from bracket to bracket before anything is copied
_STEPS = bytes.maketrans(b"[]", b"\x01\xff")  # as signed bytes: one level down, one up


def check_depth(body: bytes, limit: int = DEPTH_LIMIT) -> None:
    """RequestError where lists and objects lie in each other more than `limit` levels deep, the outermost included.

    Exact for JSON; a text that is none may pass, as the decoder refuses it.
    """
    if len(body) > _LONG and not _opens_more(body, limit):
        return
    skeleton = body.translate(_FOLDED, _DROPPED)
    if skeleton.count(b"[") <= limit:  # those in strings included: nearly always decided here
        return
    strings_cut = skeleton.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    steps = b"".join(strings_cut).translate(_STEPS, b"\\n")
    if limit + 1 in accumulate(memoryview(steps).cast("b")):
        raise RequestError(f"the body is nested deeper than {limit} levels (json_depth_limit)")


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
