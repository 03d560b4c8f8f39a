from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from ppd.proxy.errors import ConfigError
from ppd.servers.sim.core.block_pool import BlockStored, CacheEvent, Namespace
from ppd.servers.sim.core.config import EventEncoding
from ppd.servers.sim.core.fault_orders import BatchFate, Faults
from ppd.servers.sim.engine.kv_events import KvEventPublisher

HERE = Namespace("m")
END = (-1).to_bytes(8, signed=True)
SETTINGS = {"num_blocks": 8, "block_size": 4, "max_model_len": 32}
WAIT_MS = 10_000


def stored(block_hash: int) -> CacheEvent:
    return BlockStored(block_hash, None, (1, 2), HERE)


class Subscriber:
    """A subscriber that binds, so that a publisher can be started with its address."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.linger = 0
        self.socket.rcvtimeo = WAIT_MS
        self.socket.subscribe(b"")
        self.socket.bind("tcp://127.0.0.1:*")

    @property
    def endpoint(self) -> str:
        return str(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))

    async def batch(self) -> tuple[bytes, int, bytes]:
        topic, sequence, payload = await self.socket.recv_multipart()
        return topic, int.from_bytes(sequence), payload

    async def events(self) -> list[Any]:
        _, _, payload = await self.batch()
        events: list[Any] = msgspec.msgpack.decode(payload)[1]
        return events

    async def heard(self, publisher: KvEventPublisher) -> None:
        """Returns once the publisher knows of the subscription; the batches so far are of no more interest."""
        while True:
            publisher.publish([stored(0)])
            if await self.socket.poll(20):
                break
        while await self.socket.poll(20):
            await self.socket.recv_multipart()


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    with zmq.asyncio.Context() as context:
        one = Subscriber(context)
        yield one
        one.socket.close()


@asynccontextmanager
async def publishing(subscriber: Subscriber, **settings: Any) -> AsyncIterator[KvEventPublisher]:
    publisher = KvEventPublisher(subscriber.endpoint, "kv@R", 2, **settings)
    publisher.start()
    try:
        await subscriber.heard(publisher)
        publisher.restart()
        yield publisher
    finally:
        publisher.close()


async def replayed(publisher: KvEventPublisher, first: int) -> list[list[bytes]]:
    """All frames that answer a request for replay, without the empty one before each answer."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.rcvtimeo = WAIT_MS
        assert publisher.replay_endpoint is not None
        client.connect(publisher.replay_endpoint)
        await client.send(b"not a request")
        await client.send_multipart([b"", first.to_bytes(8)])
        answers = []
        while END not in (answer := (await client.recv_multipart())[1:]):
            answers.append(answer)
        return [*answers, answer]


async def test_a_lost_batch_uses_up_its_number_and_can_be_replayed(subscriber: Subscriber) -> None:
    async with publishing(subscriber, replay_endpoint="tcp://127.0.0.1:*") as publisher:
        for fate in (BatchFate.SENT, BatchFate.LOST, BatchFate.SENT):
            publisher.publish([stored(1)], fate)
        heard = [await subscriber.batch(), await subscriber.batch()]
        assert [(topic, number) for topic, number, _ in heard] == [(b"kv@R", 0), (b"kv@R", 2)]
        lost, last, end = await replayed(publisher, 1)
        assert lost[:2] == [b"kv@R", (1).to_bytes(8)]
        assert msgspec.msgpack.decode(lost[2])[1][0]["block_hashes"] == [1]
        assert last == [b"kv@R", (2).to_bytes(8), heard[1][2]]
        assert end == [b"", END, b""]


async def test_replay_has_only_the_latest_batches(subscriber: Subscriber) -> None:
    async with publishing(subscriber, replay_endpoint="tcp://127.0.0.1:*", buffer_steps=2) as publisher:
        for _ in range(4):
            publisher.publish([stored(1)])
        assert [int.from_bytes(frames[1]) for frames in (await replayed(publisher, 0))[:-1]] == [2, 3]
        publisher.restart()
        assert await replayed(publisher, 0) == [[b"", END, b""]]


