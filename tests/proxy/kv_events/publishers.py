"""A subscriber to KV events, and what it is told of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ppd.proxy.config import ProxyConfig
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import EventSource, Role, Worker
from ppd.proxy.kv_events.engine_caches import EngineCaches
from ppd.proxy.kv_events.subscriber import EventSubscriber
from ppd.proxy.runtime.tasks import Background
from ppd.proxy.telemetry.metrics import Metrics

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
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0.005)

    async def until_held(self, tokens: int | None) -> None:
        await self.until(lambda: self.held() == tokens)

    def add(self, events: EventSource) -> None:
        self.registry.add_static(Worker(role=D.role, address=D.address, kv_events=events), 0.0)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def subscribing(bind: str = "", hosts: OwnHosts | None = None) -> AsyncIterator[Lab]:
    registry, metrics, caches = Registry(), Metrics(), EngineCaches(lambda history: history)
    config = ProxyConfig(kv_events_bind=bind)
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
