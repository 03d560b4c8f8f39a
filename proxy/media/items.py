"""The media of a request: each item has a name made of its tenant and content, which is its part's `uuid` on every leg.

Engines know an encoded item, and the KV blocks after it, by that `uuid`. A client's own is replaced: it could claim
another tenant's item, or make an item new with every turn.
"""

from __future__ import annotations

import binascii
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec
from blake3 import blake3

from ..errors import RequestError
from .picture_size import pixels

MEDIA_LIMIT = 512
NAME_BYTES = 16
UUID = "uuid"

Members = dict[str, msgspec.Raw]


class MediaKind(StrEnum):
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"


class MediaItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One media part of a prompt."""

    kind: MediaKind
    name: str
    unit: int  # its message or item, from 0
    start: int  # its part's place in the JSON of the prompt's member
    end: int
    size_bytes: int = 0  # of its data; 0: only its URL is known
    pixels: int = 0  # of an image; 0: not known

    @property
    def is_by_url(self) -> bool:
        """An engine has to fetch it."""
        return not self.size_bytes


# Kinds by the `type` of a part: chat's, Responses' and Messages'. An item that is already encoded (`..._embeds`) has
# only its `uuid` replaced.
KINDS: Mapping[str, MediaKind] = {
    "image_url": MediaKind.IMAGE,
    "input_image": MediaKind.IMAGE,
    "image": MediaKind.IMAGE,
    "audio_url": MediaKind.AUDIO,
    "input_audio": MediaKind.AUDIO,
    "video_url": MediaKind.VIDEO,
}
_EMBEDS = frozenset(("image_embeds", "audio_embeds", "video_embeds"))
_CHAT = frozenset(("image_url", "audio_url", "input_audio", "video_url"))  # as encoders get them
# By these vLLM finds what a part holds, whatever its `type` says, if it has no type or a `uuid`. An `image_pil` is no
# JSON: with a `uuid` alone it would be another's image.
_DIRECT = ("image_url", "image_embeds", "audio_embeds", "video_embeds", "audio_url", "input_audio", "video_url")
_ALL_DIRECT = frozenset((*_DIRECT, "image_pil"))
_HELD_AS = {"input_image": "image_url", "image": "source"}  # types whose content is in another member
_FRAMES = "video/jpeg"  # a video that is its frames, with commas between, as vLLM takes it
_HOLDERS = ("content", "output")  # members with parts in them


class _Named(NamedTuple):
    """A part as it is sent on. item: its places are not known yet; None: it is no item."""

    json: bytes
    item: MediaItem | None


_Piece = bytes | _Named


def media_type(part: Members) -> str | None:
    """The type of a media part; of one without a type, or with a client's `uuid`, as vLLM takes it."""
    kind = _string(part.get("type"))
    if kind in KINDS or kind in _EMBEDS:
        return kind
    if kind is None or UUID in part:
        return next((name for name in _DIRECT if name in part), None)
    return None


def named(
    prompt: msgspec.Raw, member: str, tenant: str, limit: int = MEDIA_LIMIT, no_units: Collection[str] = ()
) -> tuple[msgspec.Raw, list[MediaItem]]:
    """The prompt's member with a name in each media part, and its items in order.

    prompt: a list of messages or items; no_units: types of items that count as none. RequestError for data that are no
    base64, other URLs than http and https, parts without content, and more than `limit` items.
    """
    naming = _Naming(member, tenant, limit, no_units)
    units = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    pieces = _listed([naming.unit(raw) for raw in units])
    at, items = 0, list[MediaItem]()
    for piece in pieces:
        size = len(piece.json if isinstance(piece, _Named) else piece)
        if isinstance(piece, _Named) and piece.item is not None:
            items.append(msgspec.structs.replace(piece.item, start=at, end=at + size))
        at += size
    return msgspec.Raw(b"".join(piece.json if isinstance(piece, _Named) else piece for piece in pieces)), items


