"""Edits a worker's answer before it reaches the client; an answer that needs no edit stays verbatim.

* Transfer parameters are removed wherever they are: they name internal addresses and KV blocks. TensorRT-LLM's are in
  the choices.
* Usage, and token ids, that only the proxy asked for are removed.
* The leg's own id, which vLLM puts into the answer's `id`, is shortened where it holds workers' addresses (P2pNccl).
* `cached_tokens` after a remote prefill is replaced by P's count, as D counts all that it pulled as cached.
* An error that names the worker, or what a handoff says of P, is replaced as a whole.
* A whole answer of P's, where it is the client's, is made a stream for a client that wants one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from ..errors import UNREADABLE
from .body_members import NULL, decoded, encoded, given, marked_nan, members, unmarked_nan, value_of
from .request import Endpoint, Fields

_TRANSFER = ("kv_transfer_params", "ec_transfer_params")
_IN_CHOICES = "disaggregated_params"
_PROMPT = "prompt_token_ids"  # beside P's parameters
_IDS = (_PROMPT, "token_ids")  # in choices too

# The member of a stream's event that holds what is the whole body of an answer without streaming.
_INNER = {Endpoint.RESPONSES: "response", Endpoint.MESSAGES: "message"}


class Redaction(msgspec.Struct, frozen=True, gc=False):
    """What no client may learn from a worker's error."""

    address: str  # the worker's
    params: Collection[Any] = ()  # values of the handoff that it was given, as JSON; strings in them name P

    def applies_to(self, error: bytes) -> bool:
        names = [value for value in map(decoded, self.params) if isinstance(value, str) and value]
        return any(name.encode() in error for name in (self.address, *names))


class Edits(msgspec.Struct, frozen=True, gc=False):
    hide_usage: bool = False  # the client did not ask for usage in its stream
    cached_tokens: int | None = None  # prompt tokens that P found in its cache; None: D's count stands
    redaction: Redaction | None = None  # None: errors are passed on unchanged
    hide_token_ids: bool = False  # the client did not ask for them
    hides: tuple[str, str] | None = None  # the leg's id, and what the client sees of it; None: all

    def markers(self) -> tuple[bytes, ...]:
        """An object to edit holds at least one of these byte strings; inside a JSON string they would be escaped."""
        return _markers(self.hide_usage, self.hide_token_ids, self.cached_tokens is not None)

    def shown(self, data: bytes) -> bytes:
        """With no more of the leg's id than the client may see."""
        return data if self.hides is None else data.replace(self.hides[0].encode(), self.hides[1].encode())


@lru_cache(maxsize=512)
def edits_of(redaction: Redaction, *, hide_usage: bool, hide_token_ids: bool) -> Edits:
    """Where nothing but the redaction is the turn's own: one object for all answers of a worker."""
    return Edits(hide_usage=hide_usage, redaction=redaction, hide_token_ids=hide_token_ids)


@lru_cache
def _markers(hides_usage: bool, hides_token_ids: bool, recounts: bool) -> tuple[bytes, ...]:
    found = [b'_transfer_params"', b'"disaggregated_params"']
    if hides_usage:
        found.append(b'"usage"')
    if hides_token_ids:
        found.append(b'token_ids"')
    if recounts:
        found += [b'"cached_tokens"', b'"cache_read_input_tokens"']
    return tuple(found)


_TOKEN_IDS = re.compile(rb',"token_ids":\[((?:[0-9]{1,9},)*[0-9]{1,9}|)\]')


def parted(event: bytes) -> tuple[bytes, list[int]] | None:
    """An event without the ids of its tokens, and these; None where they are not in one place.

    In a string the name's quotation marks would be escaped.
    """
    found = _TOKEN_IDS.search(event)
    if found is None or event.find(b'"token_ids"', found.end()) >= 0:
        return None
    ids = found[1]
    return event[: found.start()] + event[found.end() :], list(map(int, ids.split(b","))) if ids else []


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
    body = edits.shown(body)
    # A whole answer shows usage, asked for or not.
    for marker in _markers(False, edits.hide_token_ids, edits.cached_tokens is not None):
        if marker in body:
            break
    else:  # nearly always
        return body
    answer = members(msgspec.Raw(body))
    if answer is None:
        marked = marked_nan(body)
        return body if marked is None else unmarked_nan(edited_body(marked, edits))
    shown = Edits(cached_tokens=edits.cached_tokens, hide_token_ids=edits.hide_token_ids)
    return msgspec.json.encode(answer) if _edit(answer, shown) else body


