"""What the helper process does: it reads one large body, with the functions that read a small one.

Its answers say where in the body things lie. So the proxy's own process makes the same `Request` without having looked
at more than a few bytes of it.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from ..admission.keys import Client
from ..admission.tenant_scope import TenantScope
from ..config import SessionKey
from ..errors import PPDError, RequestError
from ..media.items import MediaItem
from ..openai.answer import AnswerObserver, AnswerSummary
from ..openai.body_members import Fields, Places, members, places_in
from ..openai.edits import Edits, edited_body
from ..openai.form import is_form
from ..openai.request import Endpoint, ReadingRules, Request, parse_request
from ..openai.units import check_members
from ..sessions.hasher import Hasher
from ..sessions.prefix_chain import Marks
from ..sessions.templates import Template, Templates
from ..sessions.text_cuts import cuts_of
from ..sessions.text_kinds import kind_of
from .forwarded import read_forwarded
from .helper_process import serve
from .named_media import with_named_media

OPEN_MESSAGE_BYTES = 1024 * 1024
"""A last message that the reply continues is hashed again by the proxy itself, if it is no longer than this."""


PIECES_LIMIT = 1024 * 1024  # characters of an answer that are hashed
Piece = str | tuple[int, str | None, str | None, str] | None


class ReadTurn(msgspec.Struct, frozen=True, kw_only=True):
    """How to read a turn's body."""

    endpoint: Endpoint
    headers: dict[str, str]
    tenant: str
    scope: TenantScope | None
    aliases: dict[str, str]  # of models
    templates: Templates
    secret: bytes  # of the hasher
    session_key: SessionKey
    depth_limit: int
    units_limit: int
    media_limit: int

    def rules(self, hasher: Hasher) -> ReadingRules:
        return ReadingRules(
            hasher=hasher,
            tenant=self.tenant,
            session_key=self.session_key,
            depth_limit=self.depth_limit,
            units_limit=self.units_limit,
            salted=None if self.scope is None else self.scope.salt,
            aliases=self.aliases,
            templates=self.templates,
        )


