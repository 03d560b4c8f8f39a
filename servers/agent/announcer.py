"""Heartbeats out: a socket to each proxy, and warnings where one takes none.

ZeroMQ itself is silent about a peer that is not there, or is of another kind, and after some refusals it does not try
again. Its monitor events say what becomes of a connection; its own pings find a proxy that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from ppd.proxy.config import is_ipv6
from ppd.proxy.discovery.heartbeat import MESSAGE_LIMIT_BYTES, Heartbeat

from .silence import TICK_S, Silence

log = logging.getLogger(__name__)

# Together below 5 s: a proxy that hangs is found by a ping, and told of if the next connection fails too.
PING_EVERY_S = 1.5
PING_TIMEOUT_S = 1.5
PROXY_AFTER_S = 1.5
HANDSHAKE_S = 3.0
CONNECT_AGAIN_S = 5.0  # where ZeroMQ gave up: the key may be known by then


class Trouble(Enum):
    """Why a proxy takes no heartbeats, without keys and with them."""

    NO_ANSWER = "no proxy answers there"
    OTHER_KIND = (
        "another kind of port; it must be the proxy's heartbeat_port, and its heartbeat_allow hold this address",
        "another kind of port, which must be the proxy's curve_port, or --curve-server-key is not that proxy's, or its "
        "heartbeat_allow does not hold this address",
    )
    MISMATCH = (
        "it wants a key: give --curve-key and --curve-server-key, or the proxy's heartbeat_port",
        "it takes no keys: it must be the proxy's curve_port",
    )
    REFUSED = "it refuses this agent's key, which must be in the proxy's curve_clients_dir"

    def said(self, with_keys: bool) -> str:
        return self.value if isinstance(self.value, str) else self.value[with_keys]


@dataclass(frozen=True, slots=True)
class Link:
    """The connection to one proxy, from its monitor events."""

    is_up: bool = False  # the handshake is done
    has_ended: bool = False  # without a retry, so far
    trouble: Trouble = Trouble.NO_ANSWER

    def after(self, event: int, value: int = 0) -> Link:
        """The next state. `value`: the event's, which says more about a failed handshake."""
        match event:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return Link(is_up=True)
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return Link(trouble=Trouble.REFUSED)
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                mismatch = value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
                return Link(trouble=Trouble.MISMATCH if mismatch else Trouble.OTHER_KIND)
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                return Link(trouble=Trouble.OTHER_KIND)
            case zmq.EVENT_DISCONNECTED:
                # Connected and ended without a word on the handshake: a socket of another type.
                trouble = Trouble.NO_ANSWER if self.is_up else self.trouble
                is_other = trouble is Trouble.NO_ANSWER and not self.is_up
                return Link(has_ended=True, trouble=Trouble.OTHER_KIND if is_other else trouble)
            case zmq.EVENT_CONNECT_RETRIED:
                return replace(self, has_ended=False)
            case zmq.EVENT_CLOSED:  # a connection that was not made
                return Link(trouble=Trouble.NO_ANSWER)
        return self


class Announcer:
    """A DEALER socket to each proxy. Sending never waits; a proxy that was away gets only the last message."""

    def __init__(
        self,
        proxies: Sequence[str],
        curve: tuple[bytes, bytes, bytes] | None = None,
        *,
        warn_after_s: float = PROXY_AFTER_S,
        connect_again_s: float = CONNECT_AGAIN_S,
    ) -> None:
        """`curve`: the agent's public and secret key, and the proxy's public one."""
        self._warn_after_s = warn_after_s
        self._connect_again_s = connect_again_s
        self._context = zmq.asyncio.Context()
        self._curve = curve
        self._links = {address: Link() for address in proxies}
        self._sockets = {address: self._connect(address) for address in proxies}

    def _connect(self, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, is_ipv6(address))
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT_BYTES)  # a proxy sends nothing
        socket.setsockopt(zmq.CONFLATE, 1)
        socket.setsockopt(zmq.LINGER, 500)  # ms, for the last message
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(PING_EVERY_S * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(PING_TIMEOUT_S * 1000))
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        if self._curve is not None:
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = self._curve
        socket.get_monitor_socket()  # `_warn` reads it: a first connection may have failed for good before that begins
        socket.connect(f"tcp://{address}")
        return socket

    async def send(self, message: Heartbeat) -> None:
        payload = message.encode()
        for socket in self._sockets.values():
            try:
                # Waiting for a proxy that refuses this agent's key would keep heartbeats from the others.
                await socket.send(payload, flags=zmq.DONTWAIT)
            except zmq.Again:  # `watch` says why
                continue

    async def watch(self) -> None:
        """Warns of proxies that take no heartbeats, until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for address in self._sockets:
                tasks.create_task(self._warn(address))

    def close(self) -> None:
        self._context.destroy(linger=500)

    async def _warn(self, address: str) -> None:
        silence = Silence(self._warn_after_s, time.monotonic())
        connect_again_s = time.monotonic() + self._connect_again_s
        was_up = False
        told: Trouble | None = None
        told_s = 0.0
        with self._sockets[address].get_monitor_socket() as events:
            while True:
                if await events.poll(TICK_S * 1000):
                    event = parse_monitor_message(await events.recv_multipart())
                    self._links[address] = self._links[address].after(event["event"], int(event["value"]))
                link, now_s = self._links[address], time.monotonic()
                if link.is_up:
                    if silence.heard(now_s) or not was_up:
                        log.info("proxy %s takes heartbeats", address)
                    was_up = True
                elif silence.is_due(now_s):
                    told, told_s = link.trouble, now_s
                    log.warning("proxy %s takes no heartbeats: %s", address, told.said(self._curve is not None))
                elif told not in (None, link.trouble):  # a first attempt may fail without saying why
                    silence.again_by(told_s + self._connect_again_s)
                if not link.has_ended:
                    connect_again_s = now_s + self._connect_again_s
                elif now_s >= connect_again_s:
                    self._links[address] = replace(link, has_ended=False)
                    self._connect_again(address)

    def _connect_again(self, address: str) -> None:
        endpoint = f"tcp://{address}"
        with contextlib.suppress(zmq.ZMQError):  # ZeroMQ has forgotten it
            self._sockets[address].disconnect(endpoint)
        self._sockets[address].connect(endpoint)