class _Naming:
    def __init__(self, member: str, tenant: str, limit: int, no_units: Collection[str]) -> None:
        self._member = member
        self._no_units = no_units
        self._tenant = tenant
        self._limit = limit
        self._count = 0
        self._unit = -1

    def unit(self, raw: msgspec.Raw) -> list[_Piece]:
        members = msgspec.json.decode(raw, type=Members)
        kind = _string(members.get("type"))
        self._unit += kind not in self._no_units
        if (kind in KINDS or kind in _EMBEDS) and "role" not in members:
            return self._part(raw)  # an item of Responses may be a part itself
        return self._holder(members) or [bytes(raw)]

    def _holder(self, holder: Members) -> list[_Piece]:
        """A message, or a part with parts in it; nothing where it holds no media."""
        inner = {name: pieces for name in _HOLDERS if (pieces := self._parts(holder.get(name)))}
        return _object_of(holder, inner) if inner else []

    def _parts(self, raw: msgspec.Raw | None) -> list[_Piece]:
        if raw is None or bytes(memoryview(raw)[:1]) != b"[":
            return []
        parts = msgspec.json.decode(raw, type=list[msgspec.Raw])
        found = [self._part(part) for part in parts]
        return _listed(found) if found != [[bytes(part)] for part in parts] else []

    def _part(self, raw: msgspec.Raw) -> list[_Piece]:
        part = _object(raw)
        if part is None:
            return [bytes(raw)]
        kind = media_type(part)
        if kind is None:
            if UUID not in part:
                return self._holder(part) or [bytes(raw)]
            bare = _without(part, UUID)
            return self._holder(bare) or [msgspec.json.encode(bare)]
        rest = _without(part, UUID, *(_ALL_DIRECT - {_HELD_AS.get(kind, kind)}))
        if kind in _EMBEDS:
            self._count_one()
            name = self._name(kind, b"e", msgspec.json.encode(part.get(kind)))
            return [_Named(msgspec.json.encode({**rest, UUID: name}), None)]
        content = self._content(kind, part)
        if content is None:  # a file that the engine keeps
            return [_Named(msgspec.json.encode(rest), None)]
        self._count_one()
        item = self._item(kind, content)
        return [_Named(msgspec.json.encode({**rest, UUID: item.name}), item)]

    def _count_one(self) -> None:
        self._count += 1
        if self._count > self._limit:
            said = f"{self._member}: holds more than {self._limit} images, sounds and videos (media_limit)"
            raise RequestError(said, param=self._member)

    def _item(self, kind: str, content: str | bytes) -> MediaItem:
        what = KINDS[kind]
        if isinstance(content, str):
            return MediaItem(what, self._name(what, b"u", content.encode("utf-8", "surrogatepass")), self._unit, 0, 0)
        size = pixels(content) if what is MediaKind.IMAGE else 0
        return MediaItem(what, self._name(what, b"d", content), self._unit, 0, 0, len(content), size)

    def _name(self, kind: str, how: bytes, content: bytes) -> str:
        """Always the same, as engines outlive the proxy. how: what the content is."""
        state = blake3("\0".join(("ppd media", self._tenant, kind)).encode("utf-8", "surrogatepass") + b"\xff" + how)
        return state.update(content).hexdigest(length=NAME_BYTES)

    def _content(self, kind: str, part: Members) -> str | bytes | None:
        """Data, or a URL; None: it names a file that the engine keeps."""
        match kind:
            case "input_audio":
                return self._data(kind, _string((_object(part.get(kind)) or {}).get("data")))
            case "image":
                source = _object(part.get("source")) or {}
                if _string(source.get("type")) == "base64":
                    return self._data(kind, _string(source.get("data")))
                url = _string(source.get("url"))
                is_file = "file_id" in source
            case _:
                name = "image_url" if kind == "input_image" else kind
                url = _string(part.get(name)) or _string((_object(part.get(name)) or {}).get("url"))
                is_file = "file_id" in part
        return None if url is None and is_file else self._url(kind, url)

    def _url(self, kind: str, url: str | None) -> str | bytes:
        if not url:
            raise self._refused(kind, "must have a URL or data")
        scheme = url[:8].lower()
        if scheme.startswith("data:"):
            head, comma, data = url.partition(",")
            if not comma or not head.lower().endswith(";base64"):
                raise self._refused(kind, "must have its data URL in base64, as data:image/png;base64,...")
            is_frames = kind == "video_url" and head[len("data:") :].partition(";")[0].lower() == _FRAMES
            return self._frames(kind, data) if is_frames else self._data(kind, data)
        if not scheme.startswith(("http://", "https://")):
            raise self._refused(kind, "must have an http, https or data URL")
        return url

    def _data(self, kind: str, data: str | None) -> bytes:
        if data is None:
            raise self._refused(kind, "must have a URL or data")
        try:
            return binascii.a2b_base64(data.translate(_SPACE), strict_mode=True)
        except ValueError:
            raise self._refused(kind, "must have its data in base64") from None

    def _frames(self, kind: str, data: str) -> bytes:
        """Each with its size before it: other frames may be the same bytes in a row."""
        frames = [self._data(kind, frame) for frame in data.split(",")]
        return b"".join(part for frame in frames for part in (len(frame).to_bytes(8), frame))

    def _refused(self, kind: str, allowed: str) -> RequestError:
        return RequestError(f"{self._member}: a part of type {kind} {allowed}", param=self._member)


