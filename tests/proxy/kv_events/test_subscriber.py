"""The simulated engine's publisher over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import EventSource, Worker
from ppd.proxy.kv_events.engine_caches import EngineCaches
from ppd.proxy.kv_events.event_batch import session_name
from ppd.proxy.kv_events.replay import replay, set_options
from ppd.proxy.kv_events.subscription import Publisher, Subscription, has_more
from ppd.proxy.runtime.tasks import Throttle
from ppd.proxy.telemetry.metrics import Metrics
from ppd.servers.fleet.ports import free_ports
from ppd.servers.sim.core.block_pool import AllBlocksCleared, BlockStored, CacheEvent, Namespace
from ppd.servers.sim.core.fault_orders import BatchFate
from ppd.servers.sim.engine.kv_events import KvEventPublisher
from tests.support.announcements import (
    ANY,
    ANY_IPV6,
    HISTORY,
    D,
    Lab,
    OwnHosts,
    needs_ipv6,
    publishing,
    subscribing,
)

OTHER = Worker(role=D.role, address="127.0.0.1:8201")


class SlowPublisher(KvEventPublisher):
    """Answers requests for replay only while it may."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def _answer(self, *args: Any) -> None:
        await self.may_answer.wait()
        await super()._answer(*args)


def source(publisher: KvEventPublisher, *, replays: bool = True) -> EventSource:
    return EventSource(publisher.endpoint, (publisher.replay_endpoint or "") if replays else "")


def block(number: int, life: int = 0) -> CacheEvent:
    """The session's block of this number, which ends its prompt."""
    first = 1000 * life
    parent = first + number - 1 if number else None
    return BlockStored(first + number, parent, (0,), Namespace("m"), session_name(HISTORY))


def publish(publisher: KvEventPublisher, *numbers: int, fate: BatchFate = BatchFate.SENT, life: int = 0) -> None:
    """A batch for each."""
    for number in numbers:
        publisher.publish([block(number, life)], fate)


async def test_what_an_engine_has_published_before_is_replayed() -> None:
    with publishing() as publisher:
        publish(publisher, 0, 1, 2)
        async with subscribing() as lab:
            lab.add(source(publisher))
            await lab.until_held(3)
            publish(publisher, 3)
            await lab.until_held(4)
            assert lab.value("ppd_kv_events_total", kind="stored", role="D") == 4
            lab.registry.remove(D.id)
            await lab.until_held(None)
            assert not lab.caches


@needs_ipv6
async def test_an_engine_on_an_ipv6_host_is_heard() -> None:
    with publishing(ANY_IPV6, replay=ANY_IPV6) as publisher:
        publish(publisher, 0, 1)
        async with subscribing() as lab:
            lab.add(source(publisher))
            await lab.until_held(2)
            publish(publisher, 2)
            await lab.until_held(3)


@pytest.mark.parametrize("fate", [BatchFate.LOST, BatchFate.GARBLED])
async def test_a_gap_is_closed_by_replay(fate: BatchFate) -> None:
    with publishing() as publisher:
        async with subscribing() as lab:
            lab.add(source(publisher))
            await subscribed(lab, publisher)
            publish(publisher, 1, 2, fate=fate)
            publish(publisher, 3)
            await lab.until_held(4)
            assert lab.value("ppd_kv_event_gaps_total", result="closed") >= 1
            assert lab.value("ppd_kv_event_gaps_total", result="open") == 0


async def test_a_gap_without_replay_leaves_nothing_known_until_a_prompt_is_stored_from_its_start() -> None:
    with publishing() as publisher:
        async with subscribing() as lab:
            lab.add(source(publisher, replays=False))
            await subscribed(lab, publisher)
            publish(publisher, 1, fate=BatchFate.LOST)
            publish(publisher, 2)
            await lab.until_held(None)
            assert lab.value("ppd_kv_event_gaps_total", result="open") == 1
            publish(publisher, 0, 1)
            await lab.until_held(2)


async def test_an_unreadable_batch_without_replay_leaves_nothing_known() -> None:
    with publishing() as publisher:
        async with subscribing() as lab:
            lab.add(source(publisher, replays=False))
            await subscribed(lab, publisher)
            publish(publisher, 1, fate=BatchFate.GARBLED)
            await lab.until_held(None)
            publish(publisher, 0)
            await lab.until_held(1)
            assert lab.value("ppd_kv_event_batches_dropped_total", reason="unreadable") == 2  # and once more in the gap


@pytest.mark.parametrize("batches", [0, 1, 5])
async def test_an_engine_that_starts_over_holds_nothing_of_before(batches: int) -> None:
    async with subscribing() as lab:
        with publishing() as publisher:
            lab.add(source(publisher))
            await subscribed(lab, publisher)
            publish(publisher, 1, 2)
            await lab.until_held(3)
            endpoint, replay = publisher.endpoint, str(publisher.replay_endpoint)
        await lab.until_held(None)  # it has gone, and what it holds is not known
        with publishing(endpoint, replay=replay) as publisher:
            publisher.publish([BlockStored(9, None, (0,), Namespace("m"))])
            publish(publisher, *range(batches), life=1)
            await lab.until_held(batches)


