"""Events of a stream that differ from one seen before in their text alone, recognised without decoding them.

Nearly every event of a chat or a completion is such a one: its bytes are those of the event before, but for a string
between two quotation marks. Where what lies between them holds no quotation mark, backslash or control character, the
two events are the same JSON with another text in it, and the text is those bytes as they stand.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from .request import Endpoint
from .sse import event_data

ATTEMPTS = 8  # events that are looked at; a stream whose first ones are all of another kind is decoded to its end

_TEXTS = {Endpoint.CHAT: b'"content":', Endpoint.COMPLETIONS: b'"text":'}
_NAMES = frozenset(("id", "object", "created", "model", "choices", "system_fingerprint", "service_tier"))
_AS_IT_STANDS = re.compile(rb'[^"\\\x00-\x1f]*')  # of a JSON string: what needs no escape, and is none
_HOLDERS = frozenset(("choices", "delta"))
_NONE = "\n"
_DECODER = msgspec.json.Decoder()


class PlainEvents:
    """Of one stream. `learn` from events that were decoded, then `text` of others."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._name = _TEXTS.get(endpoint, b"")
        self._attempts = ATTEMPTS if self._name else 0
        self._before = b""
        self._behind = b""

    @property
    def is_learning(self) -> bool:
        return self._attempts > 0

    def text(self, event: bytes) -> str | None:
        """The text that is all that this event brings; None where it must be decoded to know."""
        before, behind = self._before, self._behind
        if not before or not event.startswith(before) or not event.endswith(behind):
            return None
        end = len(event) - len(behind)
        if _AS_IT_STANDS.fullmatch(event, len(before), end) is None:
            return None
        try:
            return event[len(before) : end].decode()
        except UnicodeDecodeError:
            return None

    def learn(self, event: bytes) -> None:
        """Takes this event as the pattern of others if it brings text and nothing else."""
        self._attempts -= 1
        data = event_data(event)
        if data is None or not event.endswith(b"\n\n") or event.count(self._name) != 1:
            return
        begin = event.find(b'"', event.index(self._name) + len(self._name)) + 1
        text = _AS_IT_STANDS.match(event, begin)
        if text is not None and text[0] + event[text.end() : text.end() + 1] == _plain_text(data).encode() + b'"':
            self._attempts = 0
            self._before, self._behind = event[:begin], event[text.end() :]


def _plain_text(data: bytes) -> str:
    """The text of an event that is one choice's text, with nothing beside it that an observer or an edit would look at;
    a lone line end, which no pattern has, for any other event."""
    try:
        event: Any = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _NONE
    if not isinstance(event, dict) or not _only(event, _NAMES) or event.get("object") == "error":
        return _NONE
    match event.get("choices"):
        case [{"index": 0, "text": str(text)} as choice] if _only(choice, {"index", "text"}):
            return text
        case [{"index": 0, "delta": {"content": str(text)} as delta} as choice]:
            return text if _only(choice, {"index", "delta"}) and _only(delta, {"content"}) else _NONE
    return _NONE


def _only(members: dict[str, Any], names: frozenset[str] | set[str]) -> bool:
    """Whether all other members are null, and, but for those that hold the text, none holds members of its own."""
    return all(
        (value is None if name not in names else name in _HOLDERS or not isinstance(value, (dict, list)))
        for name, value in members.items()
    )
