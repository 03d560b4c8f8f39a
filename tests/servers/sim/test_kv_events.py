from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from ppd.servers.sim.blocks import BlockRemoved, BlockStored, CacheEvent, Namespace
from ppd.servers.sim.kv_events import encode_batch

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
    monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    r = await lab.start(
        num_blocks=8, block_size=4, max_model_len=32, kv_events_endpoint=endpoint, kv_events_topic="kv@R"
    )
    await monitor.recv_multipart()
    subscriber.disable_monitor()
    messages = []
    while not any(event["type"] == "BlockRemoved" for _, _, event in messages):
        prompt = chr(97 + len(messages)) * 12
        await lab.post(r, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        topic, sequence, payload = await subscriber.recv_multipart()
        assert topic == b"kv@R"
        _, events, _ = msgspec.msgpack.decode(payload)
        messages += [(int.from_bytes(sequence), prompt, event) for event in events]
    assert sorted({number for number, _, _ in messages})[0] == 0
    number, prompt, first = messages[0]
    assert (number, first["type"], first["token_ids"]) == (0, "BlockStored", [ord(prompt[0])] * 12)
    assert len(first["block_hashes"]) == 3
    removed = next(event for _, _, event in messages if event["type"] == "BlockRemoved")
    assert removed["block_hashes"][0] in first["block_hashes"]
