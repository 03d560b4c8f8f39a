"""One socket with KV events: who is not there, and whose replay does not end."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from functools import partial

import msgspec
import pytest
import zmq
import zmq.asyncio

from ppd.proxy.kv_events.engine_caches import EngineCaches
from ppd.proxy.kv_events.event_batch import Stored
from ppd.proxy.kv_events.event_stream import EventStream
from ppd.proxy.kv_events.replay import replay
from ppd.proxy.kv_events.subscription import CLOSED_AT_ONCE, Publisher, Subscription
from ppd.proxy.runtime.tasks import Throttle
from ppd.proxy.telemetry.metrics import Metrics
from ppd.servers.fleet.ports import free_ports
from ppd.servers.sim.core.block_pool import AllBlocksCleared
from ppd.servers.sim.core.fault_orders import BatchFate
from ppd.servers.sim.engine.kv_events import KvEventPublisher
from tests.support.announcements import D

ANY = "tcp://127.0.0.1:*"


@pytest.mark.parametrize("other", [False, True])
async def test_a_publisher_that_is_not_there_is_told_of_once(other: bool, caplog: pytest.LogCaptureFixture) -> None:
    """other: a server of another kind is there, which closes what it does not understand."""
    context, server = zmq.asyncio.Context(), await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1")
    with context.socket(zmq.SUB) as socket:
        publisher = Publisher(EngineCaches(lambda history: history).stream(D.id, 0), D.role, "")
        subscription = Subscription(
            partial(replay, context, Throttle()), Throttle(), Metrics(), lambda _: publisher, 200
        )
        port = server.sockets[0].getsockname()[1] if other else free_ports(1)[0]
        endpoint = f"tcp://127.0.0.1:{port}"
        running = asyncio.create_task(subscription.run_connected(socket, endpoint, publisher))
        async with asyncio.timeout(60):
            while not caplog.messages:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})
    context.destroy(linger=0)
    server.close()
    assert caplog.messages == [f"no KV events come from {endpoint}: nobody answers there"]


async def test_what_was_known_before_a_connection_counts_no_more_where_nothing_can_be_replayed() -> None:
    """The engine may have begun anew meanwhile, and not have published since."""
    context, stream = zmq.asyncio.Context(), EventStream()
    stream.index.apply(Stored(array("Q", [1, 2, 3]), None, 16, 0, 7))
    stream.expected, publisher = 5, Publisher(stream, D.role, "")
    with context.socket(zmq.PUB) as engine, context.socket(zmq.SUB) as socket:
        engine.bind(ANY)
        subscription = Subscription(partial(replay, context, Throttle()), Throttle(), Metrics(), lambda _: publisher)
        endpoint = engine.getsockopt_string(zmq.LAST_ENDPOINT)
        running = asyncio.create_task(subscription.run_connected(socket, endpoint, publisher))
        async with asyncio.timeout(60):
            while stream.is_behind:
                await asyncio.sleep(0.01)
        assert stream.held(7) is None
        running.cancel()
        await asyncio.wait({running})
    context.destroy(linger=0)


async def test_replays_that_never_end_leave_others_their_turn() -> None:
    """As of engines that answer with the same batch for ever: as many as gaps are closed at once."""
    context, throttle, metrics = zmq.asyncio.Context(), Throttle(), Metrics()
    batch = msgspec.msgpack.encode([0.0, [], 0])
    with (
        contextlib.closing(KvEventPublisher(ANY, "kv@D", 1, replay_endpoint=ANY)) as whole,
        context.socket(zmq.ROUTER) as endless,
        context.socket(zmq.PUSH) as engines,
        context.socket(zmq.PULL) as socket,
    ):
        whole.start()
        whole.publish([AllBlocksCleared()], BatchFate.LOST)
        endless.bind_to_random_port("tcp://127.0.0.1")
        socket.bind("inproc://engines")
        engines.connect("inproc://engines")
        answered = str(whole.replay_endpoint)
        by_topic = {b"%d" % number: endless.getsockopt_string(zmq.LAST_ENDPOINT) for number in range(CLOSED_AT_ONCE)}
        known = {
            topic: Publisher(EngineCaches(int).stream(D.id, 0), D.role, replays)
            for topic, replays in (by_topic | {b"whole": answered}).items()
        }
        subscription = Subscription(
            partial(replay, context, throttle), throttle, metrics, lambda frames: known[frames[0].bytes], place_s=0.05
        )
        repeating = asyncio.create_task(repeat(endless, batch))
        try:
            for topic in known:
                await engines.send_multipart([topic, (1).to_bytes(8), batch])
                await socket.poll()
                await subscription.read_of_many(socket)
            async with asyncio.timeout(60):
                while known[b"whole"].stream.expected != 2:
                    await asyncio.sleep(0.01)
            assert {known[topic].stream.expected for topic in by_topic} <= {None, 1}
        finally:
            repeating.cancel()
            await subscription.close()
    context.destroy(linger=0)


async def repeat(router: zmq.asyncio.Socket, batch: bytes) -> None:
    asked = set[bytes]()
    while True:
        while await router.poll(5):
            asked.add((await router.recv_multipart())[0])
        for peer in asked:
            await router.send_multipart([peer, b"", (0).to_bytes(8), batch])
