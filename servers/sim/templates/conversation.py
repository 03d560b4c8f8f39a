"""A conversation as every API gives it to a chat template: messages, tools, and the template's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..core.errors import BadRequest
from ..core.structured_text import CALL_ARGUMENTS, CALL_CLOSING, CALL_OPENING
from ..core.tokens import Tokenizer, digest_of_numbers, media_digest, media_tokens


@dataclass(frozen=True, slots=True)
class Media:
    """A picture or sound; equal contents have equal tokens."""

    digest: bytes


MEDIA_PARTS = frozenset(
    {
        *("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file", "document"),
        *("image_embeds", "audio_embeds", "video_embeds"),
    }
)


def media_of(part: Mapping[str, Any]) -> Media:
    """Of a part of any API: one content is the same item however it is written. BadRequest for strange metadata."""
    kind = part["type"]
    held = part.get(kind) or part.get("source") or part.get("image_url")
    if kind.endswith("_embeds") and isinstance(held, dict):
        if (digest := digest_of_numbers(held.get("image_grid_thw"))) is None:
            raise BadRequest(f"{kind}: image_grid_thw is not what an encoder tells.", "messages")
        return Media(digest)
    if isinstance(held, dict):
        held = held.get("url") or held.get("data") or held
    content = held.rpartition(";base64,")[2] if isinstance(held, str) else json_text(held, is_sorted=True)
    return Media(media_digest(content.encode()))


@dataclass(frozen=True, slots=True)
class Call:
    """arguments: JSON as text, or the value itself. No template here prints a call's id."""

    name: Any
    arguments: Any

    def text(self, *, parses: bool = False) -> str:
        """As the engine writes a call, so that its own is a prefix-cache hit on the next turn.

        parses: arguments are the same however their JSON is spaced, as vLLM hands them to real templates.
        """
        value = _parsed(self.arguments) if parses else self.arguments
        arguments = value if isinstance(value, str) else json_text(value)
        return f"{CALL_OPENING}{json_text(self.name)}{CALL_ARGUMENTS}{arguments}{CALL_CLOSING}"


Text = str | Media


@dataclass(frozen=True, slots=True)
class Result:
    """A tool's result within a user's message, as in Anthropic's API."""

    content: tuple[Text, ...]


Part = str | Media | Call | Result


@dataclass(slots=True)
class Message:
    """joins: an item of the Responses API, one message with the assistant's items before it."""

    role: str
    parts: list[Part]
    reasoning: str = ""
    joins: bool = False

    @property
    def content(self) -> list[Text]:
        return [part for part in self.parts if isinstance(part, str | Media)]

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """kwargs: chat_template_kwargs; thinks: whether the model is told to reason, None if it is not told.

    opens: end with the head of the assistant's turn; continues: end within the last message.
    """

    messages: list[Message]
    tools: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] | None = None
    thinks: bool | None = None
    opens: bool = True
    continues: bool = False


def encoded(pieces: Iterable[Text], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Text that is not parted by a picture is one text for the tokeniser."""
    tokens: list[int] = []
    text: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            text.append(piece)
            continue
        tokens += tokenizer.tokens("".join(text)) + media_tokens(piece.digest)
        text.clear()
    return tuple(tokens + tokenizer.tokens("".join(text)))


def json_text(value: Any, *, is_sorted: bool = False) -> str:
    return msgspec.json.encode(value, order="sorted" if is_sorted else None).decode()


def joined(messages: Iterable[Message]) -> list[Message]:
    """As vLLM hands them to a real template: items joined to messages, and each tool's result a message."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found and found[-1].role == "assistant" else None
        if message.joins and last is not None and not _clashes(last, message):
            last.parts += message.parts
            last.reasoning = last.reasoning or message.reasoning
            continue
        results = [Message("tool", list(part.content)) for part in message.parts if isinstance(part, Result)]
        found += results
        rest: list[Part] = [part for part in message.parts if not isinstance(part, Result)]
        if rest or not results:
            found.append(Message(_ROLES.get(message.role, message.role), rest, message.reasoning))
    return found


_ROLES = {"developer": "system", "function": "tool"}


def _clashes(last: Message, message: Message) -> bool:
    return bool((last.reasoning and message.reasoning) or (last.content and message.content))


def split_thoughts(message: Message) -> tuple[str, list[Text]]:
    """Reasoning and content; a client may have left the reasoning in the content, as the model wrote it."""
    content = message.content
    if message.reasoning or not content or not isinstance(content[0], str) or "</think>" not in content[0]:
        return message.reasoning, content
    thoughts, _, said = content[0].rpartition("</think>")
    return thoughts.rpartition("<think>")[2], [said, *content[1:]]


def stripped(content: list[Text]) -> list[Text]:
    """Without line ends around it."""
    content = list(content)
    for at, strip in ((0, str.lstrip), (-1, str.rstrip)):
        if content and isinstance(edge := content[at], str):
            content[at] = strip(edge, "\n")
    return content


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return arguments
    return value if isinstance(value, dict) else arguments


def last_user(messages: list[Message]) -> int:
    """The index of the last message of a user; -1 if there is none."""
    return max((at for at, message in enumerate(messages) if message.role == "user"), default=-1)
