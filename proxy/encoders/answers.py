"""An encoder's leg as it is sent, what its answer says of each item, and what the next legs get of it. Pure.

Source: vLLM's `ec_transfer_params`, 0.26 to 0.33. An answer without them is no failure: an E that shares a folder with
the others says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..errors import UNREADABLE
from ..media.items import MediaItem, chat_part, metadata_part, part_of, replaced
from ..openai.body_members import Edited, Part, encoded, members
from ..openai.request import MESSAGES_MEMBER, Endpoint, Fields, Request

LABEL = "encode"  # of an encoder's leg, in metrics, reports and logs
PARAMS = "ec_transfer_params"
_ALSO = ("mm_processor_kwargs", "media_io_kwargs", "priority", "session_id")  # members that E must have too


class _Entry(msgspec.Struct):
    item_indices: list[int] = []
    metadata: dict[str, msgspec.Raw] = {}
    peer_host: str | None = None


class _Answer(msgspec.Struct):
    ec_transfer_params: dict[str, msgspec.Raw] | None = None


class ItemPlace(msgspec.Struct, frozen=True):
    """What an E's answer says of one item."""

    item: MediaItem
    metadata: msgspec.Raw | None  # what may stand for it; None: nothing may


class EncodedItems(msgspec.Struct, frozen=True):
    """What the encoders have told of a turn's items: for the leg that computes the prompt."""

    params: dict[str, msgspec.Raw] = {}
    places: tuple[ItemPlace, ...] = ()
    hosts: tuple[msgspec.Raw, ...] = ()  # of encoders, as JSON strings: no client may learn them

    def joined(self, other: EncodedItems) -> EncodedItems:
        return EncodedItems({**self.params, **other.params}, (*self.places, *other.places), (*self.hosts, *other.hosts))

    def fields(self, request: Request, fields: Fields, *, computes: bool, strips: bool) -> Fields:
        """The members of a leg. computes: it is the leg that computes the prompt; strips: without data that E has."""
        changes: Fields = {}
        if strips and request.endpoint is Endpoint.CHAT and not _has_options(fields):
            metadata = {place.item.name: place.metadata for place in self.places}
            held = [(item, told) for item in request.media if (told := metadata.get(item.name)) is not None]
            if held:
                member = MESSAGES_MEMBER[request.endpoint]
                parts = ((item, metadata_part(item.kind, told, item.name)) for item, told in held)
                changes[member] = replaced(fields[member], parts)
        own = {PARAMS: encoded(self.params)} if computes and self.params else {}
        return Edited.of(fields, {**changes, **own}, own) if changes or own else fields


def leg_body(request: Request, items: Sequence[MediaItem]) -> tuple[Part, ...]:
    """One message with nothing but these items."""
    fields, prompt = request.fields, request.fields[MESSAGES_MEMBER[request.endpoint]]
    others = {name: fields[name] for name in _ALSO if name in fields}
    head = msgspec.json.encode({"model": request.model, "stream": False, "max_tokens": 1, **others})
    parts: list[Part] = [head[:-1], b',"messages":[{"role":"user","content":[']
    for at, item in enumerate(items):
        parts += (*((b",",) if at else ()), chat_part(part_of(prompt, item), item.name))
    return (*parts, b"]}]}")


def read_answer(answer: bytes, items: Sequence[MediaItem]) -> EncodedItems | None:
    """None where it is no answer of an encoder's. items: the leg's, in its order."""
    try:
        params = msgspec.json.decode(answer, type=_Answer).ec_transfer_params or {}
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in params.items()}
    except UNREADABLE:
        return None
    places = {place.item.name: place for name, entry in entries.items() for place in _places(name, entry, items)}
    hosts = {entry.peer_host for entry in entries.values() if entry.peer_host}
    return EncodedItems(params, tuple(places.values()), tuple(map(encoded, sorted(hosts))))


def _places(name: str, entry: _Entry, items: Sequence[MediaItem]) -> Iterable[ItemPlace]:
    """By their places in the leg; an engine with options of its own may know them by other names."""
    own = [items[at] for at in entry.item_indices if 0 <= at < len(items)] or [
        item for item in items if item.name == name
    ]
    metadata = encoded(entry.metadata) if entry.metadata else None
    return (ItemPlace(item, metadata) for item in own)


def _has_options(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether engines know the items by other names than ours, so that metadata cannot stand for them."""
    options = (members(fields[name]) for name in _ALSO[:2] if name in fields)
    return any(options)
