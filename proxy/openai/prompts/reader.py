"""Reads each endpoint's prompt into a chain of hashes: one for each tool, the system's text, and each message or item.

Hashed is what a chat template renders: role, name, text, tool calls and results, media by content, a developer's tools.
Not hashed are members that are null or absent, `cache_control` (clients move it from turn to turn), ids and states that
a server gave its own items, ids of tool calls (see `message_units`), and reasoning, which most templates leave out of
earlier turns and many clients do not send back.
A string and a list with that one text are the same content; two texts are never the same as their concatenation.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import RequestError
from ...sessions.hasher import LONG_BYTES, NO_UNITS, USUAL_KEYS, Hasher, before_parts, encoded
from ...sessions.message_units import MessageUnit, PartNotRead
from ...sessions.prefix_chain import NO_MARKS, UNIT_OVERHEAD_BYTES, Chain, TextOrKind, UnitHash
from ...sessions.prompt_head import Head
from ...sessions.templates import PLAIN, Template
from ...sessions.text_cuts import FINE_BYTES, LEAST_HEAD_BYTES, TextCuts, UnitText
from ...sessions.text_kinds import SAMPLED_UNITS, kind_of
from .beginnings import Beginning, Begun
from .content import UnitContent
from .items import CallItem
from .messages import (
    BY_USER,
    FOUND_MESSAGE,
    OTHER,
    PLAIN_MESSAGE,
    REPLY,
    keep_unit,
    letter_of,
    text_or_kind,
    whole,
    without_thoughts,
)
from .shapes import (
    BILLING,
    CONTENT,
    MESSAGE,
    PromptMessage,
    canonical,
    canonical_items,
    comes_with_reasoning,
    first_text,
    only_text,
    read,
    texts,
)

if TYPE_CHECKING:
    from ... import plane
    from ...sessions.prefix_chain import LongTexts
    from .shapes import Message, WholeMessage

_SYSTEM = frozenset(("system", "developer"))
_LETTERS = {"assistant": REPLY, "user": BY_USER}
_BILLING = BILLING.encode()


class PromptReader:
    """Makes the chain of one prompt."""

    def __init__(self, hasher: Hasher, template: Template = PLAIN, scope: int = 0) -> None:
        """scope: the key in which the chain begins."""
        self.hasher, self.scope = hasher, scope
        self._template = template
        self.content = UnitContent(hasher, template)
        self._newest: list[TextOrKind] = []
        self._cuts = TextCuts()
        self.begun: Begun | None = None  # what is known of how the body begins; None: nothing, and nothing is learned
        self._is_beside = False  # the system's text is no message
        self._system: tuple[int, int] | None = None  # key and size of the first message, if that is the system's
        self._has_system_before = False  # that message is in what was read before
        self._system_texts: Callable[[], list[str]] = list  # with the role before them

    def head(self, salt: str, rendered: Mapping[str, msgspec.Raw]) -> Head:
        """rendered: what comes before the messages, or changes how all of them are rendered."""
        parts: list[str | bytes] = [salt]
        size, tools = 0, NO_UNITS
        for name, raw in rendered.items():
            data = bytes(raw)
            if name == "tools" and data.startswith(b"["):
                tools = self.hasher.units(data, canonical_items)
                continue
            value, value_size = self.hasher.once(data, partial(canonical, name))
            if value_size:
                parts += (name, f"{value:x}")
                size += value_size
        key = self.hasher.usual_key if parts == [""] else self.hasher.key  # cached where it holds no client data
        return Head(key(b"S", *parts, previous=self.scope), size, tools, self._template.tools_first)

    def _system_unit(self, seed: int, raw: msgspec.Raw, name: str) -> tuple[int, int] | None:
        """Key and size of a system's text that is no message, read once for many prompts; None: it says nothing."""
        known_systems, place = self.hasher.known_systems, (seed, self.hasher.name_of(raw))
        known = known_systems.get(place)
        if known is None:
            content = read(CONTENT, raw, name)
            if not content:
                return None
            unit = UnitHash(self.hasher, seed, "system")
            self.content.add(unit, content, system=True)
            known = unit.key(), unit.size
            if not self.content.has_media and self.content.seen_places is None:
                if len(known_systems) >= USUAL_KEYS:
                    known_systems.clear()
                known_systems[place] = known
        self._system_texts = lambda: ["system", *texts(read(CONTENT, raw, name), system=True)]
        return known

    def _note_head(self, head: Head, keys: Sequence[int], ends: Sequence[int], *, has_system: bool) -> None:
        self._cuts.mask = keys[-1] ^ keys[0]
        if self._has_system_before:
            return  # cuts that need its text are made later
        if len(keys) > 1 and ends[-1] > LEAST_HEAD_BYTES:
            system = head.marks(has_system=has_system).system
            self._cuts.note_head(keys, ends, system, self._system_texts)

    def chat(self, head: Head, messages: list[Message], *, prefills: bool, system: msgspec.Raw | None = None) -> Chain:
        """`messages` of chat completions and of Anthropic's Messages, whose `system` is beside them.

        messages: the list is used up. prefills: a last one by the assistant starts the reply, and the client will echo
        both as one message.
        """
        if not messages:
            raise RequestError("messages: must not be empty", param="messages")
        last = whole(messages[-1]) if prefills else None
        continues = last is not None and last.role == "assistant" and not last.tool_calls
        before = self._before(head.seed, system, "system", messages)
        return self._chain(head, before, messages, continues=continues)

    def responses(
        self, head: Head, items: list[Message], instructions: msgspec.Raw | None, stored: int | None
    ) -> Chain:
        """`input` of Responses. stored: key of the response that it continues, which stands for the head too."""
        if not items:
            raise RequestError("input: must not be empty", param="input")
        before = self._before(head.seed, instructions, "instructions", items, may_be_first=stored is None)
        items, with_thoughts = without_thoughts(items, self.hasher)
        return self._chain(head, before, items, with_thoughts, stored=stored)

    def _before(
        self, seed: int, raw: msgspec.Raw | None, name: str, messages: list[Message], *, may_be_first: bool = True
    ) -> tuple[int, int] | None:
        """Key and size of what the system says beside the messages, or in the first of them, which is taken out of the
        list."""
        beside = None if raw is None else self._system_unit(seed, raw, name)
        known, self._is_beside = None if self.begun is None else self.begun.known, beside is not None
        if known is not None:
            is_other = known.prints_call_ids is not self._template.prints_call_ids
            if known.seed != seed or known.is_beside is not self._is_beside or is_other:
                raise PartNotRead
            self._system = known.system
            self._has_system_before = known.system is not None
        elif beside is None and may_be_first and messages[0].role in _SYSTEM:
            first = whole(messages.pop(0))
            self._system_texts = lambda: [first.role, *texts(first.content, system=first.role == "system")]
            self._system = self._message(seed, first)[:2]
        return self._system if beside is None else beside

    def _chain(
        self,
        head: Head,
        system: tuple[int, int] | None,
        messages: list[Message],
        with_thoughts: Set[int] = frozenset(),
        *,
        continues: bool = False,
        stored: int | None = None,
    ) -> Chain:
        """system: key and size of what it says. with_thoughts: places of the messages that come with reasoning which is
        no part of them. continues: the reply continues the last one. stored: stands for the head."""
        keys, ends, size = head.chain(system)
        if stored is not None:
            keys, ends = [stored], [0]
        head_end = len(keys) - 1
        if head_end:
            self._note_head(head, keys, ends, has_system=system is not None)
        elif not messages and (self.begun is None or self.begun.known is None):
            messages, self.begun = [PromptMessage(role="")], None  # only reasoning: an empty one stands for it
        first, roles = len(keys), bytearray(len(keys))  # first: place of the first message's unit
        if self.begun is None:
            unit = self._add_messages(messages, keys, ends, roles, size, continues=continues)
        else:
            first += self._add_known(self.begun.known, keys, ends, roles, size)
            unit = self._add_and_learn(self.begun, messages, keys, ends, roles, size, continues=continues)
        last_reply = max(roles.rfind(REPLY), 0)
        if 0 < last_reply < first:
            raise PartNotRead
        reply: Any = messages[last_reply - first] if last_reply else None
        if type(reply) is FOUND_MESSAGE:
            reply = whole(reply)
        reasons = isinstance(reply, PromptMessage) and comes_with_reasoning(reply)
        if with_thoughts:
            begins = len(roles[: last_reply + 1].rstrip(bytes((REPLY,))))  # the items that are that reply
            reasons = reasons or not with_thoughts.isdisjoint(range(begins - first, last_reply - first + 1))
        first_user, last_user = max(roles.find(BY_USER), 0), max(roles.rfind(BY_USER), 0)
        if stored is None:
            marks = head.marks(first_user, last_user, last_reply, has_system=system is not None, reasons=reasons)
        else:
            marks = NO_MARKS.with_messages(first_user, last_user, last_reply, reasons=reasons)
        newest, cuts = tuple(self._newest[-SAMPLED_UNITS:]), self._cuts_of(messages, keys, ends, roles, head_end)
        return Chain(tuple(keys), tuple(ends), self.hasher, open_unit=unit, marks=marks, long_texts=cuts, texts=newest)

    def _cuts_of(
        self, messages: list[Message], keys: list[int], ends: list[int], roles: bytearray, head_end: int
    ) -> LongTexts | None:
        if self.begun is not None and (known := self.begun.known) is not None:
            last_reply, first = max(roles.rfind(REPLY), 0), len(keys) - len(messages)
            has_head = self._has_system_before and ends[head_end] > LEAST_HEAD_BYTES
            is_before = not messages or head_end < last_reply - 1 < first
            if known.can_be_cut or has_head or is_before:
                return self.begun.cuts
        self._cuts.find_newest = partial(_find_newest, messages, keys, ends, roles, head_end)
        return self._cuts

    def _add_known(self, known: Beginning | None, keys: list[int], ends: list[int], roles: bytearray, size: int) -> int:
        """Adds what was read before; returns how many units that has. size: of the head."""
        if known is None:
            return 0
        change, more = self._cuts.mask ^ known.mask, size - known.head_size  # nearly always 0
        keys += [key ^ change for key in known.keys] if change else known.keys
        ends += [end + more for end in known.ends] if more else known.ends
        roles += known.letters
        self._newest += known.kinds
        if known.calls >= 0:
            self.content.have_places(known.calls)
        return len(known.keys)

    def _add_and_learn(
        self,
        begun: Begun,
        messages: list[Any],
        keys: list[int],
        ends: list[int],
        roles: bytearray,
        head_size: int,
        *,
        continues: bool,
    ) -> UnitHash | None:
        """As `_add_messages`. On the way it notes a beginning for later prompts."""
        units, size, stop = len(keys), head_size, begun.stop(messages)  # units: from where on they are the messages'
        if begun.known is not None:
            units, size = units - len(begun.known.keys), ends[-1]
        if stop:
            self._add_messages(messages[:stop], keys, ends, roles, size, continues=False)
            size = ends[-1]
        places = self.content.seen_places
        if stop and not self.content.has_media and (places is None or not places.is_in_round):
            kinds = [kind_of(one) for one in self._newest[-SAMPLED_UNITS:]]
            self._newest[-SAMPLED_UNITS:] = kinds
            begun.found = Beginning(
                end=messages[stop - 1].end - begun.start,
                weighs=begun.weighs_before(messages, stop),
                seed=keys[0],
                mask=self._cuts.mask,
                head_size=head_size,
                prints_call_ids=self._template.prints_call_ids,
                can_be_cut=self._cuts.has_long or (begun.known is not None and begun.known.can_be_cut),
                calls=-1 if places is None else places.count,
                is_beside=self._is_beside,
                system=self._system,
                keys=array("Q", keys[units:]),
                ends=array("I", ends[units:]),
                letters=bytes(roles[units:]),
                kinds=bytes(kinds),
            )
        return self._add_messages(messages[stop:], keys, ends, roles, size, continues=continues)

    def _add_messages(
        self,
        messages: list[Message],
        keys: list[int],
        ends: list[int],
        roles: bytearray,
        size: int,
        *,
        continues: bool,
    ) -> UnitHash | None:
        """Adds their keys, their ends and a letter for each. Returns the last unit if the reply continues it.

        size: of what is before them, whose keys and ends are there.
        """
        unit, mask, at = None, self._cuts.mask, 0
        closed, many_units = messages[:-1] if continues else messages, self.hasher.many_units
        while at < len(messages):
            # Nearly all messages of a chat are one text, or known: one step takes all up to the next that is neither.
            previous, places = keys[-1] ^ mask, self.content.seen_places
            found, sizes, by, long_ones = many_units(closed, at, previous, size, UNIT_OVERHEAD_BYTES, places)
            if found:
                keys += [key ^ mask for key in found] if mask else found
                ends += sizes
                roles += by
                newest: list[Any] = closed[max(at, at + len(found) - SAMPLED_UNITS) : at + len(found)]
                self._newest += newest if places is None else map(text_or_kind, newest)
                if long_ones:
                    self._cuts.note_units(long_ones)
                at, size = at + len(found), sizes[-1]
                if at == len(messages):
                    break
            message, self._cuts.start = messages[at], size
            if at == len(closed):
                unit = self._open_unit(keys[-1] ^ mask, whole(message))
                key, unit_size, letter = unit.key(), unit.size, REPLY
            else:
                key, unit_size, letter = self._message(keys[-1] ^ mask, message)
            size += unit_size
            keys.append(key ^ mask)
            ends.append(size)
            roles.append(letter)
            at += 1
        return unit

    def _message(self, previous: int, message: Message) -> tuple[int, int, int]:
        """Its key and size, and a letter for who says it."""
        places = self.content.seen_places
        if type(message) is PLAIN_MESSAGE and message.size:
            role = message.role
            if role != "system" or not message.utf8.startswith(_BILLING):
                if places is not None:
                    places.begin_round()
                key = self._plain_message(previous, message)
                return key, UNIT_OVERHEAD_BYTES + message.size, _LETTERS.get(role, OTHER)
        if type(message) is FOUND_MESSAGE and message.unit is not None:
            if places is not None and not message.is_call:
                places.begin_round()
            self._newest.append(message.kind)
            key = self.hasher.known_unit(previous, message.unit, self.content.places)
            return key, message.size, message.letter
        unit = self._new_unit(message, whole(message))
        if places is not None and not unit.is_call:
            places.begin_round()
        self._newest.append(unit.text if unit.kind is None else unit.kind)
        key = unit.key_after(previous, self.content.places, self.hasher.unit, self._cuts)
        return key, unit.size, unit.letter

    def _plain_message(self, previous: int, message: plane.PlainMessage) -> int:
        """The key of a text and nothing else, which was hashed as it was found."""
        self._newest.append(message)
        call_id = self.content.places.result(message.tool_call_id) if message.tool_call_id else ""
        before, start = before_parts(message.role, message.name, call_id), self._cuts.start
        if message.size > LONG_BYTES and start is not None:
            self._cuts.note_units([(previous, before, message, start)])
        return self.hasher.message_unit(previous, before, message)

    def _new_unit(self, found: Message, message: WholeMessage) -> MessageUnit:
        """It is kept for later prompts, unless it holds much. message: as it was decoded."""
        content = self.content
        had_media, content.has_media = content.has_media, False
        unit = MessageUnit(self.hasher, message.role, message.name or "", message.tool_call_id or "")
        self.content.add_message(unit, message)
        unit.letter, unit.is_call = letter_of(message), isinstance(message, CallItem)
        if not content.has_media:
            keep_unit(self.hasher, found, unit)
        content.has_media = content.has_media or had_media
        return unit

    def open_unit(self, previous: int, message: bytes) -> UnitHash:
        """The unit of a last message that the reply continues. previous: the key before it."""
        return self._open_unit(previous, read(MESSAGE, msgspec.Raw(message), "messages"))

    def _open_unit(self, previous: int, message: WholeMessage) -> UnitHash:
        call_id = self.content.places.result(message.tool_call_id) if message.tool_call_id else ""
        unit = UnitHash(self.hasher, previous, message.role, message.name or "", call_id, self._cuts)
        if self.content.seen_places is not None:
            self.content.places.begin_round()
        self.content.add_message(unit, message)
        self._newest.append(unit.text)
        unit.text = ""
        return unit


def _find_newest(
    messages: list[Message], keys: list[int], ends: list[int], roles: bytearray, head_end: int, cuts: TextCuts
) -> list[UnitText]:
    """Of the newest message, and of the last one before the newest reply, what can be cut. Notes an only reply."""
    last_reply, mask, first = max(roles.rfind(REPLY), 0), cuts.mask, len(keys) - len(messages)
    found: list[UnitText] = []
    for place in (last_reply - 1, len(keys) - 1):
        if place <= head_end:
            continue
        one: Any = messages[place - first]
        if type(one) is FOUND_MESSAGE:
            one = whole(one)
        if one.role == "assistant" or one.tool_call_id:
            continue
        text = one.utf8 or encoded(first_text(one.content)[:LONG_BYTES])
        if len(text) > FINE_BYTES:
            found.append(UnitText(keys[place - 1] ^ mask, one.role, one.name or "", text, ends[place - 1]))
    if mask and last_reply and roles.count(REPLY) == 1:
        reply = only_text(whole(messages[last_reply - first]))
        if reply:
            cuts.note_only_reply(reply, keys[0] ^ mask, ends[head_end])
    return found