class TurnBody(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in a turn's body.

    The new shared bytes are the body encoded anew, if it was, and then the bytes of a raw prompt.
    """

    members: list[tuple[str, int, int, int]]  # each name, where it starts, where its value starts and ends
    new_body_bytes: int = 0  # 0: the members lie in the body as it came
    keys: list[int]
    ends: list[int]
    kinds: tuple[int, ...]  # of the newest units' texts
    marks: Marks
    template: Template
    tail: bytes
    is_text: bool
    is_blocks: bool
    cuts: list[tuple[int, int]]
    count: int
    opener: str | None
    prompts: list[tuple[int, int]] | None = None  # start and end of each, in the body, of a list of prompts
    media: tuple[MediaItem, ...] = ()
    open_message: bytes = b""  # the last one, if the reply continues it


class ReadForwarded(msgspec.Struct, frozen=True, kw_only=True):
    content_type: str
    client: Client
    depth_limit: int
    path: str


class ForwardedBody(msgspec.Struct, frozen=True):
    model: str


class ReadAnswer(msgspec.Struct, frozen=True):
    """How to read a worker's whole answer."""

    endpoint: Endpoint
    cached_tokens: int | None
    reads_handle: bool = False  # and hides the ids of tokens that are asked for with it
    hides: tuple[str, str] | None = None  # as of `Edits`


class WholeAnswer(msgspec.Struct, frozen=True):
    """What was found in an answer, and what its sink is to be fed, in order: texts, tool calls' pieces, None for
    reasoning. No pieces where they are longer than any conversation goes on with."""

    summary: AnswerSummary
    pieces: list[Piece] | None


class Unreadable(msgspec.Struct, frozen=True):
    """A RequestError."""

    message: str
    param: str | None
    status: int


def main(fd: int) -> None:
    serve(fd, TASKS)


def _turn(arguments: bytes, view: memoryview) -> tuple[bytes, bytes | None]:
    try:
        found, new = read_turn(msgspec.msgpack.decode(arguments, type=ReadTurn), bytes(view))
        return msgspec.msgpack.encode([found, None]), new
    except PPDError as exc:
        return _refused(exc), None


def _forwarded(arguments: bytes, view: memoryview) -> tuple[bytes, bytes | None]:
    asked, body = msgspec.msgpack.decode(arguments, type=ReadForwarded), bytes(view)
    try:
        if not is_form(asked.content_type):
            check_members(body)
        model, public = read_forwarded(asked.content_type, body, asked.client, asked.depth_limit, asked.path)
    except PPDError as exc:
        return _refused(exc), None
    return msgspec.msgpack.encode([ForwardedBody(model), None]), None if public is body else public


def _answer(arguments: bytes, view: memoryview) -> tuple[bytes, bytes | None]:
    how, body = msgspec.msgpack.decode(arguments, type=ReadAnswer), bytes(view)
    kept = _Pieces()
    observer = AnswerObserver(how.endpoint, kept, reads_handle=how.reads_handle)
    observer.observe_body(body)
    edits = Edits(cached_tokens=how.cached_tokens, hide_token_ids=how.reads_handle, hides=how.hides)
    shown = edited_body(body, edits)
    found = WholeAnswer(observer.summary, kept.pieces if kept.size <= PIECES_LIMIT else None)
    return msgspec.msgpack.encode([found, None]), None if shown is body else shown


class _Pieces:
    """An `AnswerSink` that keeps everything."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.size = 0

    def add_text(self, text: str) -> None:
        self.pieces.append(text)
        self.size += len(text)

    def add_tool_call(self, index: int, id: str | None, name: str | None, arguments: str) -> None:
        self.pieces.append((index, id, name, arguments))
        self.size += len(arguments) + len(id or "") + len(name or "") + 100

    def add_reasoning(self) -> None:
        self.pieces.append(None)
        self.size += 1


TASKS = {"turn": _turn, "forwarded": _forwarded, "answer": _answer}


def _refused(exc: PPDError) -> bytes:
    return msgspec.msgpack.encode([None, Unreadable(exc.message, exc.param, exc.status)])


def read_turn(how: ReadTurn, body: bytes) -> tuple[TurnBody, bytes | None]:
    check_members(body)
    request = parse_request(how.endpoint, body, how.headers, how.rules(_hasher(how.secret)))
    if request.has_media:
        request = with_named_media(request, how.tenant, how.media_limit)
    places, new_body = _placed(body, request.fields)
    text = new_body or body
    starts = {name: end - memoryview(request.fields[name]).nbytes for name, (_, end) in places.items()}
    chain = request.prompt.chain
    found = TurnBody(
        members=[(name, start, starts[name], end) for name, (start, end) in places.items()],
        new_body_bytes=len(new_body),
        keys=list(chain.keys),
        ends=list(chain.ends),
        kinds=tuple(map(kind_of, chain.texts)),
        marks=chain.marks,
        template=request.template,
        tail=chain.tail,
        is_text=chain.is_text,
        is_blocks=chain.is_blocks,
        cuts=list(cuts_of(chain)),
        count=_count(request),
        opener=request.prompt.opener,
        prompts=_prompts(request, text, starts.get("prompt", 0)),
        media=request.media,
        open_message=_open_message(request),
    )
    return found, new_body + bytes(chain.data) or None


@lru_cache(1)
def _hasher(secret: bytes) -> Hasher:
    return Hasher(secret)


def _placed(body: bytes, fields: Fields) -> tuple[Places, bytes]:
    """Where the members lie, in the body or in the new one: if it holds a name twice, or written with escapes."""
    places = places_in(body, fields)
    if places is not None:
        return places, b""
    new = msgspec.json.encode(dict(fields))
    places = places_in(new, members(msgspec.Raw(new)) or {})
    if places is None:
        raise RequestError("the name of a member of a large body must need no escapes")
    return places, new


def _count(request: Request) -> int:
    """Of its prompts; `choices` is that times n."""
    n = request.fields.get("n")
    return request.choices // (int(msgspec.json.decode(n) or 1) if n is not None else 1)


def _prompts(request: Request, body: bytes, start: int) -> list[tuple[int, int]] | None:
    raw = request.fields.get("prompt")
    if request.endpoint is not Endpoint.COMPLETIONS or raw is None or bytes(memoryview(raw)[:1]) != b"[":
        return None
    if _count(request) == 1 and bytes(memoryview(raw)[1:64]).lstrip(b" \t\r\n")[:1] not in (b'"', b"["):
        return None  # token ids
    found, at = list[tuple[int, int]](), start + 1
    for prompt in msgspec.json.decode(raw, type=list[msgspec.Raw]):
        at = body.index(memoryview(prompt), at)
        end = at + memoryview(prompt).nbytes
        found.append((at, end))
        at = end
    return found


def _open_message(request: Request) -> bytes:
    chain = request.prompt.chain
    if chain.open_unit is None:
        return b""
    last = bytes(msgspec.json.decode(request.fields["messages"], type=list[msgspec.Raw])[-1])
    return last if len(last) <= OPEN_MESSAGE_BYTES else b""
