"""Conversations as text: ShareGPT's `conversations` (`from`, `value`), and OpenAI's `messages` (`role`, `content`).

A turn is the messages before an answer. The recorded answer is kept, because only it shows how long an answer should
be. Where no answers are recorded at all, each message by the user is a turn. Messages by the assistant that come first
are dropped, and so are messages without text.
"""

from __future__ import annotations

import msgspec

from .rows import Rows
from .turns import Message, TracedConversation, TracedTurn

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}


class _Part(msgspec.Struct):
    text: str | None = None


class _Said(msgspec.Struct):
    role: str | None = None
    by: str | None = msgspec.field(name="from", default=None)
    content: str | list[_Part | str] | None = None
    value: str | None = None

    def message(self) -> Message:
        role = self.role or self.by or "user"
        if isinstance(self.content, list):
            texts = (part if isinstance(part, str) else part.text for part in self.content)
            return Message(_ROLES.get(role, role), "\n".join(text for text in texts if text))
        return Message(_ROLES.get(role, role), self.content or self.value or "")


class _Dialogue(msgspec.Struct):
    id: str | int | None = None
    messages: list[_Said] | None = None
    conversations: list[_Said] | None = None


def read_dialogues(rows: Rows) -> list[TracedConversation]:
    found = []
    for number, (where, dialogue) in enumerate(rows.json(_Dialogue)):
        said = dialogue.messages if dialogue.messages is not None else dialogue.conversations
        if said is None:
            raise rows.error(where, "must have messages or conversations")
        turns = _turns([message for one in said if (message := one.message()).content])
        found.append(TracedConversation(str(number if dialogue.id is None else dialogue.id), None, turns))
    return found


def _turns(messages: list[Message]) -> tuple[TracedTurn, ...]:
    answered = any(message.role == "assistant" for message in messages)
    turns: list[TracedTurn] = []
    waiting: list[Message] = []
    for message in messages:
        if message.role == "assistant":
            if waiting:
                turns.append(TracedTurn(messages=tuple(waiting), reply=message.content))
                waiting = []
            continue
        waiting.append(message)
        if not answered and message.role == "user":
            turns.append(TracedTurn(messages=tuple(waiting)))
            waiting = []
    if answered and any(message.role == "user" for message in waiting):
        turns.append(TracedTurn(messages=tuple(waiting)))
    return tuple(turns)
