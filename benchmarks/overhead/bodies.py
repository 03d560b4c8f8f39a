"""The requests that the load generator sends. Their histories hold the mock backend's answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

# As in native/marks.h. The load generator writes a conversation's number over the zeros.
MARK = "conversation-" + 12 * "0"
WORD = "tide "
MODEL = "mock"
_SYSTEM = "You are a harbour master's assistant. Answer briefly, and say so when you do not know."
_TEXT = (
    "The copper lamp by the north stone was lit again last night, and the engine of the pilot boat ran until the tide "
    "turned. Please look through the log of the winter signals and tell me which of them were answered. "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """The turns of a conversation, which differ only in their history; `words` is the length of every answer."""

    turns: int = 8
    words: int = 16
    opening_bytes: int = 1000  # of the first turn's history, roughly
    message_bytes: int = 4000  # at most, of one message in it
    question_bytes: int = 150
    streams: bool = False
    first_us: int = 0  # until the first word of a stream
    every_us: int = 0  # between two of its words


def opening(conversation: ChatShape) -> bytes:
    """The first turn, not streamed: it is asked before the measured span."""
    return _body(conversation, _history(conversation, 0), streams=False)


def follow_ups(conversation: ChatShape) -> bytes:
    return b"".join(
        _body(conversation, _history(conversation, turn), streams=conversation.streams)
        for turn in range(1, conversation.turns)
    )


def _body(conversation: ChatShape, messages: list[dict[str, str]], *, streams: bool) -> bytes:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": conversation.words, "temperature": 0.7, "messages": messages}
    return msgspec.json.encode(body | {"stream": True} if streams else body) + b"\n"


def _history(conversation: ChatShape, turn: int) -> list[dict[str, str]]:
    past = max(1, round(conversation.opening_bytes / conversation.message_bytes)) | 1  # odd: the user's is last
    size = conversation.opening_bytes // past
    orders = f"{MARK} first={conversation.first_us}us every={conversation.every_us}us. "
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _text(orders, size)}]
    for number in range(1, past):
        message = _text(f"Part {number}: ", size)
        messages.append({"role": "assistant" if number % 2 else "user", "content": message})
    for number in range(turn):
        messages.append({"role": "assistant", "content": WORD * conversation.words})
        messages.append({"role": "user", "content": _text(f"Question {number}: ", conversation.question_bytes)})
    return messages


def _text(beginning: str, size: int) -> str:
    return (beginning + _TEXT * (size // len(_TEXT) + 1))[:size]
