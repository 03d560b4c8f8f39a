"""A transport within one process: what another file has to have. Engines meet in the `room` of their settings."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from ppd.servers.ec_redis.settings import ECSettings
from ppd.servers.ec_redis.transport import TransportDown

Queues = defaultdict[str, deque[bytes]]
ROOMS = defaultdict[str, Queues](lambda: Queues(deque))


def connect(settings: ECSettings, name: str, most_data_bytes: int) -> InMemory:
    return InMemory(ROOMS[settings.transport_settings["room"]], name, most_data_bytes)


@dataclass
class InMemory:
    """Messages lie in queues, by kind and reader, until they are taken."""

    queues: Queues = field(default_factory=lambda: Queues(deque))
    name: str = ""
    most_data_bytes: int = 1 << 20
    is_down: bool = False

    def send_metadata(self, consumer: str, message: bytes) -> None:
        self._send(f"metadata {consumer}", message)

    def receive_metadata(self) -> bytes | None:
        return self._receive("metadata")

    def send_verdict(self, producer: str, message: bytes) -> None:
        self._send(f"verdicts {producer}", message)

    def receive_verdict(self) -> bytes | None:
        return self._receive("verdicts")

    def send_data(self, consumer: str, message: bytes) -> None:
        self._send(f"data {consumer}", message)

    def receive_data(self) -> bytes | None:
        message = self._receive("data")
        return message if message is not None and len(message) <= self.most_data_bytes else None

    def close(self) -> None:
        self.queues.clear()

    def _send(self, queue: str, message: bytes) -> None:
        if self.is_down:
            raise TransportDown("memory")
        self.queues[queue].append(message)

    def _receive(self, kind: str) -> bytes | None:
        waiting = self.queues[f"{kind} {self.name}"]
        return waiting.popleft() if waiting else None
