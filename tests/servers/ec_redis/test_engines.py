"""Both ends with their couriers, over a transport in memory and over a real Redis server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import redis

from ppd.servers.ec_redis.couriers import HANGS_S, Contact, Couriers
from ppd.servers.ec_redis.engines import Consumer, Producer
from ppd.servers.ec_redis.redis_transport import RedisTransport
from ppd.servers.ec_redis.reservations import Embedding, Input, Offer
from ppd.servers.ec_redis.settings import ECSettings
from ppd.servers.ec_redis.transport import TransportDown
from tests.servers.ec_redis.in_memory import InMemory
from tests.servers.ec_redis.redis_server import RedisServer
from tests.support.clock import FakeClock

ROWS = Embedding((4, 8), "F32")
DATA = bytes(range(128))
OFFER = Offer("E1", "leg", "a", ROWS)
NEED = Input("a", ROWS, True, True, OFFER)
SETTINGS = ECSettings(redis_url="redis://x", reservation_ttl_s=10.0, redis_timeout_s=1.0)


class AtOnce(Couriers):
    """No threads."""

    def send(self, operation: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
        try:
            operation()
        except TransportDown as exc:
            self._contact.failed(exc)
        finally:
            after()


@dataclass
class Pair:
    memory: InMemory
    producer: Producer
    consumer: Consumer

    def carry(self) -> None:
        """Until nothing is under way."""
        readers = {
            "metadata PD1": self.consumer.take_metadata,
            "data PD1": self.consumer.take_data,
            "verdicts E1": self.producer.take_answer,
        }
        while any(self.memory.queues.values()):
            for name, take in readers.items():
                while self.memory.queues[name]:
                    take(self.memory.queues[name].popleft())


@pytest.fixture
def pair(clock: FakeClock) -> Pair:
    memory = InMemory()
    producer = Producer("E1", SETTINGS, 1000, memory, clock)
    consumer = Consumer("PD1", SETTINGS, 1000, memory, clock)
    producer.couriers = AtOnce(Contact(clock), stale_s=1.0, now=clock)
    consumer.couriers = AtOnce(consumer.contact, stale_s=1.0, now=clock)
    return Pair(memory, producer, consumer)


@pytest.mark.parametrize("consumer", ["PD1", ""])
@pytest.mark.parametrize("encoded_first", [True, False])
def test_an_embedding_goes_from_the_one_to_the_other(pair: Pair, consumer: str, encoded_first: bool) -> None:
    need = NEED if not consumer else NEED._replace(offer=None)
    pair.producer.announce("leg", {"a": ROWS}, consumer)
    if encoded_first:
        pair.producer.encoded("a", ROWS, DATA)
    pair.carry()
    assert not pair.consumer.is_ready("r", [need])
    pair.carry()
    if not encoded_first:
        assert not pair.consumer.is_ready("r", [need])
        pair.producer.encoded("a", ROWS, DATA)
        pair.carry()
    assert pair.consumer.is_ready("r", [need]) and pair.consumer.has("a", "r")
    assert pair.consumer.take("a") == (ROWS, DATA)
    pair.consumer.finish("r", [OFFER])
    assert (pair.producer.held(), pair.consumer.reserved()) == (0, 0)


def test_what_the_producer_lost_is_encoded_by_the_consumer_at_once(pair: Pair) -> None:
    """E has begun anew: it was killed between offer and grant."""
    assert not pair.consumer.is_ready("r", [NEED])
    pair.carry()
    assert pair.consumer.is_ready("r", [NEED]) and not pair.consumer.has("a", "r")


@pytest.mark.parametrize("lost", ["verdicts E1", "data PD1"])
def test_what_is_lost_ends_by_time_on_both_sides(pair: Pair, clock: FakeClock, lost: str) -> None:
    pair.producer.announce("leg", {"a": ROWS}, "")
    pair.producer.encoded("a", ROWS, DATA)
    assert not pair.consumer.is_ready("r", [NEED])
    if lost == "data PD1":
        pair.producer.take_answer(pair.memory.queues["verdicts E1"].popleft())
    pair.memory.queues[lost].clear()
    clock.advance(SETTINGS.redis_timeout_s)
    assert pair.consumer.is_ready("r", [NEED]) and not pair.consumer.has("a", "r")
    pair.carry()
    assert pair.producer.held() == 0, "the refusal came"
    pair.consumer.finish("r", [OFFER])
    assert pair.consumer.reserved() == 0


def test_without_a_transport_no_request_waits_longer_than_the_first(pair: Pair, clock: FakeClock) -> None:
    pair.memory.is_down = True
    assert not pair.consumer.is_ready("first", [NEED])
    clock.advance(SETTINGS.redis_timeout_s)
    assert pair.consumer.is_ready("first", [NEED])
    assert pair.consumer.is_ready("second", [NEED._replace(item="b", offer=None)]), "it is known to be down"
    pair.consumer.contact.succeeded()
    assert not pair.consumer.is_ready("third", [NEED._replace(item="c", offer=None)])


class Hanging(InMemory):
    """Nothing that it is asked to send or receive ever returns, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.let_go = threading.Semaphore(0), threading.Event()

    def _send(self, queue: str, message: bytes) -> None:
        self._receive(queue)

    def _receive(self, kind: str) -> bytes | None:
        self.entered.release()
        self.let_go.wait(60)
        return None


