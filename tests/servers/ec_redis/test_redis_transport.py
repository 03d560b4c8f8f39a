"""Messages through a real Redis server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from ppd.servers.ec_redis.redis_transport import MOST_UNREAD, RedisTransport
from ppd.servers.ec_redis.transport import TransportDown
from ppd.servers.ec_redis.wire import MOST_CONTROL_BYTES
from tests.servers.ec_redis.redis_server import RedisServer

Between = Callable[[RedisTransport, RedisTransport], bytes | None]
MOST_DATA = 1000


def transport(url: str, name: str) -> RedisTransport:
    return RedisTransport(url, name, timeout_s=1.0, expire_s=30.0, most_data_bytes=MOST_DATA)


@pytest.fixture
def ends(redis_server: RedisServer) -> Iterator[tuple[RedisTransport, RedisTransport, redis.Redis]]:
    """E1, PD1 and the server itself, empty."""
    raw = redis.Redis.from_url(redis_server.url)
    raw.flushall()
    one, other = transport(redis_server.url, "E1"), transport(redis_server.url, "PD1")
    yield one, other, raw
    for end in (one, other, raw):
        end.close()


@pytest.mark.slow
def test_each_channel_brings_each_message_to_its_reader_once(
    ends: tuple[RedisTransport, RedisTransport, redis.Redis],
) -> None:
    producer, consumer, raw = ends
    producer.send_metadata("PD1", b"first")
    producer.send_metadata("PD1", b"second")
    producer.send_data("PD1", b"\0" * MOST_DATA)
    consumer.send_verdict("E1", b"granted")
    assert all(0 < raw.pttl(key) <= 30_000 for key in raw.keys("*")), "all goes, if nobody reads it"
    assert [consumer.receive_metadata() for _ in range(3)] == [b"first", b"second", None]
    assert [consumer.receive_data() for _ in range(2)] == [b"\0" * MOST_DATA, None]
    assert [producer.receive_verdict() for _ in range(2)] == [b"granted", None]
    assert raw.keys("*") == []


def test_what_is_too_large_is_not_fetched(ends: tuple[RedisTransport, RedisTransport, redis.Redis]) -> None:
    producer, consumer, raw = ends
    producer.send_data("PD1", b"\0" * (MOST_DATA + 1))
    producer.send_metadata("PD1", b"x" * (MOST_CONTROL_BYTES + 1))
    assert consumer.receive_data() is None
    assert consumer.receive_metadata() is None
    assert raw.keys("*") == []


@pytest.mark.parametrize("ticket", [b"*", b"", b"\xff\n", b"0" * 32])
def test_a_ticket_that_names_no_data_is_dropped(
    ends: tuple[RedisTransport, RedisTransport, redis.Redis], ticket: bytes
) -> None:
    _, consumer, raw = ends
    raw.rpush("ppd:ec:data:PD1", ticket)
    assert consumer.receive_data() is None


def test_a_list_that_nobody_reads_keeps_the_newest(
    ends: tuple[RedisTransport, RedisTransport, redis.Redis],
) -> None:
    producer, _, raw = ends
    raw.rpush("ppd:ec:metadata:PD1", *[b"old"] * MOST_UNREAD)
    producer.send_metadata("PD1", b"new")
    assert raw.llen("ppd:ec:metadata:PD1") == MOST_UNREAD
    assert raw.lindex("ppd:ec:metadata:PD1", -1) == b"new"


@pytest.mark.parametrize(
    "operation",
    [
        lambda one: one.send_metadata("PD1", b"x"),
        lambda one: one.send_verdict("E1", b"x"),
        lambda one: one.send_data("PD1", b"x"),
        lambda one: one.receive_metadata(),
        lambda one: one.receive_verdict(),
        lambda one: one.receive_data(),
    ],
)
def test_a_server_that_is_gone_is_named_without_its_password(
    tmp_path: Path, operation: Callable[[RedisTransport], object]
) -> None:
    with pytest.raises(TransportDown) as refused:
        operation(transport(f"unix://user:secret@{tmp_path}/none.sock", "E1"))
    assert str(tmp_path) in str(refused.value) and "secret" not in str(refused.value)


def test_an_unusable_url_is_refused_without_its_password() -> None:
    with pytest.raises(ValueError, match="redis_url must be redis://") as refused:
        transport("http://user:secret@host", "E1")
    assert "secret" not in str(refused.value)
