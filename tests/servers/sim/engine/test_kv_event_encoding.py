from __future__ import annotations

from typing import Any

import msgspec

from ppd.servers.sim.core.block_pool import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Namespace
from ppd.servers.sim.core.config import EventEncoding
from ppd.servers.sim.engine.kv_event_encoding import encode_batch
from tests.support.announcements import stored_event

HERE, SALTED = Namespace("m"), Namespace("m", lora="l", cache_salt="s")


def stored(block_hash: int, parent: int | None, *tokens: int, namespace: Namespace = HERE) -> BlockStored:
    return BlockStored(block_hash, parent, tokens, namespace)


def decoded(*events: CacheEvent, encoding: EventEncoding = EventEncoding.MAP) -> list[Any]:
    batch = encode_batch(events, time_s=2.5, block_size=2, encoding=encoding)
    time_s, decoded_events, rank = msgspec.msgpack.decode(batch)
    assert (time_s, rank) == (2.5, 0)
    assert isinstance(decoded_events, list)
    return decoded_events


def test_blocks_that_follow_each_other_share_an_event() -> None:
    (event,) = decoded(stored(7, None, 1, 2), stored(8, 7, 3, 4))
    assert event == stored_event()


def test_other_chains_and_other_sessions_have_events_of_their_own() -> None:
    other = BlockStored(10, 9, (7, 8), HERE, "s")
    events = decoded(stored(7, None, 1, 2), BlockRemoved(5), AllBlocksCleared(), stored(9, 3, 5, 6), other)
    assert [event["type"] for event in events] == [
        "BlockStored",
        "BlockRemoved",
        "AllBlocksCleared",
        "BlockStored",
        "BlockStored",
    ]
    assert events[1] == {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": 0}
    assert events[2] == {"type": "AllBlocksCleared"}
    assert events[3]["parent_block_hash"] == 3
    assert (events[4]["parent_block_hash"], events[4]["session_id"]) == (9, "s")


def test_adapter_and_salt_are_extra_keys() -> None:
    (event,) = decoded(stored(7, None, 1, 2, namespace=SALTED), stored(8, 7, 3, 4, namespace=SALTED))
    assert event["lora_name"] == "l"
    assert event["extra_keys"] == [["l", "s"], ["l"]]


def test_arrays_have_the_members_in_order_and_no_session() -> None:
    first, second = BlockStored(7, None, (1, 2), SALTED, "s-1"), BlockStored(8, 7, (3, 4), SALTED, "s-1")
    events = decoded(first, second, BlockRemoved(5), AllBlocksCleared(), encoding=EventEncoding.ARRAY)
    assert events == [
        ["BlockStored", [7, 8], None, [1, 2, 3, 4], 2, None, "GPU", "l", [["l", "s"], ["l"]], 0],
        ["BlockRemoved", [5], "GPU", 0],
        ["AllBlocksCleared"],
    ]
