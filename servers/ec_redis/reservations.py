"""Which embeddings a consumer has room for. Pure: times are arguments, and what is to be sent is left for the caller.

A producer (E) offers what it encodes, a consumer (PD) grants what it needs and has room for, and the data follow.
`Reservations` is the consumer's book; the producer's is in `holdings`. A `Room` counts the bytes of each.

* What was granted has room, on both sides: a producer announces only what it can hold.
* Every reservation ends: by data, because it is not needed, because its requests ended, or by time.
* Messages may be late, repeated or lost. A key that has ended is `ignored` for a while: a repetition begins nothing.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Annotated, Literal, NamedTuple

import msgspec

Dtype = Literal["F32", "F16", "BF16"]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[^\ud800-\udfff]*$")]  # that UTF-8 can hold
Dimension = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
BYTES: dict[Dtype, int] = {"F32": 4, "F16": 2, "BF16": 2}
MOST_WAITING = 4096  # offers for which no request came yet, and keys that are ignored


class Embedding(msgspec.Struct, frozen=True):
    """What a medium becomes: a row for each of its tokens. dtype: as safetensors names it."""

    shape: tuple[Dimension, Dimension]
    dtype: Dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


class Key(NamedTuple):
    """One embedding of one of the producer's requests. item: vLLM's name of the medium."""

    leg: str
    item: str


class Offer(msgspec.Struct, frozen=True):
    """A producer has an embedding, or is about to."""

    producer: Name
    leg: Name
    item: Name
    embedding: Embedding

    @property
    def key(self) -> Key:
        return Key(self.leg, self.item)


class Verdict(NamedTuple):
    """The consumer's answer to an offer: a grant or a refusal."""

    offer: Offer
    is_granted: bool


class Input(NamedTuple):
    """One medium of a consumer's request; one that is there twice counts once."""

    item: str
    embedding: Embedding  # that the consumer's model takes
    is_needed: bool  # neither the KV cache has its tokens nor the encoder cache its embedding
    is_awaited: bool  # the request says that a producer encodes it
    offer: Offer | None  # the request's own


class Room:
    """Bytes that are promised (preallocated) or filled (allocated): together never more than there are."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._promised = dict[Hashable, int]()
        self._filled = dict[Hashable, int]()

    def can_preallocate(self, size_bytes: int) -> bool:
        return self.used_bytes + size_bytes <= self.capacity_bytes

    def preallocate(self, key: Hashable, size_bytes: int) -> None:
        assert self.can_preallocate(size_bytes), "what is granted has room"
        assert key not in self._promised and key not in self._filled, "one reservation a key"
        self._promised[key] = size_bytes
        self.used_bytes += size_bytes

    def depreallocate(self, key: Hashable) -> None:
        self.used_bytes -= self._promised.pop(key)

    def finalize_allocation(self, key: Hashable) -> None:
        self._filled[key] = self._promised.pop(key)

    def deallocate(self, key: Hashable) -> None:
        self.used_bytes -= self._filled.pop(key)


class Ignored:
    """Keys that have ended, for `ttl_s`, but at most `MOST_WAITING` of them."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._until_s = dict[Hashable, float]()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._until_s

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, key: Hashable, now_s: float) -> None:
        self._until_s.pop(key, None)
        self._until_s[key] = now_s + self._ttl_s
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        while self._until_s:
            first = next(iter(self._until_s))
            if self._until_s[first] > now_s and len(self._until_s) <= MOST_WAITING:
                return
            del self._until_s[first]


class Place(Enum):
    """Of an offer, at its consumer."""

    WAITING = auto()  # for a request that needs it
    PENDING = auto()  # for room
    GRANTED = auto()
    ARRIVED = auto()


@dataclass(slots=True)
class _Reservation:
    offer: Offer
    until_s: float
    place: Place = Place.WAITING
    wanted_by: set[str] = field(default_factory=set)  # requests
    data: bytes = b""