async def test_replay_of_old_does_not_name_the_topic(subscriber: Subscriber) -> None:
    settings = {"replay_endpoint": "tcp://127.0.0.1:*", "encoding": EventEncoding.ARRAY}
    async with publishing(subscriber, **settings) as publisher:
        publisher.publish([stored(1)])
        (number, payload), end = await replayed(publisher, 0)
        assert (number, end) == ((0).to_bytes(8), [END, b""])
        assert msgspec.msgpack.decode(payload)[1][0][:2] == ["BlockStored", [1]]


async def test_a_garbled_batch_is_no_message(subscriber: Subscriber) -> None:
    async with publishing(subscriber) as publisher:
        publisher.publish([stored(1)], BatchFate.GARBLED)
        _, number, payload = await subscriber.batch()
        assert number == 0
        with pytest.raises(msgspec.DecodeError):
            msgspec.msgpack.decode(payload)


def test_a_wildcard_endpoint_is_bound() -> None:
    publisher = KvEventPublisher("tcp://127.0.0.1:*", "", 2)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        try:
            with pytest.raises(zmq.ZMQError, match="in use"):
                socket.bind(publisher.endpoint)
        finally:
            publisher.close()


async def answered(lab: Any, engine: Any, subscriber: Subscriber, prompt: str, **fields: Any) -> list[Any]:
    """The events of one request."""
    await lab.post(engine, "/v1/completions", {"prompt": prompt, "max_tokens": 1, **fields})
    return await subscriber.events()


@pytest.fixture
async def engine(lab: Any, subscriber: Subscriber) -> Any:
    """One whose events reach the subscriber, with an empty cache."""
    events = {"kv_events_endpoint": subscriber.endpoint, "kv_events_topic": "kv@{address}"}
    started = await lab.start(**SETTINGS, **events, dev_mode=True)
    await subscriber.heard(started.events)
    started.faults = Faults(restart_events=True)
    return started


async def test_events_say_what_the_engine_holds(lab: Any, engine: Any, subscriber: Subscriber) -> None:
    held: set[int] = set()
    for number in range(4):
        await lab.post(engine, "/v1/completions", {"prompt": chr(97 + number) * 12, "max_tokens": 1})
        topic, sequence, payload = await subscriber.batch()
        assert (topic.decode(), sequence) == (f"kv@{engine.address}", number)
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockRemoved":
                held -= set(event["block_hashes"])
                continue
            assert event["token_ids"] == [97 + number] * 12
            held |= set(event["block_hashes"])
        assert len(held) == engine.pool.cached


@pytest.mark.parametrize(
    ("body", "headers", "named"),
    [
        ({"session_id": "a", "vllm_xargs": {"session_id": "c"}}, {"x-session-id": "b"}, "a"),
        ({"vllm_xargs": {"session_id": "c"}}, {"x-session-id": "b"}, "b"),
        ({"vllm_xargs": {"session_id": "c"}}, {}, "c"),
        ({"vllm_xargs": {"session_id": 3}}, {}, None),
    ],
)
async def test_blocks_name_the_session_of_their_request(
    lab: Any, engine: Any, subscriber: Subscriber, body: Any, headers: Any, named: str | None
) -> None:
    asked = {"prompt": "a" * 12, "max_tokens": 1, **body}
    await lab.post(engine, "/v1/completions", asked, headers=headers)
    (event,) = await subscriber.events()
    assert event.get("session_id") == named
    (again, *_) = await answered(lab, engine, subscriber, "a" * 12, session_id="other")
    assert (again["session_id"], again["block_hashes"]) == ("other", event["block_hashes"][:2])


