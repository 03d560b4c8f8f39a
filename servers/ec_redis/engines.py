"""The two ends of the transfer, without vLLM: what a producer's worker and a consumer's scheduler call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from .couriers import HANGS_S, Contact, Couriers
from .holdings import Delivery, Holdings
from .reservations import Embedding, Input, Key, Offer, Reservations, Room
from .settings import ECSettings
from .transport import Transport
from .wire import (
    Answer,
    Data,
    Metadata,
    Withdrawn,
    decode_answer,
    decode_data,
    decode_metadata,
    encode,
    encode_data,
)

Clock = Callable[[], float]
_LONGEST_CALL = 4  # operations of the transport, each of which may take `redis_timeout_s`


def contact_of(settings: ECSettings, now: Clock) -> Contact:
    return Contact(now, hangs_s=max(HANGS_S, _LONGEST_CALL * settings.redis_timeout_s))


class Producer:
    """Of one worker. Its book is changed by the engine's thread and by couriers, one at a time."""

    def __init__(
        self, name: str, settings: ECSettings, capacity_bytes: int, transport: Transport, now: Clock = time.monotonic
    ) -> None:
        self.name = name
        self._settings = settings
        self._transport = transport
        self._now = now
        self._lock = threading.RLock()  # a delivery for which there is no queue is over at once, inside of `_flush`
        self._holdings = Holdings(Room(capacity_bytes), ttl_s=settings.reservation_ttl_s)
        self.contact = contact_of(settings, now)
        self.couriers = Couriers(self.contact, stale_s=settings.redis_timeout_s, now=now)

    def start(self) -> None:
        self.couriers.send_with(self._settings.send_threads)
        self.couriers.receive_with(self._settings.receive_threads, self.fetch, self.take_answer, "verdicts")

    def announce(self, leg: str, items: Mapping[str, Embedding], consumer: str) -> None:
        """consumer: is sent the metadata; empty: it will hear of them otherwise."""
        self.contact.down_s()  # tells the log of a hanging transport; what is lost by it is encoded elsewhere
        fit = {item: one for item, one in items.items() if one.size_bytes <= self._settings.max_item_bytes}
        with self._lock:
            taken = self._holdings.announce(leg, fit, self._now())
            self._flush()
        if len(taken) < len(items):
            self.contact.warn(
                "%d embeddings of a request have no room here, and are not offered", len(items) - len(taken)
            )
        if consumer or self._settings.consumer:
            for key in taken:
                message = encode(Metadata(Offer(self.name, leg, key.item, items[key.item])))
                self._tell(consumer or self._settings.consumer, message)

    def expects(self, item: str) -> bool:
        with self._lock:
            return self._holdings.expects(item)

    def encoded(self, item: str, embedding: Embedding, rows: bytes) -> None:
        with self._lock:
            self._holdings.encoded(item, embedding, rows)
            self._flush()

    def fetch(self) -> bytes | None:
        with self._lock:
            self._holdings.expire(self._now())
            self._flush()
        return self._transport.receive_verdict()

    def take_answer(self, message: bytes) -> None:
        """Malformed: it is no verdict."""
        answer = decode_answer(message)
        with self._lock:
            self._holdings.verdict(answer.consumer, answer.key, is_granted=answer.is_granted)
            self._flush()

    def held(self) -> int:
        """Embeddings that are encoded, held or being sent."""
        with self._lock:
            return len(self._holdings)

    def _flush(self) -> None:
        deliveries, self._holdings.deliveries = self._holdings.deliveries, []
        withdrawals, self._holdings.withdrawals = self._holdings.withdrawals, []
        for one in deliveries:
            self._deliver(one)
        for consumer, key in withdrawals:
            self._tell(consumer, encode(Withdrawn(key.leg, key.item)))

    def _deliver(self, one: Delivery) -> None:
        def send() -> None:
            self._transport.send_data(one.consumer, encode_data(Data(one.key, one.embedding, one.data)))

        self.couriers.send(send, lambda: self._sent(one.key))

    def _sent(self, key: Key) -> None:
        with self._lock:
            self._holdings.sent(key)

    def _tell(self, consumer: str, message: bytes) -> None:
        self.couriers.send(lambda: self._transport.send_metadata(consumer, message))


class Consumer:
    """Of one scheduler. Its book is changed by the engine's thread and by couriers, one at a time."""

    def __init__(
        self, name: str, settings: ECSettings, capacity_bytes: int, transport: Transport, now: Clock = time.monotonic
    ) -> None:
        self.name = name
        self._settings = settings
        self._transport = transport
        self._now = now
        self._lock = threading.RLock()
        self.contact = contact_of(settings, now)
        self._reservations = Reservations(
            Room(capacity_bytes),
            ttl_s=settings.reservation_ttl_s,
            wait_s=settings.redis_timeout_s,
            max_item_bytes=settings.max_item_bytes,
        )
        self.couriers = Couriers(self.contact, stale_s=settings.redis_timeout_s, now=now)

    def start(self) -> None:
        threads = self._settings.receive_threads
        self.couriers.send_with(self._settings.send_threads)
        self.couriers.receive_with(threads, self._transport.receive_metadata, self.take_metadata, "metadata")
        self.couriers.receive_with(threads, self._transport.receive_data, self.take_data, "data")

    def is_done(self, request: str) -> bool:
        """Whether `is_ready` will say so ever after."""
        return self._reservations.is_done(request)

    def is_ready(self, request: str, inputs: Sequence[Input]) -> bool:
        may_wait = self.contact.down_s() < self._settings.redis_timeout_s
        with self._lock:
            ready = self._reservations.is_ready(request, inputs, self._now(), may_wait=may_wait)
            self._flush()
        return ready

    def has(self, item: str, request: str) -> bool:
        with self._lock:
            return self._reservations.has(item, request)

    def take(self, item: str) -> tuple[Embedding, bytes] | None:
        with self._lock:
            taken = self._reservations.take(item, self._now())
            self._flush()
        return taken

    def finish(self, request: str, offers: Iterable[Offer]) -> None:
        with self._lock:
            self._reservations.finish(request, offers, self._now())
            self._flush()

    def take_metadata(self, message: bytes) -> None:
        """Malformed: it is none."""
        told = decode_metadata(message)
        with self._lock:
            if isinstance(told, Metadata):
                self._reservations.offer(told.offer, self._now())
            else:
                self._reservations.withdraw(told.key, self._now())
            self._flush()

    def take_data(self, message: bytes) -> None:
        """Malformed: they are none. Data that were not granted are not kept."""
        data = decode_data(message, self._settings.max_item_bytes)
        with self._lock:
            self._reservations.arrive(data.key, data.embedding, data.rows, self._now())
            self._flush()

    def reserved(self) -> int:
        """Offers, and requests with media."""
        with self._lock:
            return len(self._reservations)

    def _flush(self) -> None:
        verdicts, self._reservations.verdicts = self._reservations.verdicts, []
        for offer, is_granted in verdicts:
            self._tell(offer.producer, encode(Answer(self.name, offer.leg, offer.item, is_granted)))

    def _tell(self, producer: str, message: bytes) -> None:
        self.couriers.send(lambda: self._transport.send_verdict(producer, message))