def finished_body(body: bytes, *, stream: bool, usage: bool) -> bytes:
    """What the client of a chat or completion gets of an answer that P has given whole; usage: in a stream too."""
    marked = marked_nan(body)
    answer = members(msgspec.Raw(body if marked is None else marked)) or {}
    answer.pop(_PROMPT, None)
    _edit(answer, Edits())
    new = b"".join(_events(answer, usage=usage)) if stream else msgspec.json.encode(answer)
    return new if marked is None else unmarked_nan(new)


def _events(answer: Fields, *, usage: bool) -> Iterator[bytes]:
    """The text in one event, the reason for its end in the next, as engines stream a single token."""
    counted, choices = answer.pop("usage", NULL), _choices(answer)
    if value_of(answer, "object") == "chat.completion":
        answer["object"] = encoded("chat.completion.chunk")
    texts, ends = [], []
    for choice in choices:
        ended = {name: choice.pop(name) for name in ("finish_reason", "stop_reason") if name in choice}
        empty: Fields = {"index": choice.get("index", encoded(0))}
        if "message" in choice:
            choice["delta"] = _delta(choice.pop("message"))
            empty["delta"] = encoded({})
        else:
            empty["text"] = encoded("")
        texts.append({**choice, "finish_reason": NULL})
        ends.append(empty | ended)
    for part in (texts, ends):
        yield _event(msgspec.json.encode({**answer, "choices": part}))
    if usage:
        yield _event(msgspec.json.encode({**answer, "choices": [], "usage": counted}))
    yield _event(b"[DONE]")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _delta(message: msgspec.Raw) -> msgspec.Raw:
    """In a stream tool calls have an index."""
    delta = members(message) or {}
    calls = value_of(delta, "tool_calls")
    if isinstance(calls, list):
        delta["tool_calls"] = encoded([{"index": place, **call} for place, call in enumerate(calls)])
    return encoded(delta)


def _is_usage_chunk(chunk: Fields) -> bool:
    return value_of(chunk, "usage") is not None and value_of(chunk, "choices") == []


def _edit(answer: Fields, edits: Edits) -> bool:
    is_changed = False
    for name in _TRANSFER:  # a null member stays
        if given(answer, name):
            del answer[name]
            is_changed = True
    hidden = (_IN_CHOICES, *_IDS) if edits.hide_token_ids else (_IN_CHOICES,)
    if edits.hide_token_ids and given(answer, _PROMPT):
        del answer[_PROMPT]
        is_changed = True
    is_changed = _without_in_choices(answer, hidden) or is_changed
    usage = members(answer.get("usage", NULL))
    if usage is None:
        return is_changed
    if edits.hide_usage:
        del answer["usage"]
        return True
    if edits.cached_tokens is not None and _recount(usage, edits.cached_tokens):
        answer["usage"] = encoded(usage)
        return True
    return is_changed


def _without_in_choices(answer: Fields, names: Sequence[str]) -> bool:
    raw = bytes(answer.get("choices", NULL))
    if not any(name.encode() in raw for name in names):
        return False
    choices = _choices(answer)
    marked = [(choice, name) for choice in choices for name in names if given(choice, name)]
    for choice, name in marked:
        del choice[name]
    if marked:
        answer["choices"] = encoded(choices)
    return bool(marked)


def _choices(answer: Fields) -> list[Fields]:
    try:
        return msgspec.json.decode(answer.get("choices", NULL), type=list[Fields])
    except UNREADABLE:
        return []


def _recount(usage: Fields, cached_tokens: int) -> bool:
    is_changed = False  # and stays so where the worker reports no details: none are added
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = members(usage.get(name, NULL))
        if details is not None and value_of(details, "cached_tokens") is not None:
            usage[name] = encoded({**details, "cached_tokens": cached_tokens})
            is_changed = True
    read = value_of(usage, "cache_read_input_tokens")
    fresh = value_of(usage, "input_tokens")
    if isinstance(read, int) and isinstance(fresh, int):
        # In Messages `input_tokens` excludes cached tokens; the two add up to the prompt.
        usage["cache_read_input_tokens"] = encoded(cached_tokens)
        usage["input_tokens"] = encoded(max(0, fresh + read - cached_tokens))
        is_changed = True
    return is_changed
