"""What must not reach the client as the worker wrote it, and nothing else: an answer without an edit stays verbatim.

* Transfer parameters name internal addresses and blocks: always cut, wherever they are.
* Usage that only the proxy asked for.
* `cached_tokens` after a remote prefill: D counts all it pulled as cached, so P's count takes its place.
* An error that names the worker or what a handoff says of its peer: all of it.
"""

from __future__ import annotations

import msgspec

from .body_members import decoded, encoded, members
from .request import Endpoint, Fields

_TRANSFER = ("kv_transfer_params", "ec_transfer_params")
_NULL = msgspec.Raw(b"null")

# Where an event of a stream holds the object that is the body of an answer that is not streamed.
_INNER = {Endpoint.RESPONSES: "response", Endpoint.MESSAGES: "message"}


class Redaction(msgspec.Struct, frozen=True):
    """Names that no client may learn from a worker's error: the worker's address, and what a handoff says of P."""

    names: tuple[str, ...]

    def is_named(self, error: bytes) -> bool:
        return any(name.encode() in error for name in self.names)


class Edits(msgspec.Struct, frozen=True):
    hide_usage: bool = False  # of a stream whose client did not ask for usage
    cached_tokens: int | None = None  # prompt tokens that P found in its cache; None: D's count stands
    inside: Redaction | None = None  # None: an error goes on as it is

    def markers(self) -> tuple[bytes, ...]:
        """Bytes of which an object with something to edit holds at least one; in a string they would be escaped."""
        found = [b'_transfer_params"']
        if self.hide_usage:
            found.append(b'"usage"')
        if self.cached_tokens is not None:
            found += [b'"cached_tokens"', b'"cache_read_input_tokens"']
        return tuple(found)


class Dropped:
    """In place of an edited event: all of it was for the proxy."""


def edited_event(endpoint: Endpoint, data: bytes, edits: Edits) -> bytes | Dropped | None:
    """An event's data after the edits, None where none applies."""
    event = members(msgspec.Raw(data))
    if event is None:
        return None
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
    """An answer that is not streamed; its usage is part of it, asked for or not."""
    shown = Edits(cached_tokens=edits.cached_tokens)
    if not any(marker in body for marker in shown.markers()):
        return body
    answer = members(msgspec.Raw(body))
    if answer is None:
        return body
    return msgspec.json.encode(answer) if _edit(answer, shown) else body


def _is_usage_chunk(chunk: Fields) -> bool:
    return decoded(chunk.get("usage", _NULL)) is not None and decoded(chunk.get("choices", _NULL)) == []


def _edit(answer: Fields, edits: Edits) -> bool:
    """Edits an answer's members in place; True where that changed any. A null says nothing and stays."""
    is_changed = False
    for name in _TRANSFER:
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
    """Writes P's count where the worker gave one; a worker that does not report details keeps to that."""
    is_changed = False
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = members(usage.get(name, _NULL))
        if details is not None and decoded(details.get("cached_tokens", _NULL)) is not None:
            usage[name] = encoded({**details, "cached_tokens": cached_tokens})
            is_changed = True
    read = decoded(usage.get("cache_read_input_tokens", _NULL))
    fresh = decoded(usage.get("input_tokens", _NULL))
    if isinstance(read, int) and isinstance(fresh, int):
        # Here `input_tokens` counts what was not cached, and the two make up the prompt.
        usage["cache_read_input_tokens"] = encoded(cached_tokens)
        usage["input_tokens"] = encoded(max(0, fresh + read - cached_tokens))
        is_changed = True
    return is_changed
