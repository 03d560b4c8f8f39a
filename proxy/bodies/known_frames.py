"""Chats that differ from an earlier one only in their messages, as nearly all of a client do: the rest is read once.

The bytes before and behind the messages are compared with those of a body that was decoded as a whole. So a body that
is found here is the same JSON with other messages, and those are read as in any other chat. Only short frames are kept,
and none with a member that templates render.

Messages that are one text each are read where they are found, so a body of nothing else is gone through twice: to find
where its messages end, and to read them. How much is in it and how deep it is nested is asked only where one is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from .. import plane
from ..config import SessionKey
from ..errors import UNREADABLE, RequestError
from ..openai.body_members import SHORT_BYTES, Members, Places
from ..openai.prompt_shapes import decode_others
from ..openai.prompts import PromptReader
from ..openai.request import RENDERED, Endpoint, ReadingRules, Request, label_of, read_short, scope_of
from ..sessions.prefix_chain import Chain
from ..sessions.prompt_head import Head
from ..sessions.session_name import session_name

FRAME_BYTES = 512
MOST_FRAMES, MOST_SEEN = 1024, 4096

_MEMBER, _NAMED = "messages", b"messages"
_READ_EACH_TIME = RENDERED | {"continue_final_message"}

_Name = tuple[str, Callable[[str], str] | None, bytes, bytes]
"""The tenant, what makes its salts, and the bytes before and behind the messages."""


class _Frame(msgspec.Struct, frozen=True):
    request: Request  # without its messages
    scope: int
    head: Head
    places: Places  # of its members, in the body that it was learned of
    end: int  # of the messages there

    def places_in(self, body: bytes, end: int) -> Places | None:
        """Where the members lie in a body whose messages end there; None for a short one, which is encoded anew."""
        if len(body) <= SHORT_BYTES:
            return None
        own, more = self.end, end - self.end
        return {
            name: (begins if begins < own else begins + more, ends if ends < own else ends + more)
            for name, (begins, ends) in self.places.items()
        }


class KnownFrames:
    """The frames of one set of aliases and templates."""

    def __init__(self) -> None:
        self._known: dict[_Name, _Frame] = {}
        self._seen: set[int] = set()  # hashes of names: what comes once is not learned
        self._aliases: object = None
        self._templates: object = None

    def __len__(self) -> int:
        return len(self._known)

    def request(
        self,
        body: bytes,
        headers: Mapping[str, str],
        rules: ReadingRules,
        *,
        most: int = sys.maxsize,
        depth_limit: int = sys.maxsize,
    ) -> Request | None:
        """What `parse_request` makes of a chat; None where it must be asked, for errors too.

        most: a body that weighs more is left to it (`plane.bones`), and so is one that is nested deeper than the limit.
        """
        if rules.aliases is not self._aliases or rules.templates is not self._templates:
            self._known.clear()
            self._aliases, self._templates = rules.aliases, rules.templates
        place = _place(body)
        frame = None if place is None else self._known.get(_name(body, place, rules))
        if place is None or frame is None:
            return None
        known, raw = frame.request, msgspec.Raw(memoryview(body)[place[0] : place[1]])
        found = plane.messages(raw, most - FRAME_BYTES, rules.hasher.point)
        if found is None or (found[1] and not _decoded(body, raw, *found, most, depth_limit)):
            return None
        reader = PromptReader(rules.hasher, known.template)
        try:
            chain = reader.chat(frame.head, found[0], prefills=False)
            named = session_name(headers, known.fields, read_short, None)
        except (RequestError, *UNREADABLE):
            return None
        label = label_of(rules.hasher, frame.scope, named) if named else None
        fields = Members(known.fields, body, frame.places_in(body, place[1]))
        fields[_MEMBER] = raw
        return replace(
            known,
            fields=fields,
            prompt=replace(known.prompt, chain=chain, label=label),
            prompt_bytes=chain.size,
            has_media=reader.has_media,
        )

    def add(self, body: bytes, request: Request, rules: ReadingRules) -> None:
        """request: what `parse_request` has made of the body. It is learned when it comes again."""
        fields = request.fields
        if request.endpoint is not Endpoint.CHAT or rules.session_key is not SessionKey.PREFIX:
            return
        if not _READ_EACH_TIME.isdisjoint(fields) or (place := _place(body)) is None:
            return
        name = _name(body, place, rules)
        if hash(name) not in self._seen:
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            self._seen.add(hash(name))
            return
        members = plane.members(body)
        if members is None or len(members) != len(fields):  # names with escapes, or one that occurs twice
            return
        if len(self._known) >= MOST_FRAMES:
            self._known.clear()
        scope = scope_of(Endpoint.CHAT, rules.hasher, rules.tenant, request.prompt.model)
        head = PromptReader(rules.hasher, request.template, scope).head(request.cache_salt, {})
        others = {member: msgspec.Raw(b"" if member == _MEMBER else bytes(raw)) for member, raw in fields.items()}
        prompt = replace(request.prompt, chain=Chain((0,), (0,), rules.hasher), label=None)
        known = replace(request, fields=others, prompt=prompt)
        places = {member: (begins, end) for member, begins, _, end in members}
        self._known[name] = _Frame(known, scope, head, places, place[1])


def _decoded(
    body: bytes, raw: msgspec.Raw, messages: list[Any], others: list[int], most: int, depth_limit: int
) -> bool:
    """Decodes the messages that are not one text, at those places, unless there is too much in the body."""
    depth, _, weighs = plane.bones(body)
    return weighs <= most and depth <= depth_limit and decode_others(messages, others, raw)


def _place(body: bytes) -> tuple[int, int] | None:
    """Where the messages begin and end; None where the frame around them is long."""
    place = plane.member(body, _NAMED) if plane.IS_BUILT else None
    return None if place is None or place[0] + len(body) - place[1] > FRAME_BYTES else place


def _name(body: bytes, place: tuple[int, int], rules: ReadingRules) -> _Name:
    return rules.tenant, rules.salted, body[: place[0]], body[place[1] :]
