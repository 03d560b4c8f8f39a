"""How much a body asks the proxy to look at, counted over its bytes before anything is decoded.

Hashing a prompt takes a microsecond or two for each message, part or tool call, and a body of 64 MB can hold millions
of them. Long texts cost little: what is inside of strings is not counted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import accumulate

import msgspec

from .. import plane
from ..errors import RequestError

DEPTH_LIMIT = 64
UNITS_LIMIT = 20_000
LIST_LIMIT = 1024  # prompts in one request: vLLM's own default (VLLM_MAX_COMPLETION_PROMPTS)
MEMBERS_LIMIT = 1_000_000
"""Of names, and of brackets, in a whole body: far more than the units that a body may have can need."""

_WEIGHTLESS = bytes(code for code in range(256) if code not in b",[{\\")
_KEPT = b'[]{}",:'
_DROPPED = bytes(code for code in range(256) if code not in _KEPT)
# The same where strings hold escapes: backslashes too, and the letters that may follow them, all written as `n`.
_FOLDED = bytes.maketrans(b"tbfru/", b"nnnnnn")
_DROPPED_BESIDE_ESCAPES = bytes(code for code in range(256) if code not in _KEPT + b"\\nbfrtu/")

_LAYERS = 8  # nearly all bodies with many brackets are less deep
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_STEPS = bytes.maketrans(b"[]", b"\x01\xff")  # +1 and -1 as signed bytes


def check_depth(body: bytes, limit: int) -> None:
    """RequestError if lists and objects are nested more than `limit` levels deep, the outermost included.

    Exact for JSON. Text that is not JSON may pass, as the decoder refuses it.
    """
    is_refused = plane.bones(body)[0] > limit if plane.IS_BUILT else is_deeper(body, limit)
    if is_refused:
        raise RequestError(f"the body is nested deeper than {limit} levels (json_depth_limit)")


def is_deeper(body: bytes, limit: int) -> bool:
    """What compiled code tells, for machines without it. No objects are made, and nothing recurses."""
    nest, layers = structure(body).translate(_BRACKETS, b",:"), min(_LAYERS, limit)
    for layer in range(layers):
        if nest.count(b"[") + layer <= limit:
            return False
        nest = nest.replace(b"[]", b"")  # removes the innermost level
    return limit - layers + 1 in accumulate(memoryview(nest.translate(_STEPS)).cast("b"))


def check_units(members: Iterable[msgspec.Raw], limit: int) -> None:
    """RequestError if the lists in these members have more than `limit` elements together, at any depth."""
    several = list(members)
    if sum(memoryview(member).nbytes for member in several) <= limit:  # nearly every body passes here
        return
    units = sum(map(_elements, several))
    if units > limit:
        raise RequestError(
            f"the request has {units} units (messages, parts, items, tool calls, tools); at most {limit} are allowed"
            " (request_units_limit)"
        )


def check_lists(prompt: msgspec.Raw) -> None:
    """RequestError if it is a list of more prompts than one request may have."""
    if memoryview(prompt).nbytes <= LIST_LIMIT:
        return
    text = bytes(prompt)
    if text.count(b"[") > LIST_LIMIT + 1 and structure(text).count(b"[") > LIST_LIMIT + 1:
        raise too_many_prompts()


def too_many_prompts() -> RequestError:
    return RequestError(f"prompt: must be a list of at most {LIST_LIMIT} prompts", param="prompt")


def prompt_bytes(prompt: object) -> tuple[str, bytes]:
    """The kind of prompt, and its bytes: UTF-8 of a text, four for each token id."""
    if isinstance(prompt, str):
        return "text", prompt.encode()
    if isinstance(prompt, list) and prompt:
        try:
            return "ids", struct.pack(f"<{len(prompt)}I", *prompt)
        except struct.error as exc:
            raise RequestError("prompt: token ids must be integers from 0 to 2**32 - 1", param="prompt") from exc
    raise RequestError("prompt: must be text, token ids, or a list of either, and not empty", param="prompt")


def weight(body: bytes) -> int:
    """At least as many as the body has units, other values and escapes, as its texts' commas count too.

    One pass over the bytes. Compiled code (`plane.bones`) counts without them.
    """
    return len(body.translate(None, _WEIGHTLESS))


def check_members(body: bytes) -> None:
    """RequestError for more names or brackets than any honest body has."""
    bones = structure(body)
    if bones.count(b":") > MEMBERS_LIMIT or bones.count(b"[") + bones.count(b"{") > MEMBERS_LIMIT:
        raise RequestError(f"the body has more than {MEMBERS_LIMIT} members, lists and objects")


def structure(data: bytes) -> bytes:
    """The brackets, commas and colons outside of strings."""
    if b"\\" in data:
        escaped = data.translate(_FOLDED, _DROPPED_BESIDE_ESCAPES)
        bones = escaped.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, b"\\n")
    else:
        bones = data.translate(None, _DROPPED)
    # Without empty strings, and strings with nothing kept inside, every other piece is inside of a string.
    return b"".join(bones.replace(b'""', b"").split(b'"')[::2])


def _elements(member: msgspec.Raw) -> int:
    """Of all lists; an empty list counts as one."""
    if plane.IS_BUILT:
        return plane.bones(member)[1]
    found = structure(bytes(member))
    return found.count(b",") - found.count(b",:") + found.count(b"[")
