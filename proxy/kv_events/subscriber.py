"""Subscribes to what engines publish: to each worker that says where it does, and on one port to which engines connect.

Each process of the proxy subscribes for itself, so all know the same. Nobody but an engine's own host is believed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Protocol

import zmq
import zmq.asyncio

from ..config import ProxyConfig, is_ipv6
from ..errors import ConfigError, FormatError
from ..fleet.registry import Registry
from ..fleet.view import WorkerView
from ..fleet.worker import NO_EVENTS, UNHEARD, EventSource, Worker, WorkerId
from ..runtime.accept_filter import take_from
from ..runtime.tasks import Background, Throttle
from ..telemetry.metrics import Metrics
from .engine_caches import EngineCaches
from .event_batch import rank_of
from .replay import replay, set_options
from .subscription import UNHEARD_MS, Frames, Publisher, Replayer, Subscription, has_more

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
TOPIC = b"kv@"  # of an engine that connects: then its host:port, and perhaps @ and its model
RECONNECT_MS = 100
RECONNECT_MAX_MS = 5000
PING_EVERY_MS = 5000  # or a host that is gone would look like an engine with nothing to say
PING_TIMEOUT_MS = 15_000
RANKS_LIMIT = 64
SUBSCRIPTIONS_LIMIT = 1000  # five open files each


class Hosts(Protocol):
    def is_own(self, address: str, sender: str, *, looks_up: bool) -> bool:
        """Whether a sender's IP address is that of a worker's address. looks_up: also of a host's name."""

    def close(self) -> None: ...


