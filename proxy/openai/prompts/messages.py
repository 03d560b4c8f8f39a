"""The messages and items of a prompt, as they are found: plain, known by an earlier prompt, or decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from ... import plane
from ...errors import UNREADABLE, RequestError
from ...sessions.message_units import packed_thought
from .items import THOUGHT, CallItem, message_of
from .shapes import ITEMS, MEMBERS, MESSAGE, MESSAGES, PromptMessage, is_by_user, read

if TYPE_CHECKING:
    from ...sessions.hasher import Hasher
    from ...sessions.message_units import MessageUnit
    from ...sessions.prefix_chain import TextOrKind
    from .shapes import Message, WholeMessage

# What compiled code finds. Types are compared where nearly all messages are plain: a call takes ten times as long.
FOUND_MESSAGE = plane.FoundMessage if plane.IS_BUILT else None
PLAIN_MESSAGE = plane.PlainMessage if plane.IS_BUILT else None
_USER = msgspec.Raw(b'"user"')

REPLY, BY_USER, OTHER = b"au-"  # who says a message; of texts the first letter of the role


def read_messages(raw: msgspec.Raw, hasher: Hasher) -> list[Message]:
    """The messages of a chat; where code is compiled, it finds those that are one text and nothing else, or known."""
    found = plane.messages(raw, hasher.point, hasher.known_units.find) if plane.IS_BUILT else None
    if found is None or not decode_others(*found):
        return [*read(MESSAGES, raw, "messages")]
    return found[0]


def read_items(raw: msgspec.Raw, hasher: Hasher) -> list[Message]:
    """The same of the `input` of Responses. A text is what the user says."""
    find = hasher.known_units.find
    found = plane.messages(raw, hasher.point, find, are_items=True) if plane.IS_BUILT else None
    if found is None or not decode_others(*found):
        items = read(ITEMS, raw, "input")
        return [message_of(item) for item in ([{"role": _USER, "content": raw}] if isinstance(items, str) else items)]
    return found[0]


def without_thoughts(items: list[Message], hasher: Hasher) -> tuple[list[Message], set[int]]:
    """All but reasoning, and the places of those that come with it, which is right before them."""
    others: list[Message] = []
    with_thoughts, is_thought = set[int](), False
    for item in items:
        if item is THOUGHT or (type(item) is FOUND_MESSAGE and _is_thought(item, hasher)):
            is_thought = True
            continue
        if is_thought:
            with_thoughts.add(len(others))
            is_thought = False
        others.append(item)
    return others, with_thoughts


def _is_thought(item: plane.FoundMessage, hasher: Hasher) -> bool:
    if item.unit is not None:
        return not item.letter
    if item.decoded is THOUGHT:
        if item.digest is not None:
            hasher.known_units.add(item.digest, packed_thought(plane.bones(item.raw)[2]))
        return True
    return False


def decode_others(messages: list[Any], others: list[int]) -> bool:
    """Decodes the messages at those places. Whatever is wrong with one is told by the way that decodes all of them."""
    try:
        for at in others:
            messages[at].decoded = _decoded(messages[at])
    except (RequestError, *UNREADABLE):
        return False
    return True


def _decoded(message: plane.FoundMessage) -> PromptMessage:
    return message_of(MEMBERS.decode(message.raw)) if message.is_item else MESSAGE.decode(message.raw)


def whole(message: Message) -> WholeMessage:
    """All of it: of one whose unit is known, nothing has been decoded yet."""
    if type(message) is not FOUND_MESSAGE:
        return cast("WholeMessage", message)
    if message.decoded is None:
        message.decoded = _decoded(message)
    return cast("WholeMessage", message.decoded)


def letter_of(message: WholeMessage) -> int:
    """Who says it."""
    if message.role == "user" and (not isinstance(message, PromptMessage) or is_by_user(message.content)):
        return BY_USER
    return REPLY if message.role == "assistant" or isinstance(message, CallItem) else OTHER


def is_reply(message: Message) -> bool:
    """Or an item of one."""
    if type(message) is FOUND_MESSAGE and message.unit is not None:
        return message.letter == REPLY
    return letter_of(whole(message)) == REPLY


def keep_unit(hasher: Hasher, message: Message, unit: MessageUnit) -> None:
    """For later prompts that have this message, if it has a name by which to know it."""
    if type(message) is FOUND_MESSAGE and message.digest is not None:
        packed = unit.packed(plane.bones(message.raw)[2])
        if packed is not None:
            hasher.known_units.add(message.digest, packed)


def text_or_kind(message: Message) -> TextOrKind:
    """Of a plain or a known one, for counting tokens."""
    return message.kind if type(message) is FOUND_MESSAGE else cast("plane.PlainMessage", message)
