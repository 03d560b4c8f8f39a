"""A batch of KV events as vLLM publishes it: msgpack `[time, events, data-parallel rank]`.

Events are maps with their `type` since vLLM 0.24, and arrays that begin with it before. Source: vLLM's
`distributed/kv_events.py`, 0.9 to 0.33. Token ids are passed over, as block hashes name what they hold, unless they are
asked for (see `block_tokens`).
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import msgspec

from ..errors import FormatError
from .block_tokens import UnreadTokens

BLOCK_TOKENS_LIMIT = 65_536
EVENTS_LIMIT = 200_000  # of a batch: an engine removes blocks one by one, and may make room for a long prompt at once
FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")

_BITS = 0xFFFF_FFFF_FFFF_FFFF
_NIL = msgspec.Raw(b"\xc0")
_NAME = re.compile("ppd-([0-9a-f]{15})")
_Hash = int | bytes
_GPU = ("GPU", None)  # None: engines up to 0.10, which had no other


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that follow each other, cached for one request, which holds all blocks before them too."""

    hashes: array[int]  # 64 bits each
    parent: int | None  # the block before the first; None: the prompt begins here
    block_tokens: int
    group: int
    session: int | None  # as `session_name` named it; None for any other name
    tokens: UnreadTokens | None = None  # where they are asked for


class Removed(msgspec.Struct, frozen=True, gc=False):
    hashes: array[int]  # 64 bits each
    group: int


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The whole cache."""


CacheChange = Stored | Removed | Cleared


class EventBatch(msgspec.Struct, frozen=True):
    time_s: float  # on the engine's clock
    changes: list[CacheChange]  # of the engine's own memory
    passed_over: Counter[str]  # other events, by why they are


_MOST_EVENTS = msgspec.Meta(max_length=EVENTS_LIMIT)  # looked at before any of them is


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: Annotated[list[msgspec.Raw], _MOST_EVENTS]


class _Rank(msgspec.Struct, array_like=True):
    ts: float
    events: msgspec.Raw
    data_parallel_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _StoredMap(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: msgspec.Raw
    block_size: int
    medium: str | None = None
    lora_name: msgspec.Raw = _NIL
    extra_keys: msgspec.Raw = _NIL
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: msgspec.Raw = _NIL
    medium: str | None = None
    lora_name: msgspec.Raw = _NIL
    extra_keys: msgspec.Raw = _NIL
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: msgspec.Raw = _NIL
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class _RemovedMap(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class _RemovedArray(_RemovedMap, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class _MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: Annotated[list[_StoredMap | _RemovedMap | _ClearedMap], _MOST_EVENTS]


_Event = _StoredMap | _RemovedMap | _ClearedMap | _StoredArray | _RemovedArray | _ClearedArray
_KNOWN = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_MAP_BATCH = msgspec.msgpack.Decoder(_MapBatch)
_RAW_BATCH = msgspec.msgpack.Decoder(_RawBatch)
_RANK = msgspec.msgpack.Decoder(_Rank)
_MAP: msgspec.msgpack.Decoder[_StoredMap | _RemovedMap | _ClearedMap] = msgspec.msgpack.Decoder(
    _StoredMap | _RemovedMap | _ClearedMap
)
_ARRAY: msgspec.msgpack.Decoder[_StoredArray | _RemovedArray | _ClearedArray] = msgspec.msgpack.Decoder(
    _StoredArray | _RemovedArray | _ClearedArray
)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)


def decode(payload: bytes | memoryview, *, reads_tokens: bool = False) -> EventBatch:
    """FormatError for what is no batch, and for an event of a known type that lacks anything."""
    try:
        batch = _MAP_BATCH.decode(payload)
        return _batch(batch.ts, batch.events, reads_tokens)
    except _UNREADABLE:
        pass  # arrays, an event of another type, or no batch at all
    try:
        raw = _RAW_BATCH.decode(payload)
    except _UNREADABLE as exc:
        raise FormatError("KV events: not a batch") from exc
    return _batch(raw.ts, map(_event, raw.events), reads_tokens)


def _batch(time_s: float, events: Iterable[_Event | None], reads_tokens: bool) -> EventBatch:
    passed_over = Counter[str]()
    changes = list[CacheChange]()
    for event in events:
        change = _change(event, reads_tokens)
        if isinstance(change, str):
            passed_over[change] += 1
        else:
            changes.append(change)
    return EventBatch(time_s, changes, passed_over)


def rank_of(payload: bytes | memoryview) -> int:
    """The data-parallel rank of a batch, without the rest of it; FormatError for what is no batch."""
    try:
        return _RANK.decode(payload).data_parallel_rank or 0
    except _UNREADABLE as exc:
        raise FormatError("KV events: not a batch") from exc


def time_of(payload: bytes | memoryview) -> float:
    """When a batch was made, on the engine's clock; FormatError for what is no batch."""
    try:
        return _RANK.decode(payload).ts
    except _UNREADABLE as exc:
        raise FormatError("KV events: not a batch") from exc


