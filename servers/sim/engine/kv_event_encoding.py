"""Batches of KV events as msgpack: `[time, events, data-parallel rank]`.

vLLM up to 0.23 sends each event as an array that begins with its type, 0.24 and later as a map. Members with their
default value are left out of a map, and off the end of an array.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ..core.block_pool import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from ..core.config import EventEncoding

_MEDIUM, _GROUP, _RANK = "GPU", 0, 0


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True, omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[Any] | None = None  # for each block
    group_idx: int | None = None


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True, omit_defaults=True):
    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class _StoredMap(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    session_id: str | None = None


class _RemovedMap(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


_Stored = _StoredArray | _StoredMap


def encode_batch(
    events: Iterable[CacheEvent], *, time_s: float, block_size: int, encoding: EventEncoding = EventEncoding.MAP
) -> bytes:
    """Blocks that follow each other share an event."""
    is_map = encoding is EventEncoding.MAP
    removed, cleared = (_RemovedMap, _ClearedMap) if is_map else (_RemovedArray, _ClearedArray)
    batch: list[Any] = []
    last: BlockStored | None = None
    for event in events:
        if isinstance(event, BlockStored):
            if last is not None and _follows(event, last):
                _extend(batch[-1], event)
            else:
                batch.append(_stored(event, block_size, is_map=is_map))
            last = event
            continue
        last = None
        if isinstance(event, BlockRemoved):
            batch.append(removed(block_hashes=[event.block_hash], medium=_MEDIUM, group_idx=_GROUP))
        else:
            assert isinstance(event, AllBlocksCleared)
            batch.append(cleared())
    return msgspec.msgpack.encode([time_s, batch, _RANK])


def _follows(event: BlockStored, last: BlockStored) -> bool:
    return event.parent_hash == last.block_hash and event.session_id == last.session_id


def _extend(stored: _Stored, event: BlockStored) -> None:
    assert stored.extra_keys is not None
    stored.block_hashes.append(event.block_hash)
    stored.token_ids += event.tokens
    stored.extra_keys.append(_extra_keys(event))


def _stored(event: BlockStored, block_size: int, *, is_map: bool) -> _Stored:
    members: dict[str, Any] = {
        "block_hashes": [event.block_hash],
        "parent_block_hash": event.parent_hash,
        "token_ids": list(event.tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": _MEDIUM,
        "lora_name": event.namespace.lora,
        "extra_keys": [_extra_keys(event)],
        "group_idx": _GROUP,
    }
    return _StoredMap(**members, session_id=event.session_id) if is_map else _StoredArray(**members)


def _extra_keys(event: BlockStored) -> list[str] | None:
    """The LoRA adapter for every block, the cache salt for a prompt's first; None without both."""
    keys = [event.namespace.lora, event.namespace.cache_salt if event.parent_hash is None else None]
    return [key for key in keys if key is not None] or None
