"""Which embeddings a producer holds until a consumer has given its verdict. Pure, as `reservations`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from .reservations import Embedding, Key, Room


class Stage(Enum):
    """Of an embedding, at its producer."""

    ENCODING = auto()
    HELD = auto()
    SENDING = auto()


@dataclass(slots=True)
class _Holding:
    embedding: Embedding
    until_s: float
    stage: Stage = Stage.ENCODING
    consumer: str = ""  # that was granted it; empty: none yet
    data: bytes = b""


class Delivery(NamedTuple):
    consumer: str
    key: Key
    embedding: Embedding
    data: bytes


class Withdrawal(NamedTuple):
    """What a consumer granted, and won't get."""

    consumer: str
    key: Key


class Holdings:
    """The producer's book: an embedding is held until a grant or a refusal, and whichever comes second sends.

    `deliveries` and `withdrawals` are the caller's to send, and to clear; it calls `sent` after each delivery.
    """

    def __init__(self, room: Room, *, ttl_s: float) -> None:
        self._room = room
        self._ttl_s = ttl_s
        self._book = dict[Key, _Holding]()
        self.deliveries = list[Delivery]()
        self.withdrawals = list[Withdrawal]()

    def __len__(self) -> int:
        return len(self._book)

    def announce(self, leg: str, items: Mapping[str, Embedding], now_s: float) -> list[Key]:
        """What a request is about to encode. Returns what there is room for: that may be offered."""
        self.expire(now_s)
        taken = []
        for item, embedding in items.items():
            key = Key(leg, item)
            if key not in self._book and self._room.can_preallocate(embedding.size_bytes):
                self._room.preallocate(key, embedding.size_bytes)
                self._book[key] = _Holding(embedding, now_s + self._ttl_s)
                taken.append(key)
        return taken

    def expects(self, item: str) -> bool:
        """Whether `encoded` would keep it."""
        return any(key.item == item and one.stage is Stage.ENCODING for key, one in self._book.items())

    def encoded(self, item: str, embedding: Embedding, data: bytes) -> None:
        for key, one in list(self._book.items()):
            if key.item != item or one.stage is not Stage.ENCODING:
                continue
            if embedding != one.embedding or len(data) != embedding.size_bytes:
                self._end(key)
                continue
            self._room.finalize_allocation(key)
            one.stage, one.data = Stage.HELD, data
            if one.consumer:
                self._deliver(key, one)

    def verdict(self, consumer: str, key: Key, *, is_granted: bool) -> None:
        one = self._book.get(key)
        if one is None:
            if is_granted:
                self.withdrawals.append(Withdrawal(consumer, key))
        elif one.stage is Stage.SENDING:
            if is_granted and consumer != one.consumer:
                self.withdrawals.append(Withdrawal(consumer, key))
        elif not is_granted:
            if one.consumer in ("", consumer):
                one.consumer = ""
                self._end(key)
        elif one.consumer and consumer != one.consumer:
            self.withdrawals.append(Withdrawal(consumer, key))
        else:
            one.consumer = consumer
            if one.stage is Stage.HELD:
                self._deliver(key, one)

    def sent(self, key: Key) -> None:
        """Its delivery has gone out, or failed."""
        assert self._book[key].stage is Stage.SENDING
        self._book[key].consumer = ""
        self._end(key)

    def expire(self, now_s: float) -> None:
        """Ends what no consumer asked for. What is being sent ends with `sent`."""
        ended = [key for key, one in self._book.items() if one.stage is not Stage.SENDING and one.until_s <= now_s]
        for key in ended:
            self._end(key)

    def _deliver(self, key: Key, one: _Holding) -> None:
        one.stage = Stage.SENDING
        self.deliveries.append(Delivery(one.consumer, key, one.embedding, one.data))

    def _end(self, key: Key) -> None:
        one = self._book.pop(key)
        if one.stage is Stage.ENCODING:
            self._room.depreallocate(key)
        else:
            self._room.deallocate(key)
        if one.consumer:
            self.withdrawals.append(Withdrawal(one.consumer, key))