def _event(raw: msgspec.Raw) -> _Event | None:
    """None for a type that is not known."""
    view = memoryview(raw)
    is_map = view[0] & 0xF0 == 0x80 or view[0] in (0xDE, 0xDF)
    try:
        return _MAP.decode(view) if is_map else _ARRAY.decode(view)
    except _UNREADABLE as exc:
        if _type_of(view) in _KNOWN:
            raise FormatError("KV events: an event of another shape") from exc
        return None


def _change(event: _Event | None, reads_tokens: bool) -> CacheChange | str:
    """The change, or why the event is none of the engine's own memory."""
    if event is None:
        return "unknown_type"
    if isinstance(event, (_ClearedMap, _ClearedArray)):
        return Cleared()
    # CPU offload and stores behind the engine are not what a prompt finds at once, so they do not count as held.
    if event.medium not in _GPU or event.locality == "REMOTE" or event.ownership:
        return "other_medium"
    if isinstance(event, _RemovedMap):
        return Removed(_keys(event.block_hashes), event.group_idx or 0)
    return _stored(event, reads_tokens)


def _stored(event: _StoredMap | _StoredArray, reads_tokens: bool) -> Stored | str:
    if event.kv_cache_spec_kind is not None and event.kv_cache_spec_kind not in FULL_ATTENTION:
        return "other_attention"
    if not 0 < event.block_size <= BLOCK_TOKENS_LIMIT:
        raise FormatError("KV events: block_size is out of range")
    if _length(memoryview(event.token_ids)) != len(event.block_hashes) * event.block_size:
        return "not_contiguous"  # some blocks between are not cached, as of sliding windows
    return Stored(
        _keys(event.block_hashes),
        None if event.parent_block_hash is None else _key(event.parent_block_hash),
        event.block_size,
        event.group_idx or 0,
        session_named(event.session_id),
        UnreadTokens(event.token_ids, event.extra_keys, event.lora_name) if reads_tokens else None,
    )


def session_name(session: int) -> str:
    """What engines are told: as short as it can be, and nothing that a client has chosen. session: 60 bits."""
    return f"ppd-{session:015x}"


def session_named(name: str | None) -> int | None:
    match = None if name is None else _NAME.fullmatch(name)
    return None if match is None else int(match[1], 16)


def _keys(hashes: list[_Hash]) -> array[int]:
    try:
        return array("Q", hashes)  # type: ignore[arg-type]  # bytes and negative numbers are refused
    except (TypeError, OverflowError):
        return array("Q", map(_key, hashes))


def _key(one: _Hash) -> int:
    """64 bits: of a digest the last ones, which is what vLLM sends in its place by default."""
    return int.from_bytes(one[-8:]) if isinstance(one, bytes) else one & _BITS


def _length(array: memoryview) -> int:
    """Of a msgpack array."""
    first = array[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F
    if first == 0xDC:
        return int.from_bytes(array[1:3])
    if first == 0xDD:
        return int.from_bytes(array[1:5])
    raise FormatError("KV events: token_ids is not a list")


def _type_of(event: memoryview) -> object:
    try:
        found = msgspec.msgpack.decode(event)
    except _UNREADABLE:
        return None
    if isinstance(found, dict):
        return found.get("type")
    return found[0] if isinstance(found, list) and found else None