def test_while_a_transport_does_not_return_no_request_waits_and_the_log_says_so_once(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    transport = Hanging()
    consumer = Consumer("PD1", SETTINGS, 1000, transport, clock)
    consumer.start()
    for _ in range(2 * SETTINGS.receive_threads):
        assert transport.entered.acquire(timeout=20)
    assert not consumer.is_ready("first", [NEED]), "it may only be slow"
    clock.advance(HANGS_S)
    for number in range(10):
        assert consumer.is_ready(f"r{number}", [NEED._replace(item=f"i{number}", offer=None)])
    assert caplog.text.count("has not returned for 10 s") == 1
    transport.let_go.set()
    consumer.couriers.close(20)
    assert consumer.contact.down_s() == 0.0


def test_an_engine_whose_transport_does_not_return_as_it_sends_says_so(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    transport = Hanging()
    producer = Producer("E1", SETTINGS, 1000, transport, clock)
    producer.couriers.send_with(2)
    for number in range(2):
        producer.announce(f"leg{number}", {f"i{number}": ROWS}, "PD1")
        assert transport.entered.acquire(timeout=20)
    clock.advance(HANGS_S)
    producer.announce("leg", {"i": ROWS}, "PD1")
    assert "has not returned for 10 s (send)" in caplog.text
    transport.let_go.set()
    producer.couriers.close(20)


def test_one_thread_that_does_not_return_is_no_hanging_transport(clock: FakeClock) -> None:
    contact = Contact(clock)
    hung, other = contact.caller("data"), contact.caller("data")
    hung.since_s = clock()
    clock.advance(10 * HANGS_S)
    assert contact.down_s() == 0.0
    other.since_s = clock()
    assert contact.down_s() == 0.0


def test_an_embedding_beyond_max_item_bytes_is_not_offered(clock: FakeClock) -> None:
    memory = InMemory()
    small = ECSettings(redis_url="redis://x", max_item_bytes=ROWS.size_bytes - 1)
    producer = Producer("E1", small, 1000, memory, clock)
    producer.couriers = AtOnce(Contact(clock), stale_s=1.0, now=clock)
    producer.announce("leg", {"a": ROWS}, "PD1")
    assert (producer.held(), producer.expects("a"), dict(memory.queues)) == (0, False, {})


def test_what_is_stale_or_beyond_the_queue_is_over_without_being_sent(clock: FakeClock) -> None:
    couriers = Couriers(Contact(clock), stale_s=1.0, now=clock)
    did, over = list[str](), threading.Semaphore(0)
    couriers.send(lambda: did.append("stale"), over.release)
    clock.advance(2.0)
    couriers.send(lambda: did.append("sent"), over.release)
    couriers.send_with(1)
    for _ in range(2):
        assert over.acquire(timeout=20)
    couriers.close(20)
    assert did == ["sent"]


@pytest.mark.parametrize(
    "fault", [ConnectionError("redis://user:secret@host"), KeyError(), TransportDown("there"), "text", 17], ids=repr
)
def test_whatever_a_transport_does_the_next_message_gets_through_and_no_secret_is_logged(
    fault: object, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    couriers = Couriers(Contact(clock), stale_s=1.0, now=clock, retry_s=0.0)
    came, sent, taken = iter([fault, b"message"]), threading.Event(), threading.Event()

    def fetch() -> bytes | None:
        one = next(came, None)
        if isinstance(one, Exception):
            raise one
        return one  # type: ignore[return-value]  # which a transport should not do

    def fail() -> None:
        raise fault if isinstance(fault, Exception) else TypeError

    def take(message: bytes) -> None:
        assert message == b"message"
        taken.set()

    couriers.receive_with(1, fetch, take, "messages")
    couriers.send(fail)
    couriers.send(sent.set)
    couriers.send_with(1)
    assert taken.wait(20) and sent.wait(20)
    couriers.close(20)
    assert "does not answer" in caplog.text and "secret" not in caplog.text


@contextmanager
def over_redis(url: str, timeout_s: float) -> Iterator[tuple[Producer, Consumer]]:
    told = ECSettings(redis_url=url, redis_timeout_s=timeout_s)
    ends: list[Producer | Consumer] = []
    transports = []
    for kind, name in ((Producer, "E1"), (Consumer, "PD1")):
        one = RedisTransport(url, name, timeout_s=0.5, expire_s=30, most_data_bytes=1 << 20)
        transports.append(one)
        ends.append(kind(name, told, 1 << 20, one))
        ends[-1].start()
    try:
        yield ends[0], ends[1]  # type: ignore[misc]
    finally:
        for end, one in zip(ends, transports, strict=True):
            end.couriers.close(20)
            one.close()


def ready(consumer: Consumer, request: str, need: Input) -> bool:
    """As an engine that steps every millisecond. Whether the data came."""
    until_s = time.monotonic() + 30
    while not consumer.is_ready(request, [need]):
        assert time.monotonic() < until_s, "it hangs"
        time.sleep(0.001)
    return consumer.has(need.item, request)


def test_threads_bring_embeddings_through_redis_and_survive_what_is_none(redis_server: RedisServer) -> None:
    raw = redis.Redis.from_url(redis_server.url)
    for key in ("ppd:ec:metadata:PD1", "ppd:ec:verdicts:E1", "ppd:ec:data:PD1"):
        raw.rpush(key, b"\x80\x04\x95pickled.", *[b'{"type":' + b"[" * 4000] * 8)  # more than there are threads
    with over_redis(redis_server.url, 20.0) as (producer, consumer):
        for number in range(20):
            item, leg = f"item{number}", f"leg{number}"
            producer.announce(leg, {item: ROWS}, "")
            producer.encoded(item, ROWS, DATA)
            need = Input(item, ROWS, True, True, Offer("E1", leg, item, ROWS))
            assert ready(consumer, item, need)
            assert consumer.take(item) == (ROWS, DATA)
            consumer.finish(item, [])
        assert consumer.reserved() == 0
    assert producer.held() == 0
    assert raw.keys("*") == []
    raw.close()


@pytest.mark.slow
def test_when_redis_goes_nothing_hangs_and_when_it_comes_back_embeddings_flow_again(
    redis_server: RedisServer,
) -> None:
    with over_redis(redis_server.url, 0.5) as (producer, consumer):
        redis_server.kill()
        assert not ready(consumer, "r", NEED), "it encodes for itself"
        redis_server.start()
        came, number, until_s = False, 0, time.monotonic() + 60
        while not came:
            time.sleep(0.05)
            number += 1
            producer.announce(f"leg{number}", {"a": ROWS}, "")
            producer.encoded("a", ROWS, DATA)
            need = NEED._replace(offer=Offer("E1", f"leg{number}", "a", ROWS))
            came = ready(consumer, f"r{number}", need)
            assert time.monotonic() < until_s