@dataclass(slots=True)
class _Progress:
    """Of one request: its inputs for which nothing is waited any more, of `total`."""

    until_s: float  # then it waits for none
    total: int = 0
    done: set[str] = field(default_factory=set)
    offered: set[str] = field(default_factory=set)  # inputs whose offer in the request has been read


class Reservations:
    """The consumer's book, by item: the first offer that a request needs counts, others are refused.

    `verdicts` are the caller's to send, and to clear.
    """

    def __init__(self, room: Room, *, ttl_s: float, wait_s: float, max_item_bytes: int) -> None:
        """ttl_s: for an offer without a request, and for granted data. wait_s: for all that one request waits."""
        self._room = room
        self._ttl_s, self._wait_s = ttl_s, wait_s
        self._max_bytes = min(max_item_bytes, room.capacity_bytes)
        self._book = dict[str, _Reservation]()
        self._pending = dict[str, None]()  # items, first come, first served
        self._requests = dict[str, _Progress]()
        self._ignored = Ignored(ttl_s)
        self._looks_at_s = 0.0
        self.verdicts = list[Verdict]()

    def __len__(self) -> int:
        return len(self._book) + len(self._requests)

    def offer(self, offer: Offer, now_s: float) -> None:
        """A producer's metadata."""
        known = self._book.get(offer.item)
        if known is not None and known.offer.key == offer.key:
            return
        is_taken = known is not None and known.place is not Place.WAITING
        if offer.key in self._ignored or is_taken or offer.embedding.size_bytes > self._max_bytes:
            self._refuse(offer, now_s)
            return
        if known is not None:  # nobody asked for it yet, and the newer producer is the likelier to live
            self._end(known, now_s)
        elif len(self._book) >= MOST_WAITING:
            self._end_oldest(now_s)
        self._book[offer.item] = _Reservation(offer, now_s + self._ttl_s)

    def withdraw(self, key: Key, now_s: float) -> None:
        """The producer can't send it. What has arrived stays."""
        known = self._book.get(key.item)
        if known is not None and known.offer.key == key and known.place is not Place.ARRIVED:
            self._end(known, now_s, tells=False)
            self._grant(now_s)

    def is_ready(self, request: str, inputs: Sequence[Input], now_s: float, *, may_wait: bool = True) -> bool:
        """Whether the request may run: each input has arrived, is not needed, or will be encoded here.

        Reserves what the request needs, and gives up what it does not.
        """
        self.expire(now_s)
        progress = self._requests.get(request)
        if progress is None:
            progress = self._requests[request] = _Progress(now_s + self._wait_s)
        progress.total = len(inputs)
        for one in inputs:
            if one.item not in progress.done:
                self._look_at(request, progress, one, now_s)
        if now_s >= progress.until_s or not may_wait:
            for one in inputs:
                if one.item not in progress.done and not self.has(one.item, request):
                    self._leave(request, one.item, now_s)
                    progress.done.add(one.item)
        self._grant(now_s)
        return all(one.item in progress.done or self.has(one.item, request) for one in inputs)

    def is_done(self, request: str) -> bool:
        """Whether `is_ready` will say so ever after."""
        progress = self._requests.get(request)
        return progress is not None and len(progress.done) == progress.total

    def has(self, item: str, request: str) -> bool:
        """The request's data are here. That changes by `take`, and with what the requests do, but not with time."""
        known = self._book.get(item)
        return known is not None and known.place is Place.ARRIVED and request in known.wanted_by

    def arrive(self, key: Key, embedding: Embedding, data: bytes, now_s: float) -> bool:
        """False: nobody waits for these data, or not for such; they are not kept."""
        known = self._book.get(key.item)
        if known is None or known.offer.key != key or known.place is not Place.GRANTED:
            return False
        if embedding != known.offer.embedding or len(data) != embedding.size_bytes:
            self._end(known, now_s)
            self._grant(now_s)
            return False
        self._room.finalize_allocation(key.item)
        known.place, known.data = Place.ARRIVED, data
        return True

    def take(self, item: str, now_s: float) -> tuple[Embedding, bytes] | None:
        """Hands the data over to the engine's own cache; None: they are not here."""
        known = self._book.get(item)
        if known is None or known.place is not Place.ARRIVED:
            return None
        embedding, data = known.offer.embedding, known.data
        self._end(known, now_s)
        self._grant(now_s)
        return embedding, data

    def finish(self, request: str, offers: Iterable[Offer], now_s: float) -> None:
        """The request has ended, perhaps by an abort. offers: all that it carried, also those never looked at."""
        self._requests.pop(request, None)
        for known in [one for one in self._book.values() if request in one.wanted_by]:
            self._leave(request, known.offer.item, now_s)
        for offer in offers:
            known_of = self._book.get(offer.item)
            if known_of is not None and known_of.offer.key == offer.key:
                self._leave(request, offer.item, now_s)
            elif offer.key not in self._ignored:
                self._refuse(offer, now_s)
        self._grant(now_s)

    def expire(self, now_s: float) -> None:
        """Ends offers that no request needs, and grants that were not followed by data."""
        if now_s < self._looks_at_s:
            return
        self._looks_at_s = now_s + self._ttl_s / 16
        ends = (Place.WAITING, Place.GRANTED)
        for known in [one for one in self._book.values() if one.place in ends and one.until_s <= now_s]:
            self._end(known, now_s)
        self._ignored.expire(now_s)
        self._grant(now_s)

    def _look_at(self, request: str, progress: _Progress, one: Input, now_s: float) -> None:
        if one.offer is not None and one.item not in progress.offered:
            progress.offered.add(one.item)
            self.offer(one.offer, now_s)
        known = self._book.get(one.item)
        if not one.is_needed:
            self._leave(request, one.item, now_s)
            progress.done.add(one.item)
        elif known is None:
            if one.offer is not None or not one.is_awaited:
                progress.done.add(one.item)  # it will be encoded here
        elif known.offer.embedding != one.embedding:
            progress.done.add(one.item)
            self._leave(request, one.item, now_s)
        else:
            known.wanted_by.add(request)
            if known.place is Place.WAITING:
                known.place = Place.PENDING
                self._pending[one.item] = None

    def _grant(self, now_s: float) -> None:
        while self._pending:
            item = next(iter(self._pending))
            known = self._book[item]
            if not self._room.can_preallocate(known.offer.embedding.size_bytes):
                return  # those that came later wait too, or a large one would wait for ever
            del self._pending[item]
            self._room.preallocate(item, known.offer.embedding.size_bytes)
            known.place, known.until_s = Place.GRANTED, now_s + self._ttl_s
            self.verdicts.append(Verdict(known.offer, True))

    def _leave(self, request: str, item: str, now_s: float) -> None:
        known = self._book.get(item)
        if known is not None:
            known.wanted_by.discard(request)
            if not known.wanted_by:
                self._end(known, now_s)

    def _end(self, known: _Reservation, now_s: float, *, tells: bool = True) -> None:
        """Its requests, if any are left, wait for it no more. tells: the producer, unless it has sent the data."""
        item = known.offer.item
        del self._book[item]
        self._pending.pop(item, None)
        if known.place is Place.GRANTED:
            self._room.depreallocate(item)
        elif known.place is Place.ARRIVED:
            self._room.deallocate(item)
        for request in known.wanted_by:
            self._requests[request].done.add(item)
        if tells and known.place is not Place.ARRIVED:
            self._refuse(known.offer, now_s)
        else:
            self._ignored.add(known.offer.key, now_s)

    def _end_oldest(self, now_s: float) -> None:
        oldest = next((one for one in self._book.values() if one.place is Place.WAITING), None)
        if oldest is not None:
            self._end(oldest, now_s)

    def _refuse(self, offer: Offer, now_s: float) -> None:
        self._ignored.add(offer.key, now_s)
        self.verdicts.append(Verdict(offer, False))
