"""What a virtual engine publishes of its cache: vLLM's batches, which reach their subscriber some time later.

Stores name the session of their request, and carry tokens as vLLM's do, but all 0: nobody reads them. A hit is told
only if the request asks for that, by `kv_cache_report_mode` in its `vllm_xargs`. An answer's blocks are published as it
ends, where an engine would do it as each is full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Protocol

from ppd.servers.sim.core.block_pool import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Namespace
from ppd.servers.sim.core.config import EventEncoding
from ppd.servers.sim.engine.kv_event_encoding import encode_batch

from .block_cache import BLOCK_TOKENS

_BITS = 0xFFFF_FFFF_FFFF_FFFF
_TOKENS = (0,) * BLOCK_TOKENS
_HERE = Namespace("made-up")


Subscriber = Callable[[int, bytes], None]
"""Gets each batch, by its number."""


class Reports(StrEnum):
    """vLLM's `kv_cache_report_mode`."""

    INCREMENTAL = "incremental"  # what is new, as is the default
    FULL = "full"  # hits too


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSetup:
    delay_s: float = 0.1
    reports: Reports = Reports.INCREMENTAL
    encoding: EventEncoding = EventEncoding.MAP


class Clock(Protocol):
    now_s: float

    def after(self, delay_s: float, happen: Callable[[], None]) -> None: ...


class EventPublisher:
    """One engine's. It hears a cache, and sends what one moment has changed as a batch."""

    def __init__(self, setup: EventSetup, clock: Clock) -> None:
        self._setup = setup
        self._clock = clock
        self._events: list[CacheEvent] = []
        self._sequence = 0
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.append(subscriber)

    def found(self, keys: Sequence[int], session: str | None) -> None:
        if self._setup.reports is Reports.FULL:
            self.stored(keys, None, session)

    def stored(self, keys: Sequence[int], parent: int | None, session: str | None) -> None:
        before, events = None if parent is None else parent & _BITS, list[CacheEvent]()
        for key in keys:
            block = key & _BITS
            events.append(BlockStored(block, before, _TOKENS, _HERE, session))
            before = block
        self._add(events)

    def removed(self, keys: Iterable[int]) -> None:
        self._add([BlockRemoved(key & _BITS) for key in keys])

    def cleared(self) -> None:
        self._add([AllBlocksCleared()])

    def _add(self, events: Sequence[CacheEvent]) -> None:
        if not self._events:
            self._clock.after(0.0, self._send)
        self._events += events

    def _send(self) -> None:
        sequence, encoding = self._sequence, self._setup.encoding
        batch = encode_batch(self._events, time_s=self._clock.now_s, block_size=BLOCK_TOKENS, encoding=encoding)
        self._sequence += 1
        self._events = []
        for subscriber in self._subscribers:
            self._clock.after(self._setup.delay_s, partial(subscriber, sequence, batch))
