"""What workers announce over ZeroMQ: themselves, and their KV events, with a subscriber to these."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from ppd.proxy.config import ProxyConfig
from ppd.proxy.discovery.heartbeat import Heartbeat
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import EventSource, Role, Worker
from ppd.proxy.kv_events.engine_caches import EngineCaches
from ppd.proxy.kv_events.subscriber import EventSubscriber
from ppd.proxy.runtime.tasks import Background
from ppd.proxy.telemetry.metrics import Metrics
from ppd.servers.sim.engine.kv_events import KvEventPublisher


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="there is no ::1 here, as in many containers")


def heartbeat(address: str, role: str = "D", **changes: Any) -> bytes:
    return Heartbeat(**{"version": 1, "role": role, "http_address": address, "models": ["sim"], **changes}).encode()


def ping(address: str, role: str = "P") -> bytes:
    """As vLLM's P2pNccl engines send it."""
    return msgspec.msgpack.encode({"type": role, "http_address": address, "zmq_address": "10.0.0.1:21001"})


REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_DISCONNECTED,
)


class Sender:
    """A DEALER that announces workers."""

    def __init__(self, port: int, **curve: bytes) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        for name, value in curve.items():
            setattr(self._socket, name, value)
        self._monitor = self._socket.get_monitor_socket()
        self._is_refused = False
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    async def send(self, payload: bytes, flags: int = 0) -> None:
        await self._socket.send(payload, flags)

    async def beat(self, address: str, role: str = "D", **changes: Any) -> None:
        await self.send(heartbeat(address, role, **changes))

    async def refused(self) -> None:
        """Until the other side has ended a handshake."""
        while not self._is_refused:
            self._is_refused = (await recv_monitor_message(self._monitor))["event"] in REFUSALS

    def close(self) -> None:
        self._context.destroy(linger=0)


ANY = "tcp://127.0.0.1:*"
ANY_IPV6 = "tcp://[::1]:*"
HISTORY = 5
D = Worker(role=Role.DECODE, address="127.0.0.1:8200")


class OwnHosts:
    def __init__(self, *own: str) -> None:
        self.own = own

    def is_own(self, address: str, sender: str, *, looks_up: bool) -> bool:
        return sender in self.own

    def close(self) -> None:
        pass


@dataclass
class Lab:
    """A subscriber, and what it is told of."""

    subscriber: EventSubscriber
    caches: EngineCaches
    registry: Registry = field(default_factory=Registry)
    metrics: Metrics = field(default_factory=Metrics)

    def held(self) -> int | None:
        return self.caches.held(D.id, HISTORY)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.005)

    async def until_held(self, tokens: int | None) -> None:
        await self.until(lambda: self.held() == tokens)

    def add(self, events: EventSource) -> None:
        self.registry.add_static(Worker(role=D.role, address=D.address, kv_events=events), 0.0)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def subscribing(bind: str = "", hosts: OwnHosts | None = None, allow: tuple[str, ...] = ()) -> AsyncIterator[Lab]:
    registry, metrics, caches = Registry(), Metrics(), EngineCaches(lambda history: history)
    config = ProxyConfig(kv_events_bind=bind, kv_events_allow=allow)
    subscriber = EventSubscriber(config, registry, caches, metrics, hosts or OwnHosts("127.0.0.1"))
    background = Background()
    try:
        subscriber.open()
        background.start("events", subscriber.run)
        if bind:
            background.start("bound", subscriber.run_bound)
        yield Lab(subscriber, caches, registry, metrics)
    finally:
        await background.close()
        await subscriber.close()


def stored_event(**changes: Any) -> dict[str, Any]:
    """Of two blocks without a session, as vLLM 0.32 writes it. changes: members, "absent" for one that is left out."""
    event = {
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
    return {name: value for name, value in (event | changes).items() if value != "absent"}


class BoundPublisher(KvEventPublisher):
    """Binds a port that it is given, where an engine would have a wildcard: on every interface."""

    def _open(self, endpoint: str, replay_endpoint: str) -> None:
        super()._open(ANY_IPV6 if "[" in endpoint else ANY, replay_endpoint)
        self._socket.unbind(self.endpoint)
        self._socket.bind(endpoint)


@contextmanager
def publishing(
    endpoint: str = ANY, topic: str = "kv@D", *, replay: str = ANY, binds: bool = True, **settings: Any
) -> Iterator[KvEventPublisher]:
    kind = BoundPublisher if binds else KvEventPublisher
    publisher = kind(endpoint, topic, 1, replay_endpoint=replay, **settings)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()
