"""Messages over Redis 6.2 or newer: a list for each reader, and for data a key that the list names.

All keys begin with `ppd:ec:` and expire, so that what nobody fetches leaves no trace.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .settings import ECSettings
from .transport import TransportDown
from .wire import MOST_CONTROL_BYTES

MOST_UNREAD = 10_000  # messages in one list; then the oldest go
POLL_S = 1.0
URL_VARIABLE = "PPD_EC_REDIS_URL"
T = TypeVar("T")


def connect(
    settings: ECSettings, name: str, most_data_bytes: int, environ: Mapping[str, str] = os.environ
) -> RedisTransport:
    """See `transport.Connect`."""
    url = settings.redis_url or environ.get(URL_VARIABLE, "")
    if not url:
        raise ValueError(f"ec_connector_extra_config: redis_url is missing, and {URL_VARIABLE} is not set")
    return RedisTransport(
        *(url, name),
        timeout_s=settings.redis_timeout_s,
        expire_s=settings.reservation_ttl_s,
        most_data_bytes=most_data_bytes,
    )


class RedisTransport:
    """timeout_s: for each operation. expire_s: how long a message may lie unread."""

    def __init__(self, url: str, name: str, *, timeout_s: float, expire_s: float, most_data_bytes: int) -> None:
        """ValueError: the URL is none, or redis-py is missing."""
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as exc:
            raise ValueError("the encoder cache over Redis needs redis-py: pip install redis") from exc
        try:
            self._redis = redis.Redis.from_url(
                url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
            )
        except ValueError as exc:  # its message may hold the password
            raise ValueError("redis_url must be redis://HOST:PORT/DB, rediss://… or unix://PATH") from exc
        self._errors = (redis.RedisError, OSError)
        at: dict[str, Any] = self._redis.connection_pool.connection_kwargs
        self.address = str(at.get("path") or f"{at.get('host', 'localhost')}:{at.get('port', 6379)}")
        self._name = name
        self._poll_s = min(POLL_S, timeout_s / 4)  # far from the socket's own time-out
        self._expire_ms = max(1, round(expire_s * 1000))
        self._most_data_bytes = most_data_bytes

    def send_metadata(self, consumer: str, message: bytes) -> None:
        self._push("metadata", consumer, message)

    def receive_metadata(self) -> bytes | None:
        return self._pop("metadata")

    def send_verdict(self, producer: str, message: bytes) -> None:
        self._push("verdicts", producer, message)

    def receive_verdict(self) -> bytes | None:
        return self._pop("verdicts")

    def send_data(self, consumer: str, message: bytes) -> None:
        ticket = uuid.uuid4().hex.encode()
        self._do(lambda: self._redis.set(_data_key(ticket), message, px=self._expire_ms))
        self._push("data", consumer, ticket)

    def receive_data(self) -> bytes | None:
        ticket = self._pop("data")
        if ticket is None:
            return None
        key = _data_key(ticket)
        if self._do(lambda: self._redis.strlen(key)) > self._most_data_bytes:
            self._do(lambda: self._redis.delete(key))
            return None
        message: bytes | None = self._do(lambda: self._redis.getdel(key))
        return message

    def close(self) -> None:
        self._redis.close()

    def _push(self, channel: str, name: str, message: bytes) -> None:
        key = f"ppd:ec:{channel}:{name}"
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.rpush(key, message)
        pipeline.ltrim(key, -MOST_UNREAD, -1)
        pipeline.pexpire(key, self._expire_ms)
        self._do(pipeline.execute)

    def _pop(self, channel: str) -> bytes | None:
        found: Any = self._do(lambda: self._redis.blpop([f"ppd:ec:{channel}:{self._name}"], timeout=self._poll_s))
        if found is None or len(found[1]) > MOST_CONTROL_BYTES:
            return None
        return bytes(found[1])

    def _do(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except self._errors as exc:
            raise TransportDown(f"Redis at {self.address}: {type(exc).__name__}") from exc


def _data_key(ticket: bytes) -> bytes:
    return b"ppd:ec:data-of:" + ticket
