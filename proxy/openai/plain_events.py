"""Recognises, without decoding, stream events that differ from an earlier one in their text alone.

Nearly every event of a chat or a completion is like that: its bytes are those of the event before, except for a string
between two quotation marks. If that string holds no quotation mark, backslash or control character, the two events are
the same JSON with another text, and the text is exactly those bytes.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec

from ..errors import UNREADABLE
from .request import Endpoint
from .sse import event_data

ATTEMPTS = 8  # events to learn from; if none of them is plain text, the whole stream is decoded

_TEXTS = {Endpoint.CHAT: b'"content":', Endpoint.COMPLETIONS: b'"text":'}
_NAMES = frozenset(("id", "object", "created", "model", "choices", "system_fingerprint", "service_tier"))
_UNESCAPED = re.compile(rb'[^"\\\x00-\x1f]*')  # a JSON string's content without escapes
_ROLE = b'"role":"'  # in a string its quotation marks would be escaped
_HOLDERS = frozenset(("choices", "delta"))
_NOT_PLAIN = "\n"  # never a plain text, as a JSON string has to escape it
_DECODER = msgspec.json.Decoder()


class PlainEvents:
    """For one stream: `learn` is given decoded events, and `text` reads other events by their pattern.

    The pattern is taken from an event when it is first asked for, so the event itself need not wait for that.
    """

    __slots__ = ("_attempts", "_before", "_behind", "_name", "_sample")

    def __init__(self, endpoint: Endpoint) -> None:
        self._name = _TEXTS.get(endpoint, b"")
        self._attempts = ATTEMPTS if self._name else 0
        self._sample: bytes | None = None  # to learn from
        self._before = b""
        self._behind = b""

    @property
    def pattern(self) -> tuple[bytes, bytes] | None:
        """What stands before and behind the text of each plain event, once that is known."""
        if self._sample is not None:
            self._learn(self._sample)
        return (self._before, self._behind) if self._before else None

    @property
    def is_learning(self) -> bool:
        return self._attempts > 0

    def text(self, event: bytes) -> str | None:
        """The event's text if it brings nothing else; None if it must be decoded to know."""
        if self._sample is not None:
            self._learn(self._sample)
        before, behind = self._before, self._behind
        if not before or not event.startswith(before) or not event.endswith(behind):
            return None
        end = len(event) - len(behind)
        if _UNESCAPED.fullmatch(event, len(before), end) is None:
            return None
        try:
            return event[len(before) : end].decode()
        except UnicodeDecodeError:
            return None

    def learn(self, event: bytes) -> None:
        self._attempts -= 1
        self._sample = event

    def _learn(self, event: bytes) -> None:
        self._sample = None
        data = event_data(event)
        if data is None or not event.endswith(b"\n\n") or event.count(self._name) != 1:
            return
        if _ROLE in data:  # the first event of a chat: not decoded to see that
            return
        begin = event.find(b'"', event.index(self._name) + len(self._name)) + 1
        text = _UNESCAPED.match(event, begin)
        if text is not None and text[0] + event[text.end() : text.end() + 1] == _plain_text(data).encode() + b'"':
            self._attempts = 0
            self._before, self._behind = event[:begin], _shared(event[text.end() :])


@lru_cache(maxsize=64)
def _shared(behind: bytes) -> bytes:
    """One object for all streams in which the same stands behind the text."""
    return behind


def _plain_text(data: bytes) -> str:
    """The text of an event with one choice's text and nothing else that is observed or edited; else `_NOT_PLAIN`."""
    try:
        event: Any = _DECODER.decode(data)
    except UNREADABLE:
        return _NOT_PLAIN
    if not isinstance(event, dict) or not _only(event, _NAMES) or event.get("object") == "error":
        return _NOT_PLAIN
    match event.get("choices"):
        case [{"index": 0, "text": str(text)} as choice] if _only(choice, {"index", "text"}):
            return text
        case [{"index": 0, "delta": {"content": str(text)} as delta} as choice]:
            return text if _only(choice, {"index", "delta"}) and _only(delta, {"content"}) else _NOT_PLAIN
    return _NOT_PLAIN


def _only(members: dict[str, Any], names: frozenset[str] | set[str]) -> bool:
    """Whether all other members are null and those named hold no members of their own, except `_HOLDERS`."""
    for name, value in members.items():
        if name not in names:
            if value is not None:
                return False
        elif isinstance(value, (dict, list)) and name not in _HOLDERS:
            return False
    return True