async def test_what_waits_of_an_engine_that_has_gone_counts_no_more() -> None:
    """Another one may stand there by the time that it would be read."""
    context, may_read = zmq.asyncio.Context(), asyncio.Event()
    may_read.set()

    async def pause(seconds: float) -> None:
        await may_read.wait()

    with publishing() as engine, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        publisher = Publisher(EngineCaches(lambda history: history).stream(D.id, 0), D.role, "")
        replaying = partial(replay, context, Throttle())
        subscription = Subscription(replaying, Throttle(pause), Metrics(), lambda _: publisher)
        reading = asyncio.create_task(subscription.run_connected(socket, engine.endpoint, publisher))
        async with asyncio.timeout(60):
            while (taken := publisher.stream.expected) is None:
                publish(engine, 0)
                await asyncio.sleep(0.01)
            may_read.clear()
            while publisher.stream.expected == taken:
                publish(engine, 0)
                await asyncio.sleep(0.01)
            taken = publisher.stream.expected
            while not has_more(socket):
                publish(engine, 0)
                await asyncio.sleep(0.01)
            monitor = socket.get_monitor_socket()
            engine.close()
            while not has_more(monitor):
                await asyncio.sleep(0.01)
            may_read.set()
            await reading
    context.destroy(linger=0)
    assert (publisher.stream.expected, publisher.stream.is_behind) == (taken, True)


async def test_a_replay_that_lacks_what_was_published_is_another_engines_and_leaves_nothing_known() -> None:
    with publishing() as publisher, publishing() as other:
        publish(other, 0, 1)
        async with subscribing() as lab:
            lab.add(EventSource(publisher.endpoint, str(other.replay_endpoint)))
            await lab.until_held(2)  # nothing has come that contradicts it
            publish(publisher, 0)
            await lab.until_held(None)
            publish(publisher, 0)
            await lab.until(lambda: lab.value("ppd_kv_event_gaps_total", result="closed") >= 1)
            await lab.until_held(None)


async def test_a_cleared_cache_holds_nothing() -> None:
    with publishing() as publisher:
        async with subscribing() as lab:
            lab.add(source(publisher))
            await subscribed(lab, publisher)
            publisher.publish([AllBlocksCleared()])
            await lab.until_held(0)


async def test_every_rank_must_be_heard_and_the_least_of_them_counts() -> None:
    with publishing() as first:
        port = int(first.endpoint.rpartition(":")[2])
        with contextlib.ExitStack() as stack, contextlib.suppress(zmq.ZMQError):
            second = stack.enter_context(publishing(f"tcp://127.0.0.1:{port + 1}", replay=""))
            async with subscribing() as lab:
                lab.add(EventSource(first.endpoint, "", 2))
                publish(first, 0, 1)
                await asyncio.sleep(0)
                assert lab.held() is None
                async with asyncio.timeout(60):
                    while lab.held() != 1:
                        publish(first, 0, 1)
                        publish(second, 0)
                        await asyncio.sleep(0.01)


async def test_what_is_no_batch_of_events_is_counted_and_dropped() -> None:
    context = zmq.Context()
    with context, context.socket(zmq.PUB) as foreign:
        foreign.linger = 0
        port = foreign.bind_to_random_port("tcp://127.0.0.1")
        async with subscribing() as lab:
            lab.add(EventSource(f"tcp://127.0.0.1:{port}"))
            hostile = [
                [b"x"],
                [b"", b"", b""],
                [b"", b"1234567", b"x"],
                [b"", bytes(8), b"x"],
                [b"", bytes(8), b"x", b""],
            ]
            async with asyncio.timeout(60):
                while lab.value("ppd_kv_event_batches_dropped_total", reason="unreadable") < 2:
                    for frames in hostile:
                        foreign.send_multipart(frames)
                    await asyncio.sleep(0.01)
            assert lab.value("ppd_kv_event_batches_dropped_total", reason="foreign") > 0
            assert lab.held() is None


async def test_a_flood_leaves_the_loop_to_others() -> None:
    with publishing(buffer_steps=20_000) as publisher:
        publish(publisher, *range(1500))
        async with subscribing() as lab:
            lab.add(source(publisher))
            turns = 0
            while lab.held() != 1500:
                await asyncio.sleep(0)
                turns += 1
            # A pause of four times its length follows each slice, in which an idle loop turns hundreds of times.
            assert turns > 300


async def test_what_waits_to_be_read_is_bounded_in_bytes() -> None:
    context = zmq.asyncio.Context()
    with context.socket(zmq.SUB) as socket:
        set_options(socket, by_ipv6=False)
        most_bytes = int(socket.getsockopt(zmq.RCVHWM)) * int(socket.getsockopt(zmq.MAXMSGSIZE))
    context.destroy(linger=0)
    assert 0 < most_bytes <= 256 * 1024 * 1024


