"""Typed JSON of prompts: only the members that are hashed, and what their contents are.

OpenAI's and Anthropic's shapes as vLLM takes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.json import Decoder, Encoder

from ... import plane
from ...errors import RequestError
from ...media.items import UUID, media_type
from ..body_members import pruned

if TYPE_CHECKING:
    from typing import TypeAlias

    Message: TypeAlias = "PromptMessage | plane.PlainMessage | plane.FoundMessage"
    WholeMessage: TypeAlias = "PromptMessage | plane.PlainMessage"

Members = dict[str, msgspec.Raw]
Content = str | list[str | Members] | None
T = TypeVar("T")

ABSENT = msgspec.Raw(b"")
_TEXT = frozenset(("text", "input_text", "output_text"))
_SHOWN = frozenset(("reasoning", "thinking"))
REASONING = _SHOWN | {"redacted_thinking"}
BILLING = "x-anthropic-billing-header"
"""How a line begins that differs in every request of a client. vLLM drops it from what the system says, and of a block
of Messages the rest of that text too."""
_NO_TEXT = frozenset((b"", b"null", b'""'))


class PromptFunction(msgspec.Struct):
    name: str | None = None
    arguments: msgspec.Raw = ABSENT
    input: msgspec.Raw = ABSENT  # what a custom tool has instead


class PromptCall(msgspec.Struct):
    id: str | None = None
    function: PromptFunction | None = None
    custom: PromptFunction | None = None


class PromptMessage(msgspec.Struct, kw_only=True):
    role: str
    content: Content = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[PromptCall] | None = None
    function_call: PromptFunction | None = None
    reasoning: msgspec.Raw = ABSENT
    reasoning_content: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    task: msgspec.Raw = ABSENT

    @property
    def rendered(self) -> dict[str, bytes]:
        """What vLLM's renderers take from a message besides what it says, in one form; tools from a developer's alone.

        Source: `renderers/chat_utils.py` of vLLM 0.32, for DeepSeek's models.
        """
        if self.tools is self.task is ABSENT:
            return {}
        found = {"tools": self.tools if self.role == "developer" else ABSENT, "task": self.task}
        return {name: said for name, raw in found.items() if bytes(raw) and (said := canonical(name, bytes(raw)))}

    @property
    def utf8(self) -> bytes | None:
        """Its text, if it is one and nothing else."""
        content = self.content
        if type(content) is not str or self.tool_calls or self.function_call or self.rendered:
            return None
        return content.encode("utf-8", "surrogatepass")


CANONICAL = Encoder(order="deterministic")
ANY: Decoder[object] = Decoder(object)
LIST: Decoder[list[object]] = Decoder(list[object])
STRING: Decoder[str | None] = Decoder(str | None)
FLAG: Decoder[bool | None] = Decoder(bool | None)
CONTENT: Decoder[Content] = Decoder(Content)
MESSAGE: Decoder[PromptMessage] = Decoder(PromptMessage)
MESSAGES: Decoder[list[PromptMessage]] = Decoder(list[PromptMessage])
MEMBERS: Decoder[Members] = Decoder(Members)
ITEMS: Decoder[str | list[Members]] = Decoder(str | list[Members])
PROMPT: Decoder[str | list[int | str | list[int]] | None] = Decoder(str | list[int | str | list[int]] | None)


def read(decoder: Decoder[T], raw: msgspec.Raw, name: str) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RequestError(f"{name}: {exc}", param=name) from exc


def is_by_user(content: Content) -> bool:
    """Whether it is more than results of tools, which Anthropic's clients send in the user's name."""
    if not content or not isinstance(content, list):
        return True
    return any(isinstance(part, str) or string(part, "type") != "tool_result" for part in content)


def comes_with_reasoning(reply: PromptMessage) -> bool:
    if any(bytes(raw) not in _NO_TEXT for raw in (reply.reasoning, reply.reasoning_content)):
        return True
    parts = reply.content if isinstance(reply.content, list) else ()
    return any(not isinstance(part, str) and string(part, "type") in _SHOWN for part in parts)


def first_user_text(raw: msgspec.Raw, name: str) -> str | None:
    items = read(ITEMS, raw, name)
    if isinstance(items, str):
        return items
    for item in items:
        if string(item, "role") == "user":
            content = content_of(item, "content")
            if isinstance(content, str):
                return content
            return "\n".join(text for part in content or () if (text := part_text(part)))
    return None


def part_text(part: str | Members) -> str | None:
    """The text of a text part, "" for reasoning, None for any other part."""
    if isinstance(part, str):
        return part
    if UUID in part:  # it may be media, whatever its type says
        return None
    kind = string(part, "type")
    if kind in REASONING:
        return ""
    if kind in _TEXT or (kind is None and "text" in part and media_type(part) is None):
        return string(part, "text") or ""
    return None


def texts(content: Content, *, system: bool = False) -> list[str]:
    """Of content that is nothing but texts and reasoning; else none. system: whether the system says it."""
    found = [content] if isinstance(content, str) else [part_text(part) for part in content or ()]
    said = [] if None in found else [text for text in found if text]
    return [rest for text in said if (rest := without_billing(text))] if system else said


def without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def first_text(content: Content) -> str:
    """The text that content begins with, if it does."""
    if not isinstance(content, list):
        return content or ""
    return part_text(content[0]) or "" if content else ""


def only_text(reply: WholeMessage) -> str:
    """All that it says, if it is nothing but text."""
    return "" if reply.tool_calls or reply.function_call else "".join(texts(reply.content))


def string(members: Members, name: str) -> str | None:
    return read(STRING, members[name], name) if name in members else None


def content_of(members: Members, name: str) -> Content:
    return read(CONTENT, members[name], name) if name in members else None


def canonical(name: str, raw: bytes) -> bytes:
    """A member's value in one form; empty where it renders to nothing."""
    value = pruned(read(ANY, msgspec.Raw(raw), name))
    return b"" if value is None or value in ([], {}) else CANONICAL.encode(value)


def canonical_items(raw: bytes) -> list[bytes]:
    return [CANONICAL.encode(pruned(one)) for one in read(LIST, msgspec.Raw(raw), "tools")]