_SPACE = dict.fromkeys(map(ord, " \t\r\n"))


def without_names(value: object) -> bool:
    """Takes the clients' names out of all media within a decoded value; whether there were any."""
    if isinstance(value, list):
        in_each = [without_names(each) for each in value]  # of all of them
        return any(in_each)
    if not isinstance(value, dict):
        return False
    is_media = any(name in value or value.get("type") == name for name in (*KINDS, *_ALL_DIRECT))
    was_named = is_media and value.pop(UUID, None) is not None
    return without_names(list(value.values())) or was_named


# -- parts for encoders, and parts without their data


def chat_part(part: msgspec.Raw, name: str) -> bytes:
    """A named part as chat completions take it: only there is a `uuid` heard, and only encoders of chats are known."""
    members = _object(part) or {}
    kind = media_type(members)
    if kind in _CHAT:
        return bytes(part)
    source = _object(members.get("source")) or {}
    if "data" in source:
        head = f"data:{_string(source.get('media_type')) or 'image/png'};base64,"
        url = msgspec.Raw(b'"%b' % msgspec.json.encode(head)[1:-1] + bytes(source["data"])[1:])
    else:
        held = source.get("url") or members.get("image_url") or msgspec.Raw(b"null")
        url = (_object(held) or {"url": held})["url"]
    return msgspec.json.encode({"type": "image_url", "image_url": {"url": url}, UUID: name})


def metadata_part(kind: MediaKind, metadata: msgspec.Raw, name: str) -> bytes:
    """What stands for an item whose embedding the engine gets from its encoder."""
    member = f"{kind}_embeds"
    return msgspec.json.encode({"type": member, member: metadata, UUID: name})


def part_of(prompt: msgspec.Raw, item: MediaItem) -> msgspec.Raw:
    return msgspec.Raw(memoryview(prompt)[item.start : item.end])


def replaced(prompt: msgspec.Raw, parts: Iterable[tuple[MediaItem, bytes]]) -> msgspec.Raw:
    """The prompt's member with other parts in place of these items'. parts: in the items' order."""
    view, at, pieces = memoryview(prompt), 0, list[bytes | memoryview]()
    for item, part in parts:
        pieces += (view[at : item.start], part)
        at = item.end
    return msgspec.Raw(b"".join((*pieces, view[at:])))


# -- JSON in pieces


def _listed(elements: Sequence[Sequence[_Piece]]) -> list[_Piece]:
    pieces: list[_Piece] = [b"["]
    for at, element in enumerate(elements):
        pieces += (b",", *element) if at else element
    return [*pieces, b"]"]


def _object_of(members: Members, inner: Mapping[str, Sequence[_Piece]]) -> list[_Piece]:
    pieces: list[_Piece] = []
    for name, raw in members.items():
        pieces.append((b"," if pieces else b"{") + msgspec.json.encode(name) + b":")
        pieces += inner.get(name) or (bytes(raw),)
    return [*pieces, b"}"]


def _object(raw: msgspec.Raw | None) -> Members | None:
    if raw is None or bytes(memoryview(raw)[:1]) != b"{":
        return None
    return msgspec.json.decode(raw, type=Members)


def _without(part: Members, *names: str) -> Members:
    return {name: value for name, value in part.items() if name not in names}


def _string(raw: msgspec.Raw | None) -> str | None:
    if raw is None or bytes(memoryview(raw)[:1]) != b'"':
        return None
    return msgspec.json.decode(raw, type=str)