class EventSubscriber:
    """Owns the sockets: `open` binds, `run` subscribes to workers as they come and go."""

    def __init__(
        self,
        config: ProxyConfig,
        registry: Registry,
        caches: EngineCaches,
        metrics: Metrics,
        hosts: Hosts,
    ) -> None:
        self._bound_to, self._allowed = config.kv_events_bind, config.kv_events_allow
        self._registry = registry
        self._caches = caches
        self._hosts = hosts
        self._has_context = False
        self._throttle = Throttle()
        self._metrics = metrics
        self._sources: dict[WorkerId, EventSource] = {}
        self._subscribed: dict[WorkerId, Background] = {}
        self._connected: dict[WorkerId, str] = {}  # engines that connect, each with its incarnation
        self.bound: zmq.asyncio.Socket | None = None

    def open(self) -> None:
        """ConfigError where the port can't be bound; called before anything is served."""
        if not self._bound_to:
            return
        socket = self._socket(by_ipv6="[" in self._bound_to)
        take_from(socket, self._allowed, is_ipv6="[" in self._bound_to)
        try:
            socket.bind(self._bound_to)
        except zmq.ZMQError as exc:
            socket.close()
            raise ConfigError(
                f"kv_events_bind = {self._bound_to!r}: must be tcp:// and a free port ({exc.strerror})",
                param="kv_events_bind",
            ) from exc
        self.bound = socket

    @cached_property
    def _context(self) -> zmq.asyncio.Context:
        """Only where there is a socket: most fleets publish nothing."""
        context = zmq.asyncio.Context()
        context.set(zmq.MAX_SOCKETS, 4 * SUBSCRIPTIONS_LIMIT)  # a monitor and a replay for each, and room
        self._has_context = True
        return context

    @property
    def _replay(self) -> Replayer:
        return partial(replay, self._context, self._throttle)

    async def run(self) -> None:
        while True:
            views = {view.id: view for view in self._registry.views()}
            for worker in self._sources.keys() - views.keys():
                await self._leave(worker)
            for view in views.values():
                if view.worker.kv_events != self._sources.get(view.id, NO_EVENTS):
                    await self._leave(view.id)
                    self._follow(view.worker)
            self._check_connected(views)
            await asyncio.sleep(LOOK_EVERY_S)

    async def run_bound(self) -> None:
        """Reads the port to which engines connect."""
        assert self.bound is not None, "open was called"
        subscription = Subscription(self._replay, self._throttle, self._metrics, self._sender)
        try:
            while True:
                await self.bound.poll()
                await subscription.read_of_many(self.bound)
                is_behind = has_more(self.bound)
                for worker in self._connected:
                    for stream in self._caches.streams(worker):
                        stream.is_behind = is_behind or subscription.is_catching_up(stream)
        finally:
            await subscription.close()

    async def close(self) -> None:
        for worker in list(self._sources):
            await self._leave(worker)
        self._hosts.close()
        if self._has_context:
            self._context.destroy(linger=0)

    def _follow(self, worker: Worker) -> None:
        source = worker.kv_events
        self._sources[worker.id] = source
        if not source.endpoint:
            return
        if self._subscriptions + source.ranks > SUBSCRIPTIONS_LIMIT:
            log.warning("no KV events of %s: %d engines are heard, and no more", worker.id, SUBSCRIPTIONS_LIMIT)
        else:
            background = self._subscribed[worker.id] = Background()
            for rank in range(source.ranks):
                self._caches.stream(worker.id, rank)  # until all of them are heard, the worker gives no evidence
                background.start(f"KV events of {worker.id}", partial(self._subscribe, worker, rank))

    @property
    def _subscriptions(self) -> int:
        return sum(self._sources[worker].ranks for worker in self._subscribed)

    async def _leave(self, worker: WorkerId) -> None:
        if (background := self._subscribed.pop(worker, None)) is not None:
            await background.close()
        self._sources.pop(worker, None)
        self._connected.pop(worker, None)
        self._caches.drop(worker)

    async def _subscribe(self, worker: Worker, rank: int) -> None:
        source = worker.kv_events.of_rank(rank)
        publisher = Publisher(self._caches.stream(worker.id, rank), worker.role, source.replay_endpoint)
        unheard_ms: int | None = UNHEARD_MS
        while True:
            by_ipv6 = await asyncio.to_thread(is_ipv6, source.endpoint)
            subscription = Subscription(self._replay, self._throttle, self._metrics, lambda _: publisher, unheard_ms)
            with self._socket(by_ipv6=by_ipv6) as socket:
                await subscription.run_connected(socket, source.endpoint, publisher)
            unheard_ms = None
            await asyncio.sleep(RECONNECT_MS / 1000)

    def _socket(self, *, by_ipv6: bool) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.SUB)
        set_options(socket, by_ipv6=by_ipv6)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, PING_EVERY_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PING_TIMEOUT_MS)
        socket.subscribe(b"")
        return socket

    # -- engines that connect

    def _sender(self, frames: Frames) -> Publisher | str:
        """Of a message on the bound port: its topic names the worker, and it must come from the worker's host."""
        topic = frames[0].bytes
        address = topic.removeprefix(TOPIC).split(b"@")[0].decode("ascii", "replace")
        view = self._registry.view(WorkerId(address)) if topic.startswith(TOPIC) else None
        if view is None:
            return "unknown_worker"
        source = view.worker.kv_events
        if source.endpoint or source == UNHEARD or not self._is_from(address, frames):
            return "foreign"
        try:
            rank = rank_of(frames[2].buffer)
        except FormatError:
            return "unreadable"
        if rank >= RANKS_LIMIT:
            return "foreign"
        self._sources.setdefault(view.id, view.worker.kv_events)
        self._connected.setdefault(view.id, view.incarnation)
        stream = self._caches.stream(view.id, rank)
        return Publisher(stream, view.role, view.worker.kv_events.of_rank(rank).replay_endpoint)

    def _is_from(self, address: str, frames: Frames) -> bool:
        return self._hosts.is_own(address, str(frames[0].get("Peer-Address")), looks_up=True)

    def _check_connected(self, views: Mapping[WorkerId, WorkerView]) -> None:
        """A bound port does not say when an engine goes, so a restart shows in its incarnation."""
        for worker, incarnation in list(self._connected.items()):
            view = views.get(worker)
            if view is not None and view.incarnation != incarnation:
                self._connected[worker] = view.incarnation
                self._caches.renew(worker)