@pytest.mark.parametrize(
    ("topic", "own", "dropped"),
    [
        (f"kv@{D.address}", "127.0.0.1", None),
        (f"kv@{D.address}@model", "127.0.0.1", None),
        (f"kv@{D.address}", "10.0.0.1", "foreign"),
        ("kv@127.0.0.1:9", "127.0.0.1", "unknown_worker"),
        ("", "127.0.0.1", "unknown_worker"),
    ],
)
async def test_engines_may_connect_and_only_a_workers_own_host_is_believed(
    topic: str, own: str, dropped: str | None
) -> None:
    bind = free_endpoint()
    async with subscribing(bind, OwnHosts(own)) as lab:
        with publishing(bind, topic, binds=False) as publisher:
            lab.add(EventSource(replay_endpoint=str(publisher.replay_endpoint)))
            async with asyncio.timeout(60):
                while not (
                    lab.held() == 1 or (dropped and lab.value("ppd_kv_event_batches_dropped_total", reason=dropped))
                ):
                    publish(publisher, 0)
                    await asyncio.sleep(0.01)
            assert lab.held() == (None if dropped else 1)


async def test_an_engine_that_connects_and_starts_over_is_known_by_its_incarnation() -> None:
    bind = free_endpoint()
    async with subscribing(bind) as lab:
        lab.registry.add_static(D, 0.0)
        lab.registry.probed(D.id, Worker(role=D.role, address=D.address, incarnation="1"), None, 0.0)
        with publishing(bind, f"kv@{D.address}", replay="", binds=False) as publisher:
            async with asyncio.timeout(60):
                while lab.held() != 1:
                    publish(publisher, 0)
                    await asyncio.sleep(0.01)
        lab.registry.probed(D.id, Worker(role=D.role, address=D.address, incarnation="2"), None, 0.0)
        await lab.until_held(None)


@pytest.mark.parametrize(
    ("allow", "is_let_in"), [((), True), (("10.0.0.0/8", "127.0.0.0/8"), True), (("10.0.0.0/8",), False)]
)
async def test_only_allowed_addresses_may_connect(allow: tuple[str, ...], is_let_in: bool) -> None:
    bind = free_endpoint()
    async with subscribing(bind, allow=allow):
        stranger = zmq.asyncio.Context()
        with stranger.socket(zmq.PUB) as socket:
            refused = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | refused)
            socket.connect(bind)
            async with asyncio.timeout(60):
                event = (await recv_monitor_message(monitor))["event"]
            assert (event == zmq.EVENT_HANDSHAKE_SUCCEEDED) is is_let_in
        stranger.destroy(linger=0)


async def test_a_port_that_is_taken_is_an_error() -> None:
    bind = free_endpoint()
    async with subscribing(bind):
        with pytest.raises(ConfigError, match=r"^kv_events_bind = 'tcp://127.0.0.1:.*': must be .* a free port"):
            async with subscribing(bind):
                pass


@pytest.mark.parametrize("sizes", [(1, 1), (3_000_000, 3_000_000)])  # the second two are more than may wait
async def test_a_gap_that_an_engine_is_slow_to_close_holds_up_no_other_engine(sizes: tuple[int, ...]) -> None:
    bind = free_endpoint()
    slow = SlowPublisher(bind, f"kv@{OTHER.address}", 1, replay_endpoint=ANY)
    async with subscribing(bind) as lab:
        with contextlib.closing(slow), publishing(bind, f"kv@{D.address}", binds=False) as publisher:
            slow.start()
            for worker, engine in ((D, publisher), (OTHER, slow)):
                events = EventSource(replay_endpoint=str(engine.replay_endpoint))
                lab.registry.add_static(replace(worker, kv_events=events), 0.0)
            async with asyncio.timeout(60):
                while not lab.caches.held(OTHER.id, HISTORY) == lab.held() == 1:
                    publish(publisher, 0)
                    publish(slow, 0)
                    await asyncio.sleep(0.01)
            slow.may_answer.clear()
            publish(slow, 1, fate=BatchFate.LOST)
            publish(slow, 2)
            for size in sizes:
                slow.publish([BlockStored(9, None, (0,), Namespace("m"), "x" * size)])
            publish(slow, 3)
            publish(publisher, 1)
            await lab.until_held(2)
            assert lab.caches.held(OTHER.id, HISTORY) is None
            assert lab.value("ppd_kv_event_gaps_total", result="open") == 0
            slow.may_answer.set()
            await lab.until(lambda: lab.caches.held(OTHER.id, HISTORY) == 4)
            publish(slow, 4)
            await lab.until(lambda: lab.caches.held(OTHER.id, HISTORY) == 5)


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


async def subscribed(lab: Lab, publisher: KvEventPublisher) -> None:
    """The session's first block has come, so no later batch is lost."""
    async with asyncio.timeout(60):
        while lab.held() != 1:
            publish(publisher, 0)
            await asyncio.sleep(0.01)
