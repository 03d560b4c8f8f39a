"""What one message or item says, added to its unit: texts, calls and results of tools, media and unknown parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ...media.items import UUID, media_type
from ...sessions.hasher import Hasher
from ...sessions.message_units import CallPlaces, MessageUnit
from ..body_members import pruned
from .shapes import (
    ABSENT,
    ANY,
    BILLING,
    CANONICAL,
    FLAG,
    STRING,
    Content,
    Members,
    PromptFunction,
    PromptMessage,
    content_of,
    part_text,
    read,
    string,
    without_billing,
)
from .tool_calls import CallHash

if TYPE_CHECKING:
    from ...sessions.prefix_chain import UnitHash
    from ...sessions.templates import Template
    from .shapes import WholeMessage

    Unit = UnitHash | MessageUnit

MEDIA_BYTES = 4096
"""The size in prompt bytes of an image, sound or file: about a thousand tokens. Its own size says nothing."""

LONG_ARGUMENTS_BYTES = 1024 * 1024
"""No model writes so much in one call. Longer arguments are compared as they are: another way to write them is another
call."""


class UnitContent:
    """Of the units of one prompt, in their order."""

    def __init__(self, hasher: Hasher, template: Template) -> None:
        self._hasher, self._template = hasher, template
        self.seen_places: CallPlaces | None = None  # made with the first call or result: most prompts have none
        self.has_media = False

    @property
    def places(self) -> CallPlaces:
        if self.seen_places is None:
            self.seen_places = CallPlaces(as_they_are=self._template.prints_call_ids)
        return self.seen_places

    def have_places(self, before: int) -> None:
        """before: how many calls are in a beginning that is not read again."""
        self.seen_places = CallPlaces(as_they_are=self._template.prints_call_ids, before=before)

    def add_message(self, unit: Unit, message: WholeMessage) -> None:
        self.add(unit, message.content, system=message.role == "system")
        for call in message.tool_calls or ():
            self.add_call(unit, call.id, call.function or call.custom)
        if message.function_call is not None:
            self.add_call(unit, None, message.function_call)
        if isinstance(message, PromptMessage):
            for name, said in message.rendered.items():
                unit.add_part(b"M", self._hasher.key(b"M", name, said), len(said))

    def add(self, unit: Unit, content: Content, *, system: bool = False) -> None:
        for part in (content,) if isinstance(content, str) else content or ():
            unit.begin_text()
            if (text := part_text(part)) is not None:
                if system and text.startswith(BILLING):
                    text = without_billing(text)
                unit.add_text(text)
                unit.show(text)
            elif not isinstance(part, str):
                self._add_part(unit, part)

    def _add_part(self, unit: Unit, part: Members) -> None:
        self.has_media = self.has_media or UUID in part
        match string(part, "type"):
            case "tool_use":
                call = PromptFunction(string(part, "name"), part.get("input", ABSENT))
                self.add_call(unit, string(part, "id"), call)
            case "tool_result":
                failed = "is_error" in part and read(FLAG, part["is_error"], "is_error")
                answers = string(part, "tool_use_id") or ""
                result = MessageUnit(self._hasher, "tool", "error" if failed else "", answers, is_part=True)
                self.add(result, content_of(part, "content"))
                unit.add_result(result, self.places)
            case _:
                self.add_opaque(unit, part)  # media and unknown parts: all their members count

    def add_opaque(self, unit: Unit, part: Members) -> None:
        members = {name: value for name, raw in part.items() if (value := pruned(read(ANY, raw, name))) is not None}
        image = members.get("image_url")
        if isinstance(image, dict):  # clients write an image nested or flat
            members = {**members, **image, "image_url": image.get("url")}
            members.pop("url", None)
        if members.get("detail") == "auto":
            del members["detail"]
        for name in ("cache_control", UUID):  # the proxy names media itself
            members.pop(name, None)
        self.has_media = self.has_media or media_type(part) is not None
        text = CANONICAL.encode(members)
        unit.add_part(b"M", self._hasher.key(b"M", text), min(len(text), MEDIA_BYTES))
        unit.show(None)

    def add_call(self, unit: Unit, id: str | None, function: PromptFunction | None) -> None:
        function = function or PromptFunction()
        name, raw = function.name or "", bytes(function.arguments) or bytes(function.input)
        if len(raw) > LONG_ARGUMENTS_BYTES:
            key = self._hasher.key(b"L", name, self._hasher.digest(raw))
            unit.add_call(id or "", key, len(raw), self.places)
            return
        arguments = ""
        if raw.startswith(b'"'):
            arguments = read(STRING, msgspec.Raw(raw), "arguments") or ""
        elif raw not in (b"", b"null"):
            read(ANY, msgspec.Raw(raw), "arguments")
            arguments = raw.decode()
        call = CallHash(self._hasher, name=name)
        call.add_all(arguments)
        unit.show(arguments)
        unit.add_call(id or "", call.key(), call.size + len(name), self.places)
