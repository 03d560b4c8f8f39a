"""Edits a worker's answer before it reaches the client; an answer that needs no edit stays verbatim.

* Transfer parameters are removed wherever they are: they name internal addresses and KV blocks.
* Usage that only the proxy asked for is removed.
* `cached_tokens` after a remote prefill is replaced by P's count, as D counts all that it pulled as cached.
* An error that names the worker, or what a handoff says of P, is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from .body_members import decoded, encoded, marked_nan, members, unmarked_nan
from .request import Endpoint, Fields

_TRANSFER = ("kv_transfer_params", "ec_transfer_params")
_NULL = msgspec.Raw(b"null")

# The member of a stream's event that holds what is the whole body of an answer without streaming.
_INNER = {Endpoint.RESPONSES: "response", Endpoint.MESSAGES: "message"}


class Redaction(msgspec.Struct, frozen=True):
    """What no client may learn from a worker's error."""

    address: str  # the worker's
    params: Collection[Any] = ()  # values of the handoff that it was given, as JSON; strings in them name P

    def applies_to(self, error: bytes) -> bool:
        names = [value for value in map(decoded, self.params) if isinstance(value, str) and value]
        return any(name.encode() in error for name in (self.address, *names))


class Edits(msgspec.Struct, frozen=True):
    hide_usage: bool = False  # the client did not ask for usage in its stream
    cached_tokens: int | None = None  # prompt tokens that P found in its cache; None: D's count stands
    redaction: Redaction | None = None  # None: errors are passed on unchanged

    def markers(self) -> tuple[bytes, ...]:
        """An object to edit holds at least one of these byte strings; inside a JSON string they would be escaped."""
        found = [b'_transfer_params"']
        if self.hide_usage:
            found.append(b'"usage"')
        if self.cached_tokens is not None:
            found += [b'"cached_tokens"', b'"cache_read_input_tokens"']
        return tuple(found)


class Dropped:
    """The result of editing an event that was only for the proxy."""


def edited_event(endpoint: Endpoint, data: bytes, edits: Edits) -> bytes | Dropped | None:
    event = members(msgspec.Raw(data))
    if event is None:
        marked = marked_nan(data)
        new = None if marked is None else edited_event(endpoint, marked, edits)
        return unmarked_nan(new) if isinstance(new, bytes) else new
    if edits.hide_usage and _is_usage_chunk(event):
        return Dropped()
    is_changed = _edit(event, edits)
    name = _INNER.get(endpoint)
    inner = members(event[name]) if name in event else None
    if name is not None and inner is not None and _edit(inner, edits):
        event[name] = encoded(inner)
        is_changed = True
    return msgspec.json.encode(event) if is_changed else None


def edited_body(body: bytes, edits: Edits) -> bytes:
    shown = Edits(cached_tokens=edits.cached_tokens)  # a whole answer shows usage, asked for or not
    if not any(marker in body for marker in shown.markers()):
        return body
    answer = members(msgspec.Raw(body))
    if answer is None:
        marked = marked_nan(body)
        return body if marked is None else unmarked_nan(edited_body(marked, edits))
    return msgspec.json.encode(answer) if _edit(answer, shown) else body


def _is_usage_chunk(chunk: Fields) -> bool:
    return decoded(chunk.get("usage", _NULL)) is not None and decoded(chunk.get("choices", _NULL)) == []


def _edit(answer: Fields, edits: Edits) -> bool:
    is_changed = False
    for name in _TRANSFER:  # a null member stays
        if answer.get(name, _NULL) != _NULL:
            del answer[name]
            is_changed = True
    usage = members(answer.get("usage", _NULL))
    if usage is None:
        return is_changed
    if edits.hide_usage:
        del answer["usage"]
        return True
    if edits.cached_tokens is not None and _recount(usage, edits.cached_tokens):
        answer["usage"] = encoded(usage)
        return True
    return is_changed


def _recount(usage: Fields, cached_tokens: int) -> bool:
    is_changed = False  # and stays so where the worker reports no details: none are added
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = members(usage.get(name, _NULL))
        if details is not None and decoded(details.get("cached_tokens", _NULL)) is not None:
            usage[name] = encoded({**details, "cached_tokens": cached_tokens})
            is_changed = True
    read = decoded(usage.get("cache_read_input_tokens", _NULL))
    fresh = decoded(usage.get("input_tokens", _NULL))
    if isinstance(read, int) and isinstance(fresh, int):
        # In Messages `input_tokens` excludes cached tokens; the two add up to the prompt.
        usage["cache_read_input_tokens"] = encoded(cached_tokens)
        usage["input_tokens"] = encoded(max(0, fresh + read - cached_tokens))
        is_changed = True
    return is_changed
