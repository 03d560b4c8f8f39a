from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from ppd.servers.sim.core.block_pool import BlockRemoved, BlockStored, CacheEvent, Namespace
from ppd.servers.sim.engine.kv_events import KvEventPublisher, encode_batch

HERE, SALTED = Namespace("m"), Namespace("m", lora="l", cache_salt="s")


def stored(block_hash: int, parent: int | None, *tokens: int, namespace: Namespace = HERE) -> BlockStored:
    return BlockStored(block_hash, parent, tokens, namespace)


def decoded(*events: CacheEvent) -> list[Any]:
    time_s, maps, rank = msgspec.msgpack.decode(encode_batch(events, time_s=2.5, block_size=2))
    assert (time_s, rank) == (2.5, 0)
    assert isinstance(maps, list)
    return maps


def test_blocks_that_follow_each_other_share_an_event() -> None:
    (event,) = decoded(stored(7, None, 1, 2), stored(8, 7, 3, 4))
    assert event == {
        "type": "BlockStored",
        "block_hashes": [7, 8],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
    }


def test_other_chains_have_events_of_their_own() -> None:
    events = decoded(stored(7, None, 1, 2), BlockRemoved(5), stored(9, 3, 5, 6))
    assert [event["type"] for event in events] == ["BlockStored", "BlockRemoved", "BlockStored"]
    assert events[1] == {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": 0}
    assert events[2]["parent_block_hash"] == 3


def test_adapter_and_salt_are_extra_keys() -> None:
    (event,) = decoded(stored(7, None, 1, 2, namespace=SALTED), stored(8, 7, 3, 4, namespace=SALTED))
    assert event["lora_name"] == "l"
    assert event["extra_keys"] == [["l", "s"], ["l"]]


@pytest.fixture
def subscriber() -> Any:
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.rcvtimeo = 10_000
        socket.subscribe(b"")
        socket.bind("tcp://127.0.0.1:*")
        yield socket


async def test_events_reach_a_subscriber(lab: Any, subscriber: Any) -> None:
    endpoint = subscriber.getsockopt_string(zmq.LAST_ENDPOINT)
    settings = {"num_blocks": 8, "block_size": 4, "max_model_len": 32}
    r = await lab.start(**settings, kv_events_endpoint=endpoint, kv_events_topic="kv@R")
    batches: list[tuple[int, list[Any]]] = []
    for number in range(200):  # the first ones may be sent before the subscription is known
        await lab.post(r, "/v1/completions", {"prompt": chr(97 + number) * 12, "max_tokens": 1})
        if await subscriber.poll(100):
            topic, sequence, payload = await subscriber.recv_multipart()
            assert topic == b"kv@R"
            batches.append((int.from_bytes(sequence), msgspec.msgpack.decode(payload)[1]))
        if len(batches) == 4:
            break
    first, *later = [number for number, _ in batches]
    assert later == [first + 1, first + 2, first + 3]
    stored_hashes = set()
    for _, events in batches:
        added = events[-1]
        assert added["type"] == "BlockStored"
        assert len(added["token_ids"]) == 12
        assert len(set(added["token_ids"])) == 1
        stored_hashes.update(added["block_hashes"])
    removed = {name for _, events in batches for event in events[:-1] for name in event["block_hashes"]}
    assert removed & stored_hashes


def test_a_wildcard_endpoint_is_bound() -> None:
    publisher = KvEventPublisher("tcp://127.0.0.1:*", "", 2)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        try:
            with pytest.raises(zmq.ZMQError, match="in use"):
                socket.bind(publisher.endpoint)
        finally:
            publisher.close()
