"""Asks a publisher for batches that were missed: vLLM's ROUTER answers with each that it keeps, and an end mark."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from ..config import is_ipv6
from ..errors import FormatError
from ..runtime.message_parts import MessageParts
from ..runtime.tasks import Throttle
from .event_stream import EventStream, Replay

FRAME_LIMIT_BYTES = 32 * 1024 * 1024  # a step with many long prompts takes a fifth of it
HELD_BYTES = 256 * 1024 * 1024  # of one engine, until they are read; ZeroMQ counts messages alone
HELD_BATCHES = HELD_BYTES // FRAME_LIMIT_BYTES  # more wait in the connection and at the engine
FIRST_TIMEOUT_S = 5.0  # until an answer begins; vLLM looks for requests every 0.1 s, if it has nothing to publish
NEXT_TIMEOUT_S = 0.5  # a publisher drops what is read too slowly, with the end mark
TRIES = 50  # each brings a thousand batches or more
SEQUENCE_BYTES = 8
MOST_FRAMES = 4
_END = (-1).to_bytes(SEQUENCE_BYTES, signed=True)


async def replay(
    context: zmq.asyncio.Context,
    throttle: Throttle,
    endpoint: str,
    stream: EventStream,
    dropped: Callable[[str], None],
) -> bool:
    """Whether nothing is missing any more. endpoint: empty: the publisher replays nothing. dropped(why): a batch."""
    by_ipv6 = bool(endpoint) and await asyncio.to_thread(is_ipv6, endpoint)
    for _ in range(TRIES if endpoint else 0):
        with context.socket(zmq.DEALER) as socket:  # a new one, as the rest of the last answer may still come
            set_options(socket, by_ipv6=by_ipv6)
            socket.connect(endpoint)
            await socket.send_multipart([b"", stream.replay_from().to_bytes(SEQUENCE_BYTES)])
            state = await _answer(socket, stream, throttle, dropped)
        if state is not Replay.AGAIN:
            return state is Replay.CLOSED
    return False


async def _answer(
    socket: zmq.asyncio.Socket, stream: EventStream, throttle: Throttle, dropped: Callable[[str], None]
) -> Replay:
    """How far the answer to one request has come: OPEN if there is none."""
    messages = MessageParts(zmq.Socket.shadow(socket), MOST_FRAMES)
    timeout_s = FIRST_TIMEOUT_S
    while await socket.poll(int(1000 * timeout_s)):
        timeout_s = NEXT_TIMEOUT_S
        async with throttle.slice() as until_s:
            while time.perf_counter() < until_s:
                parts = messages.next(until_s)
                if parts is None:
                    break
                frames = [part.bytes for part in parts]
                # Up to 0.25 without the topic: an empty frame, the number, the batch.
                if len(frames) not in (3, MOST_FRAMES) or len(frames[-2]) != SEQUENCE_BYTES:
                    dropped("foreign")
                    return Replay.OPEN
                if frames[-2] == _END:
                    return stream.replay_ended()
                try:
                    state = stream.replayed(int.from_bytes(frames[-2]), frames[-1])
                except FormatError:
                    dropped("unreadable")
                    continue
                if state is not Replay.OPEN:
                    return state
    return Replay.OPEN if timeout_s == FIRST_TIMEOUT_S else Replay.AGAIN


def set_options(socket: zmq.asyncio.Socket, *, by_ipv6: bool) -> None:
    """Of a socket that will connect, or be bound."""
    socket.setsockopt(zmq.IPV6, by_ipv6)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT_BYTES)
    socket.setsockopt(zmq.RCVHWM, HELD_BATCHES)
