"""Heartbeats in: the ZeroMQ ROUTER sockets on which agents and engines announce themselves.

The plain port takes vLLM's pings, which cannot encrypt, and the project's heartbeats; `heartbeat_allow` limits who may
register, by the sender's address and by the address it claims. With `curve_port` set, agents register there with keys.
The plain port then refuses heartbeats, and takes pings only with `heartbeat_allow` set, or a stranger could do without
a key. A message that can't be read changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator

from ..config import ProxyConfig, cannot_listen, host_and_port, refused
from ..errors import FormatError
from ..fleet.registry import Registry
from ..fleet.worker import Announcement, Source, WorkerId
from ..runtime.accept_filter import take_from
from ..runtime.message_parts import MessageParts
from ..runtime.tasks import Throttle
from ..telemetry.metrics import Metrics
from .heartbeat import MESSAGE_LIMIT_BYTES, decode
from .senders import Rivals, Senders
from .turn_report import TurnReport, is_report
from .turn_report import decode as decode_report

log = logging.getLogger(__name__)

FRAMES = 2  # the sender's ZeroMQ identity, and its message
COMPLAIN_EVERY_S = 60.0
HELD_MESSAGES = 64  # of one connection, until they are read


class HeartbeatListener:
    """Owns the sockets: `open` binds them, `run` reads one until it is cancelled."""

    def __init__(self, config: ProxyConfig, registry: Registry, metrics: Metrics, now: Callable[[], float]) -> None:
        self._config = config
        self._registry = registry
        self._metrics = metrics
        self._now = now
        self._senders = Senders(config, registry, now)
        self._rivals = Rivals()
        self._throttle = Throttle()
        self._context = zmq.asyncio.Context()
        self._authenticator: AsyncioAuthenticator | None = None
        self._complained_s = -COMPLAIN_EVERY_S
        self._dropped = 0
        self._told_refused_s = -COMPLAIN_EVERY_S
        self._refused = 0  # connections
        self.on_report: Callable[[TurnReport], None] | None = None  # a picker's; others take none
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
        self._senders.close()
        self._context.destroy(linger=0)

    async def run(self, socket: zmq.asyncio.Socket, encrypted: bool) -> None:
        """Reads in slices with pauses between, so that a flood takes only a share of the loop. What it has no time for
        waits in the sender's own connection: ZeroMQ reads all of them in turn, and holds little of each."""
        messages = MessageParts(zmq.Socket.shadow(socket), FRAMES)  # to read what is there without an await
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        refusals = None
        if self._config.heartbeat_allow:
            refusals = socket.get_monitor_socket(zmq.EVENT_ACCEPT_FAILED)
            poller.register(refusals, zmq.POLLIN)
        try:
            while True:
                ready = dict(await poller.poll())
                if refusals is not None and refusals in ready:
                    async with self._throttle.slice() as until_s:  # its own: messages are read all the same
                        self._note_refusals(zmq.Socket.shadow(refusals), until_s)
                if socket in ready:
                    async with self._throttle.slice() as until_s:
                        self._apply(self._read(messages, encrypted, until_s))
        finally:
            if refusals is not None:
                socket.disable_monitor()

    def _note_refusals(self, events: zmq.Socket[bytes], until_s: float) -> None:
        """Reads what there is, as ZeroMQ's thread waits where a thousand are not taken. Logs once a minute."""
        with contextlib.suppress(zmq.Again):
            while time.perf_counter() < until_s and events.recv_multipart(zmq.NOBLOCK):
                self._refused += 1
        if self._now() - self._told_refused_s >= COMPLAIN_EVERY_S:
            text = "refused %d connections for heartbeats: heartbeat_allow does not hold their addresses"
            log.warning(text, self._refused)
            self._told_refused_s, self._refused = self._now(), 0

    def _read(self, messages: MessageParts, encrypted: bool, until_s: float) -> Iterable[Announcement]:
        """What is announced by the messages that are there. Of those about one worker the last one holds."""
        announced: dict[WorkerId, Announcement] = {}
        while time.perf_counter() < until_s:
            frames = messages.next(until_s)
            if frames is None:
                break
            sender = str(frames[-1].get("Peer-Address"))
            try:
                # The sender's public key, which the authenticator has found among the known ones.
                key = str(frames[-1].get("User-Id")) if encrypted else None
                if len(frames) != FRAMES:
                    raise FormatError("heartbeat: must be one frame")
                payload = bytes(frames[-1].buffer)
                if is_report(payload):
                    self._reported(payload, sender, key)
                    continue
                found = self._senders.checked(decode(payload), sender, key)
            except FormatError as exc:
                self._drop(str(exc), sender)
            except Exception as exc:  # whatever a stranger sends, the listener goes on
                self._drop(type(exc).__name__, sender)
            else:
                self._metrics.heartbeats.labels("taken").inc()
                self._note_rivals(found, frames[0].bytes, sender)
                # A ping must not hide what an agent has just said.
                if found.worker.source is not Source.PING or found.worker.id not in announced:
                    announced[found.worker.id] = found
        return announced.values()

    def _reported(self, payload: bytes, sender: str, key: str | None) -> None:
        self._senders.check_report(sender, key)
        if self.on_report is None:
            raise FormatError("turn report: this proxy is no picker")
        self.on_report(decode_report(payload))
        self._metrics.heartbeats.labels("taken").inc()

    def _note_rivals(self, announced: Announcement, connection: bytes, sender: str) -> None:
        worker = announced.worker
        if announced.leaving:
            self._rivals.forget(worker.id)
        elif worker.source is Source.AGENT and self._rivals.are_new(worker.id, connection):
            text = "worker %s: two agents announce it in turn, the last from %s; each needs an address of its own"
            log.warning(text, worker.id, sender)

    def _apply(self, announcements: Iterable[Announcement]) -> None:
        now_s = self._now()
        for announcement in announcements:
            try:
                self._registry.apply(announcement, now_s)
            except Exception as exc:
                self._drop(type(exc).__name__, announcement.worker.id)

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
        socket.setsockopt(zmq.RCVHWM, HELD_MESSAGES)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted engine comes back under its old identity
        if curve:
            self._require_keys(socket)
        host = self._config.heartbeat_host
        endpoint = f"tcp://{host_and_port(host, port)}"
        take_from(socket, self._config.heartbeat_allow, is_ipv6="[" in endpoint)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as exc:
            socket.close()
            raise cannot_listen(key, port, "heartbeat_host", host, exc) from exc
        return socket

    def _require_keys(self, socket: zmq.asyncio.Socket) -> None:
        public, secret = curve_keys(self._config)
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=self._config.curve_clients_dir)
        socket.curve_publickey, socket.curve_secretkey, socket.curve_server = public, secret, True


def curve_keys(config: ProxyConfig) -> tuple[bytes, bytes]:
    """The proxy's public and secret key; ConfigError where the files of `curve_port` can't be used."""
    key_file = config.curve_server_key_file
    unusable = refused("curve_server_key_file", key_file, "a ZeroMQ certificate with its secret key")
    try:
        public, secret = zmq.auth.load_certificate(key_file)
    except (OSError, ValueError):
        raise unusable from None
    if secret is None:
        raise unusable
    if not Path(config.curve_clients_dir).is_dir():
        raise refused("curve_clients_dir", config.curve_clients_dir, "a folder")
    return public, secret
