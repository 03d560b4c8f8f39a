"""KV events over ZeroMQ, as vLLM's publisher sends them: `[topic, sequence number, payload]` to whoever subscribes.

A step with events sends one message. Numbers are 8 bytes, big-endian, from 0. A subscriber that missed some asks the
replay endpoint, a ROUTER, for all from a number on, and gets those that are still kept, then an end mark.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import zmq
import zmq.asyncio

from ..core.block_pool import CacheEvent
from ..core.config import EventEncoding
from ..core.fault_orders import BatchFate
from .kv_event_encoding import encode_batch

_END = (-1).to_bytes(8, signed=True)


class KvEventPublisher:
    """Owns the sockets. An endpoint with a wildcard, `::`, ipc or inproc is bound, any other is connected.

    replay_endpoint: always bound; empty: none.
    """

    def __init__(
        self,
        endpoint: str,
        topic: str,
        block_size: int,
        *,
        encoding: EventEncoding = EventEncoding.MAP,
        replay_endpoint: str = "",
        buffer_steps: int = 10_000,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.topic = topic
        self._block_size = block_size
        self._encoding = encoding
        self._now = now
        self._sequence = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.linger = 0
        self._socket.ipv6 = "[" in endpoint
        self._replay: zmq.asyncio.Socket | None = None
        self._replays: asyncio.Task[None] | None = None
        try:
            self._open(endpoint, replay_endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def replay_endpoint(self) -> str | None:
        return None if self._replay is None else str(self._replay.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def buffer_steps(self) -> int:
        return self._sent.maxlen or 0

    @property
    def announces_hits(self) -> bool:
        return self._encoding is EventEncoding.MAP

    def start(self) -> None:
        """Answers requests for replay until `close`."""
        if self._replay is not None:
            self._replays = asyncio.create_task(self._answer_replays(self._replay))

    def publish(self, events: list[CacheEvent], fate: BatchFate = BatchFate.SENT) -> None:
        """Empties the list."""
        if not events:
            return
        payload = encode_batch(events, time_s=self._now(), block_size=self._block_size, encoding=self._encoding)
        events.clear()
        self._sent.append((self._sequence, payload))
        if fate is BatchFate.GARBLED:
            payload = payload[: len(payload) // 2]
        if fate is not BatchFate.LOST:
            # A PUB socket drops messages without a subscriber, so this never waits.
            self._socket.send_multipart([self.topic.encode(), self._sequence.to_bytes(8), payload])
        self._sequence += 1

    def restart(self) -> None:
        """As a new process: it counts from 0 and has nothing to replay."""
        self._sequence = 0
        self._sent.clear()

    def close(self) -> None:
        if self._replays is not None:
            self._replays.cancel()
        if self._replay is not None:
            self._replay.close()
        self._socket.close()
        self._context.term()

    def _open(self, endpoint: str, replay_endpoint: str) -> None:
        if any(mark in endpoint for mark in ("*", "::", "ipc:", "inproc:")):
            self._socket.bind(endpoint)
        else:
            self._socket.connect(endpoint)
        if replay_endpoint:
            self._replay = zmq.asyncio.Socket(self._context, zmq.ROUTER)
            self._replay.linger = 0
            self._replay.ipv6 = "[" in replay_endpoint
            self._replay.bind(replay_endpoint)

    async def _answer_replays(self, replay: zmq.asyncio.Socket) -> None:
        while True:
            asked = await replay.recv_multipart()
            if len(asked) != 3:  # the client, an empty frame, the first number that it wants
                continue
            client, _, first = asked
            for sequence, payload in list(self._sent):
                if sequence >= int.from_bytes(first):
                    await self._answer(replay, client, self.topic.encode(), sequence.to_bytes(8), payload)
            await self._answer(replay, client, b"", _END, b"")

    async def _answer(self, replay: zmq.asyncio.Socket, client: bytes, topic: bytes, *frames: bytes) -> None:
        named = [topic] if self._encoding is EventEncoding.MAP else []  # vLLM names the topic since 0.26
        await replay.send_multipart([client, b"", *named, *frames])
