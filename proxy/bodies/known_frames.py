"""Chats that differ from an earlier one only in their messages or items, as nearly all of a client do: the rest is read
once.

What is before and behind the messages is compared, by keyed digests, with that of a body that was decoded as a whole.
So a body that is found here is the same JSON with other messages, and those are read as in any other chat. Where they
end is seen as they are read: a body is gone through once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from .. import plane
from ..config import SessionKey
from ..errors import UNREADABLE, RequestError
from ..openai.body_members import SHORT_BYTES, Fields, Members, Places
from ..openai.prompts.beginnings import Begun, KnownBeginnings
from ..openai.prompts.messages import decode_others
from ..openai.prompts.reader import PromptReader
from ..openai.request import (
    MESSAGES_MEMBER,
    NAMES,
    NO_FIELDS,
    Endpoint,
    ReadingRules,
    Request,
    chain_of,
    label_of,
    rendered_of,
    scope_of,
)
from ..openai.short_members import read_short
from ..sessions.message_units import PartNotRead
from ..sessions.prefix_chain import Chain, LongTexts
from ..sessions.prompt_head import Head
from ..sessions.session_name import session_name
from ..sessions.text_cuts import LateCuts
from .shared_bytes import LARGE_BYTES

FRAME_BYTES = 512
"""Of a shorter frame the members are kept. Those of a longer one, which has tools, are taken from each body."""

LONGEST_FRAME_BYTES = 256 * 1024
MOST_FRAMES, MOST_SEEN = 1024, 4096
MOST_UNITS = 100_000  # tools in them
MOST_SAID_BYTES = 2048  # of a frame's names and its salt, which are kept

_READ_EACH_TIME = frozenset(("continue_final_message", "previous_response_id"))
_MESSAGE_DEPTH = 2  # of the body and the list
_PLAIN_DEPTH = 6  # of a plain message's `cache_control`, at most

_Name = tuple[str, Callable[[str], str] | None, bytes, bytes]
"""The tenant, what makes its salts, and the digests of what is before and behind the messages."""


class _Frame(msgspec.Struct, frozen=True):
    request: Request  # without its members
    scope: int
    head: Head
    members: tuple[tuple[str, int, int, int], ...]  # as `plane.members` tells them of the body that it was learned of
    values: Fields  # of a short frame
    end: int  # of the messages there
    weighs: int  # without them, as `plane.bones` weighs it

    def fields_in(self, body: bytes, start: int, end: int, member: str) -> Members:
        """The members of a body whose messages begin and end there. member: that they are."""
        view, own, more = memoryview(body), self.end, end - self.end
        if self.values and len(body) <= SHORT_BYTES:  # which is encoded anew, so nobody needs to know where they lie
            fields = Members(self.values, body)
            fields[member] = msgspec.Raw(view[start:end])
            return fields
        fields = Members({}, body, places := Places())
        for name, begins, value, ends in self.members:
            moved, grown = more * (begins >= own), more * (ends >= own)
            fields[name] = msgspec.Raw(view[value + moved : ends + grown])
            places[name] = begins + moved, ends + grown
        return fields


class _Chat(msgspec.Struct, frozen=True):
    """What is asked for."""

    body: bytes
    headers: Mapping[str, str]
    rules: ReadingRules
    start: int  # of the messages
    before: bytes  # the digest of what is before them


class KnownFrames:
    """The frames of one endpoint, with one set of aliases and templates."""

    def __init__(self, endpoint: Endpoint) -> None:
        """endpoint: its prompts are messages or items."""
        self._endpoint, self._member = endpoint, MESSAGES_MEMBER[endpoint]
        self._known: dict[_Name, _Frame] = {}
        self._starts: set[bytes] = set()  # digests of what is before their messages
        self._beginnings = KnownBeginnings()
        self._units = 0  # tools in them
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

        most: a body that weighs more is left to it (`plane.bones`), and so is one that is nested deeper than the limit,
        which no frame is.
        """
        if rules.aliases is not self._aliases or rules.templates is not self._templates:
            self._forget()
            self._beginnings = KnownBeginnings()
            self._aliases, self._templates = rules.aliases, rules.templates
        start = plane.value_start(body, self._member.encode()) if plane.IS_BUILT else None
        if start is None or depth_limit < _PLAIN_DEPTH:
            return None
        before = rules.hasher.digest(memoryview(body)[:start])
        if before not in self._starts:
            return None
        begun = None
        if len(body) - start >= self._beginnings.least_bytes:
            begun = self._beginnings.of(rules.hasher, rules.tenant, before, body, start)
        read = partial(self._read, _Chat(body, headers, rules, start, before))
        if begun is not None and begun.known is not None:
            begun.cuts = LateCuts(partial(_cuts, read))
            with suppress(PartNotRead):
                request = read(begun, most, depth_limit)
                if request is not None:
                    return request
            begun = begun.anew()
        return read(begun, most, depth_limit)

    def _read(self, chat: _Chat, begun: Begun | None, most: int, depth_limit: int) -> Request | None:
        body, rules, start = chat.body, chat.rules, chat.start
        hasher, beginning = rules.hasher, None if begun is None else begun.known
        find, are_items = hasher.known_units.find, self._endpoint is Endpoint.RESPONSES
        at, is_rest = start, beginning is not None
        if beginning is not None:
            at, most = start + beginning.end, most - beginning.weighs
        found = plane.messages_at(body, at, most, hasher.point, find, are_items=are_items, is_rest=is_rest)
        if found is None:
            return None
        messages, others, end, weighs = found
        behind = hasher.digest(memoryview(body)[end:])
        frame = self._known.get((rules.tenant, rules.salted, chat.before, behind))
        if frame is None or (room := most - weighs - frame.weighs) < 0:
            return None
        others_weigh = _decoded(messages, others, room, depth_limit) if others else 0
        if others_weigh is None:
            return None
        known, fields = frame.request, frame.fields_in(body, start, end, self._member)
        reader = PromptReader(hasher, known.template)
        if begun is not None:
            reader.begun, begun.weighs = begun, weighs + others_weigh
        try:
            chain = chain_of(self._endpoint, fields, reader, frame.head, messages)
            name = session_name(chat.headers, fields, read_short, NAMES.get(self._endpoint))
        except (RequestError, *UNREADABLE):
            return None
        if begun is not None:
            self._beginnings.learn(hasher, body, begun)
        label = label_of(hasher, frame.scope, name) if name else None
        return replace(
            known,
            fields=fields,
            prompt=replace(known.prompt, chain=chain, label=label),
            prompt_bytes=chain.size,
            has_media=reader.content.has_media,
        )

    def _forget(self) -> None:
        self._known.clear()
        self._starts.clear()
        self._units = 0

    def add(self, body: bytes, request: Request, rules: ReadingRules) -> None:
        """request: what `parse_request` has made of the body. It is learned when it comes again."""
        fields = request.fields
        if rules.session_key is not SessionKey.PREFIX or not _READ_EACH_TIME.isdisjoint(fields):
            return
        if not plane.IS_BUILT or len(body) > LARGE_BYTES:
            return
        members = plane.members(body)
        if members is None or len(members) != len(fields):  # names with escapes, or one that occurs twice
            return
        _, _, start, end = next(one for one in members if one[0] == self._member)
        said = len(request.cache_salt) + sum(len(name) for name, *_ in members)
        if start + len(body) - end > LONGEST_FRAME_BYTES or said > MOST_SAID_BYTES:
            return
        digest, view = rules.hasher.digest, memoryview(body)
        name = rules.tenant, rules.salted, digest(view[:start]), digest(view[end:])
        if name in self._known:
            return
        if hash(name) not in self._seen:
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            self._seen.add(hash(name))
            return
        scope = scope_of(self._endpoint, rules.hasher, rules.tenant, request.prompt.model)
        rendered = rendered_of(self._endpoint, fields)
        head = PromptReader(rules.hasher, request.template, scope).head(request.cache_salt, rendered)
        units = len(head.tools.keys)
        if len(self._known) >= MOST_FRAMES or self._units + units > MOST_UNITS:
            self._forget()
        self._units += units
        values: Fields = {}
        if start + len(body) - end <= FRAME_BYTES:
            values = {
                member: msgspec.Raw(b"" if member == self._member else bytes(raw)) for member, raw in fields.items()
            }
        prompt = replace(request.prompt, chain=Chain((0,), (0,), rules.hasher), label=None)
        known = replace(request, fields=NO_FIELDS, prompt=prompt)
        weighs = plane.bones(b"0".join((body[:start], body[end:])))[2]
        self._starts.add(name[2])
        self._known[name] = _Frame(known, scope, head, tuple(members), values, end, weighs)


def _cuts(read: Callable[[Begun | None, int, int], Request | None]) -> LongTexts | None:
    """Of a prompt whose beginning was known; None also where its frame has been forgotten meanwhile."""
    request = read(None, sys.maxsize, sys.maxsize)
    return None if request is None else request.prompt.chain.long_texts


def _decoded(messages: list[Any], others: list[int], most: int, depth_limit: int) -> int | None:
    """What the messages at those places of the list weigh, which are decoded; None: there is too much in them."""
    weight = 0
    for at in others:
        depth, _, weighs = plane.bones(messages[at].raw)
        weight += weighs
        if depth > depth_limit - _MESSAGE_DEPTH:
            return None
    return weight if weight <= most and decode_others(messages, others) else None
