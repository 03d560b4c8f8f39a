"""Heartbeats in: the ZeroMQ ROUTER sockets on which agents and engines announce themselves.

The plain port takes vLLM's pings, which cannot encrypt, and the project's heartbeats; `heartbeat_allow` limits who may
register, by the sender's address and by the address it claims. With `curve_port` set, agents register there with keys.
The plain port then refuses heartbeats, and takes pings only with `heartbeat_allow` set, or a stranger could do without
a key. A worker belongs to the first key that announced it: no other known key can drain it, change its role or remove
it. A message that can't be read changes nothing.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator

from ..config import ProxyConfig, refused
from ..errors import ConfigError, FormatError
from ..fleet.registry import Registry
from ..fleet.worker import Announcement, Source, WorkerId
from ..telemetry.metrics import Metrics
from .heartbeat import decode

log = logging.getLogger(__name__)

MESSAGE_LIMIT_BYTES = 64 * 1024
COMPLAIN_EVERY_S = 60.0


class HeartbeatListener:
    """Owns the sockets: `open` binds them, `run` reads one until it is cancelled."""

    def __init__(self, config: ProxyConfig, registry: Registry, metrics: Metrics, now: Callable[[], float]) -> None:
        self._config = config
        self._registry = registry
        self._metrics = metrics
        self._now = now
        self._owners = Owners(config.worker_ttl_s, now)
        self._allowed = [ipaddress.ip_network(text) for text in config.heartbeat_allow]
        self._context = zmq.asyncio.Context()
        self._authenticator: AsyncioAuthenticator | None = None
        self._complained_s = -COMPLAIN_EVERY_S
        self._dropped = 0
        self.sockets: list[tuple[zmq.asyncio.Socket, bool]] = []  # each with whether it is the encrypted one

    def open(self) -> None:
        """ConfigError where a port can't be bound or a key can't be read; called before anything is served."""
        if self._config.heartbeat_port:
            self.sockets.append((self._bind("heartbeat_port", self._config.heartbeat_port, curve=False), False))
        if self._config.curve_port:
            self.sockets.append((self._bind("curve_port", self._config.curve_port, curve=True), True))

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    async def run(self, socket: zmq.asyncio.Socket, encrypted: bool) -> None:
        while True:
            frames = await socket.recv_multipart(copy=False)
            sender = str(frames[-1].get("Peer-Address"))
            try:
                # The sender's public key, which the authenticator has found among the known ones.
                key = str(frames[-1].get("User-Id")) if encrypted else None
                self._take(bytes(frames[-1].buffer), sender, key, len(frames))
            except Exception as exc:  # whatever a stranger sends, the listener goes on
                self._drop(type(exc).__name__, sender)

    def _take(self, payload: bytes, sender: str, key: str | None, frames: int) -> None:
        try:
            if frames != 2:
                raise FormatError("heartbeat: must be one frame")
            announcement = decode(payload)
            self._check(announcement, sender, key)
        except FormatError as exc:
            self._drop(str(exc), sender)
            return
        self._metrics.heartbeats.labels("taken").inc()
        self._registry.apply(announcement, self._now())

    def _check(self, announcement: Announcement, sender: str, key: str | None) -> None:
        """`key`: the sender's, on the encrypted port."""
        if self._config.curve_port and key is None:
            if announcement.worker.source is Source.AGENT:
                raise FormatError("heartbeat: agents must use curve_port")
            if not self._allowed:
                raise FormatError("ping: with curve_port, engines' pings are taken only with heartbeat_allow set")
        if self._allowed:
            self._check_addresses(announcement, sender)
        if key is not None:
            if not self._owners.may_speak(announcement.worker.id, key):
                raise FormatError("heartbeat: another key announced this worker")
            if announcement.leaving:
                self._owners.release(announcement.worker.id)

    def _check_addresses(self, announcement: Announcement, sender: str) -> None:
        for what, host in (
            ("sender", sender),
            ("http_address", announcement.worker.address.rpartition(":")[0].strip("[]")),
        ):
            try:
                address = ipaddress.ip_address(host)
            except ValueError:
                raise FormatError(f"{what}: must be an IP address while heartbeat_allow is set") from None
            if not any(address in network for network in self._allowed):
                raise FormatError(f"{what}: not in heartbeat_allow")

    def _drop(self, why: str, sender: str) -> None:
        """Counts each dropped message but logs once a minute, so that a stranger can't fill the log."""
        self._metrics.heartbeats.labels("dropped").inc()
        self._dropped += 1
        if self._now() - self._complained_s >= COMPLAIN_EVERY_S:
            log.warning("dropped %d heartbeat messages, the last from %s: %s", self._dropped, sender, why[:200])
            self._complained_s, self._dropped = self._now(), 0

    def _bind(self, key: str, port: int, *, curve: bool) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT_BYTES)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted engine comes back under its old identity
        if curve:
            self._require_keys(socket)
        try:
            socket.bind(f"tcp://{self._config.heartbeat_host}:{port}")
        except zmq.ZMQError as exc:
            socket.close()
            raise ConfigError(f"{key} = {port}: must be a free port ({exc.strerror})", param=key) from exc
        return socket

    def _require_keys(self, socket: zmq.asyncio.Socket) -> None:
        public, secret = curve_keys(self._config)
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=self._config.curve_clients_dir)
        socket.curve_publickey, socket.curve_secretkey, socket.curve_server = public, secret, True


def curve_keys(config: ProxyConfig) -> tuple[bytes, bytes]:
    """The proxy's public and secret key; ConfigError where the files of `curve_port` can't be used."""
    path = config.curve_server_key_file
    unusable = refused("curve_server_key_file", path, "a ZeroMQ certificate with its secret key")
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError):
        raise unusable from None
    if secret is None:
        raise unusable
    if not Path(config.curve_clients_dir).is_dir():
        raise refused("curve_clients_dir", config.curve_clients_dir, "a folder")
    return public, secret


class Owners:
    """Which key owns each worker; a key that is silent for `ttl_s` loses it. `now`: monotonic seconds."""

    def __init__(self, ttl_s: float, now: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._now = now
        self._owners: dict[WorkerId, tuple[str, float]] = {}

    def may_speak(self, worker_id: WorkerId, key: str) -> bool:
        """Whether this key may announce the worker; if so it owns it from now on."""
        now_s = self._now()
        for known, (_, heard_s) in tuple(self._owners.items()):
            if now_s - heard_s <= self._ttl_s:
                break  # the rest were heard later
            del self._owners[known]
        if self._owners.get(worker_id, (key, now_s))[0] != key:
            return False
        self._owners.pop(worker_id, None)
        self._owners[worker_id] = (key, now_s)
        return True

    def release(self, worker_id: WorkerId) -> None:
        """The owner gives the worker up: the next key to announce it owns it."""
        self._owners.pop(worker_id, None)
