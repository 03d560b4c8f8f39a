"""Announcements of workers, and who sends them over ZeroMQ."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from ppd.proxy.discovery.heartbeat import Heartbeat


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
