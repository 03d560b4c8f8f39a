"""KV events over ZeroMQ PUB, as vLLM 0.24 and later send them: `[topic, sequence number, msgpack payload]`.

Payload: `[time, events, data-parallel rank]`, each event a map with its `type`. A step with events sends one message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq

from ..core.block_pool import BlockRemoved, BlockStored, CacheEvent


def encode_batch(events: Iterable[CacheEvent], *, time_s: float, block_size: int) -> bytes:
    maps: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, BlockRemoved):
            maps.append({"type": "BlockRemoved", "block_hashes": [event.block_hash], "medium": "GPU", "group_idx": 0})
        elif maps and maps[-1]["type"] == "BlockStored" and maps[-1]["block_hashes"][-1] == event.parent_hash:
            maps[-1]["block_hashes"].append(event.block_hash)
            maps[-1]["token_ids"] += event.tokens
            maps[-1]["extra_keys"].append(_extra_keys(event))
        else:
            maps.append(_stored(event, block_size))
    return msgspec.msgpack.encode([time_s, maps, 0])


def _stored(event: BlockStored, block_size: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [event.block_hash],
        "parent_block_hash": event.parent_hash,
        "token_ids": list(event.tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": event.namespace.lora,
        "extra_keys": [_extra_keys(event)],
        "group_idx": 0,
    }


def _extra_keys(event: BlockStored) -> list[str] | None:
    """The LoRA adapter for every block, the cache salt for a prompt's first; None without both."""
    keys = [event.namespace.lora, event.namespace.cache_salt if event.parent_hash is None else None]
    return [key for key in keys if key is not None] or None


class KvEventPublisher:
    """Owns the socket. An endpoint with a wildcard, `::`, ipc or inproc is bound, any other is connected."""

    def __init__(self, endpoint: str, topic: str, block_size: int, *, now: Callable[[], float] = time.time) -> None:
        self._topic = topic.encode()
        self._block_size = block_size
        self._now = now
        self._sequence = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.linger = 0
        if any(mark in endpoint for mark in ("*", "::", "ipc:", "inproc:")):
            self._socket.bind(endpoint)
        else:
            self._socket.connect(endpoint)

    @property
    def endpoint(self) -> str:
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def publish(self, events: list[CacheEvent]) -> None:
        if not events:
            return
        payload = encode_batch(events, time_s=self._now(), block_size=self._block_size)
        events.clear()
        # A PUB socket drops messages without a subscriber, so this never waits.
        self._socket.send_multipart([self._topic, self._sequence.to_bytes(8), payload])
        self._sequence += 1

    def close(self) -> None:
        self._socket.close()
        self._context.term()