async def test_in_anthropics_api_only_the_header_names_a_session(lab: Any, engine: Any, subscriber: Subscriber) -> None:
    asked = {"messages": [{"role": "user", "content": "h"}], "max_tokens": 1, "session_id": "a"}
    await lab.post(engine, "/v1/messages", asked)
    assert all("session_id" not in event for event in await subscriber.events())
    await lab.post(engine, "/v1/messages", asked, headers={"X-Session-ID": "b"})
    assert all(event["session_id"] == "b" for event in await subscriber.events())


async def test_a_cleared_cache_is_announced_with_the_next_step(lab: Any, engine: Any, subscriber: Subscriber) -> None:
    (before,) = await answered(lab, engine, subscriber, "a" * 12)
    assert (await lab.post(engine, "/reset_prefix_cache", None)).json == {"success": True}
    cleared, after = await answered(lab, engine, subscriber, "a" * 12)
    assert cleared == {"type": "AllBlocksCleared"}
    assert after == before


async def test_only_a_developers_engine_can_be_cleared(lab: Any) -> None:
    assert (await lab.post(await lab.start(), "/reset_prefix_cache", None)).status == 404


async def test_running_requests_keep_the_cache_unless_they_are_reset_too(lab: Any) -> None:
    alone = await lab.start()
    r = await lab.start(dev_mode=True, time_scale=0.001)
    body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}
    expected = (await lab.post(alone, "/v1/completions", body)).json["choices"][0]["text"]
    async with lab.session.post(f"http://{r.address}/v1/completions", json=body | {"stream": True}) as answer:
        chunks = [await answer.content.readline()]
        assert (await lab.post(r, "/reset_prefix_cache", None)).json == {"success": False}
        asked = "/reset_prefix_cache?reset_running_requests=true"
        assert (await lab.post(r, asked, None)).json == {"success": True}
        chunks += [line async for line in answer.content]
    told = [msgspec.json.decode(line[6:]) for line in chunks if line.startswith(b"data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == expected
    assert r.counters.preemptions == 1


async def test_a_restart_counts_from_zero_and_holds_nothing(lab: Any, engine: Any, subscriber: Subscriber) -> None:
    (before,) = await answered(lab, engine, subscriber, "a" * 12)
    await lab.post(engine, "/faults", {"restart_events": True})
    await lab.post(engine, "/v1/completions", {"prompt": "a" * 12, "max_tokens": 1})
    _, number, payload = await subscriber.batch()
    assert (number, msgspec.msgpack.decode(payload)[1]) == (0, [before])


async def test_orders_spoil_as_many_batches_as_they_say(lab: Any, engine: Any, subscriber: Subscriber) -> None:
    await lab.post(engine, "/faults", {"lose_events": 1, "garble_events": 1})
    for prompt in ("a", "b", "c"):
        await lab.post(engine, "/v1/completions", {"prompt": prompt * 12, "max_tokens": 1})
    (_, garbled, half), (_, whole, _) = await subscriber.batch(), await subscriber.batch()
    assert (garbled, whole) == (1, 2)
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(half)


async def test_a_proxy_can_ask_where_events_come_from(lab: Any, engine: Any, subscriber: Subscriber) -> None:
    (source,) = (await lab.fetch(engine, "/kv_event_sources")).json.values()
    assert (source["endpoint"], source["replay_endpoint"]) == (subscriber.endpoint, None)
    assert source["topic"] == f"kv@{engine.address}"
    assert (await lab.fetch(await lab.start(), "/kv_event_sources")).json == {}


async def test_an_endpoint_that_is_taken_is_a_mistake_in_the_settings(lab: Any, subscriber: Subscriber) -> None:
    taken = {"kv_events_endpoint": "tcp://127.0.0.1:*", "kv_events_replay_endpoint": subscriber.endpoint}
    with pytest.raises(ConfigError, match="kv_events_replay_endpoint"):
        await lab.start(**SETTINGS, **taken)
