"""Chats that differ from an earlier one only in their messages, as nearly all of a client do: the rest is read once.

The bytes before and behind the messages are compared with those of a body that was decoded as a whole. So a body that
is found here is the same JSON with other messages, and those are read as in any other chat. Only short frames are kept,
and none with a member that templates render.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from msgspec.structs import replace

from .. import plane
from ..config import SessionKey
from ..errors import UNREADABLE, RequestError
from ..openai.body_members import SHORT_BYTES, Members
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


class KnownFrames:
    """The frames of one set of aliases and templates."""

    def __init__(self) -> None:
        self._known: dict[_Name, _Frame] = {}
        self._seen: set[int] = set()  # hashes of names: what comes once is not learned
        self._aliases: object = None
        self._templates: object = None

    def __len__(self) -> int:
        return len(self._known)

    def request(self, body: bytes, headers: Mapping[str, str], rules: ReadingRules) -> Request | None:
        """What `parse_request` makes of a chat; None where it must be asked, for errors too."""
        if rules.aliases is not self._aliases or rules.templates is not self._templates:
            self._known.clear()
            self._aliases, self._templates = rules.aliases, rules.templates
        place = _place(body)
        frame = None if place is None else self._known.get(_name(body, place, rules))
        if place is None or frame is None:
            return None
        known, raw = frame.request, msgspec.Raw(memoryview(body)[place[0] : place[1]])
        reader = PromptReader(rules.hasher, known.template)
        try:
            chain = reader.chat(frame.head, raw, prefills=False)
            named = session_name(headers, known.fields, read_short, None)
        except (RequestError, *UNREADABLE):
            return None
        label = label_of(rules.hasher, frame.scope, named) if named else None
        fields = Members(known.fields, body)
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
        self._known[name] = _Frame(known, scope, head)


def _place(body: bytes) -> tuple[int, int] | None:
    """Where the messages begin and end; None where the frame around them is long."""
    size = len(body)
    place = plane.member(body, _NAMED) if size <= SHORT_BYTES and plane.IS_BUILT else None
    return None if place is None or place[0] + size - place[1] > FRAME_BYTES else place


def _name(body: bytes, place: tuple[int, int], rules: ReadingRules) -> _Name:
    return rules.tenant, rules.salted, body[: place[0]], body[place[1] :]
