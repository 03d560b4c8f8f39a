"""Reads request bodies: small ones here, and those that would keep the event loop for too long in a helper process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from .. import plane
from ..admission.keys import Client
from ..config import ProxyConfig
from ..errors import RequestError
from ..openai.answer import AnswerObserver
from ..openai.body_members import Members
from ..openai.prompts.reader import PromptReader
from ..openai.reply_key import ReplyKey
from ..openai.request import MESSAGES_MEMBER, Endpoint, ReadingRules, ReadPrompt, Request, parse_request, request_of
from ..openai.units import weight
from ..sessions.hasher import Hasher
from ..sessions.prefix_chain import Chain
from ..sessions.templates import Templates
from ..sessions.text_cuts import TextCuts
from .body_worker import ForwardedBody, ReadAnswer, ReadForwarded, ReadTurn, TurnBody, Unreadable, WholeAnswer
from .forwarded import read_forwarded
from .helper_process import HelperProcess
from .known_frames import KnownFrames
from .named_media import with_named_media
from .shared_bytes import LARGE_BYTES, SharedBytes

Body = bytes | SharedBytes
T = TypeVar("T")

_SHORT_BYTES = 4096
_INTRICATE = 20_000
"""Values in a body: more take 5 to 30 ms to read here, and a body with them goes to the helper."""
_INTRICATE_ITEMS = 10_000
"""The same in a body of Responses, whose items of unusual kinds take twice as long."""
_TURN = msgspec.msgpack.Decoder(tuple[TurnBody | None, Unreadable | None])
_ANSWER = msgspec.msgpack.Decoder(tuple[WholeAnswer | None, Unreadable | None])
_FORWARDED = msgspec.msgpack.Decoder(tuple[ForwardedBody | None, Unreadable | None])


class Helper(Protocol):
    """See `HelperProcess`."""

    async def ask(self, name: str, arguments: bytes, shared: SharedBytes) -> tuple[bytes, SharedBytes | None]: ...

    async def close(self) -> None: ...


class BodyReader:
    def __init__(
        self,
        config: ProxyConfig,
        hasher: Hasher,
        aliases: Callable[[], Mapping[str, str]] = dict,
        helper: Helper | None = None,
        templates: Callable[[], Templates] = Templates,
    ) -> None:
        """aliases: the one name by which sessions know a model, for each other name of it."""
        self._config = config
        self._aliases = aliases
        self._templates = templates
        self._hasher = hasher
        self._frames = {endpoint: KnownFrames(endpoint) for endpoint in MESSAGES_MEMBER}
        self._helper = helper or HelperProcess("ppd.proxy.bodies.body_worker")

    async def close(self) -> None:
        await self._helper.close()

    async def turn(self, endpoint: Endpoint, headers: Mapping[str, str], client: Client, body: Body) -> Request:
        """RequestError (400) for an invalid body."""
        config, most = self._config, _INTRICATE_ITEMS if endpoint is Endpoint.RESPONSES else _INTRICATE
        frames = self._frames.get(endpoint)
        if frames is not None and isinstance(body, bytes) and len(body) <= LARGE_BYTES:
            room, limit = min(most, config.request_units_limit), config.json_depth_limit
            known = frames.request(body, headers, self._rules(client), most=room, depth_limit=limit)
            if known is not None:
                return self._named(known, client) if known.has_media else known
        if isinstance(body, bytes) and (looked := look(body))[0] <= most:
            weighs, depth = looked
            units_limit, depth_limit = config.request_units_limit, config.json_depth_limit
            rules = self._rules(
                client,
                depth_limit=None if depth <= depth_limit else depth_limit,
                units_limit=None if weighs <= units_limit else units_limit,
            )
            request = parse_request(endpoint, body, headers, rules)
            if frames is not None:
                frames.add(body, request, rules)
            return self._named(request, client)
        how = ReadTurn(
            endpoint=endpoint,
            headers=dict(headers),
            tenant=client.tenant,
            scope=client.scope,
            aliases=dict(self._aliases()),
            templates=self._templates(),
            secret=self._hasher.secret,
            session_key=config.session_key,
            depth_limit=config.json_depth_limit,
            units_limit=config.request_units_limit,
            media_limit=config.media_limit,
        )
        shared = SharedBytes.of([body]) if isinstance(body, bytes) else body
        answer, new = await self._helper.ask("turn", msgspec.msgpack.encode(how), shared)
        return self._request(how, _read(_TURN, answer), shared.view(), b"" if new is None else new.view())

    def _rules(self, client: Client, depth_limit: int | None = None, units_limit: int | None = None) -> ReadingRules:
        return ReadingRules(
            hasher=self._hasher,
            tenant=client.tenant,
            session_key=self._config.session_key,
            depth_limit=depth_limit,
            units_limit=units_limit,
            salted=None if client.scope is None else client.scope.salt,
            aliases=self._aliases(),
            templates=self._templates(),
        )

    def _named(self, request: Request, client: Client) -> Request:
        return with_named_media(request, client.tenant, self._config.media_limit) if request.has_media else request

    def _request(self, how: ReadTurn, found: TurnBody, body: memoryview, new: bytes | memoryview) -> Request:
        view = memoryview(new)
        text = view[: found.new_body_bytes] if found.new_body_bytes else body
        fields = Members(
            {name: msgspec.Raw(text[start:end]) for name, _, start, end in found.members},
            text,
            {name: (start, end) for name, start, _, end in found.members},
        )
        unit = None
        if found.open_message:
            mask = found.keys[found.marks.head] ^ found.keys[0]
            unit = PromptReader(self._hasher, found.template).open_unit(found.keys[-2] ^ mask, found.open_message)
        chain = Chain(
            tuple(found.keys),
            tuple(found.ends),
            self._hasher,
            view[found.new_body_bytes :],
            found.tail,
            found.is_text,
            unit,
            found.marks,
            is_blocks=found.is_blocks,
            long_texts=TextCuts(found.cuts) if found.cuts else None,
            texts=found.kinds,
        )
        known = ReadPrompt(chain, found.count, found.opener)
        request = request_of(how.endpoint, fields, how.headers, how.rules(self._hasher), known)
        if found.media:
            request = msgspec.structs.replace(request, has_media=True, media=found.media)
        if found.prompts is None:
            return request
        prompts = tuple(msgspec.Raw(text[start:end]) for start, end in found.prompts)
        return msgspec.structs.replace(request, prompts=prompts)

    async def forwarded(self, content_type: str, body: Body, client: Client, path: str) -> tuple[str, Body]:
        """The model that it names, and the body that a worker may see."""
        depth_limit = self._config.json_depth_limit
        if isinstance(body, bytes) and look(body)[0] <= _INTRICATE:
            return read_forwarded(content_type, body, client, depth_limit, path)
        asked = ReadForwarded(content_type=content_type, client=client, depth_limit=depth_limit, path=path)
        shared = SharedBytes.of([body]) if isinstance(body, bytes) else body
        answer, new = await self._helper.ask("forwarded", msgspec.msgpack.encode(asked), shared)
        return _read(_FORWARDED, answer).model, new or body

    async def answer(self, body: SharedBytes, how: ReadAnswer, seen: AnswerObserver, reply: ReplyKey) -> SharedBytes:
        """What the client gets of a large answer. `seen` and `reply` learn what they would of a small one."""
        answer, new = await self._helper.ask("answer", msgspec.msgpack.encode(how), body)
        found = _read(_ANSWER, answer)
        seen.adopt(found.summary)
        if found.pieces is None:
            reply.give_up()
        for piece in found.pieces or ():
            if isinstance(piece, tuple):
                reply.add_tool_call(*piece)
            elif piece is None:
                reply.add_reasoning()
            else:
                reply.add_text(piece)
        return new or body


def body_of(parts: Sequence[bytes | memoryview]) -> Body:
    return b"".join(parts) if sum(map(len, parts)) <= LARGE_BYTES else SharedBytes.of(parts)


def look(body: bytes) -> tuple[float, float]:
    """How much a body weighs, which is at least as many values as it has, and how deep it is nested at most.

    Large bodies are not looked at here. Without compiled code, a short one weighs at most its bytes.
    """
    if len(body) > LARGE_BYTES:
        return math.inf, math.inf
    if plane.IS_BUILT:
        depth, _, weighs = plane.bones(body)
        return weighs, depth
    return weight(body) if len(body) > _SHORT_BYTES else len(body), math.inf


def _read(decoder: msgspec.msgpack.Decoder[tuple[T | None, Unreadable | None]], answer: bytes) -> T:
    found, refused = decoder.decode(answer)
    if refused is not None:
        raise _error(refused)
    assert found is not None, "it was read, or refused"
    return found


def _error(refused: Unreadable) -> RequestError:
    error = RequestError(refused.message, param=refused.param)
    error.status = refused.status
    return error
