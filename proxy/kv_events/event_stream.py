"""The batches of one publisher in order: which come next, again, too soon, or from a publisher that has started over.

Batches are numbered from 0 by each publisher's process, and a PUB socket drops what a subscriber does not take. A gap
is closed by the publisher's replay. That begins with the last batch that was taken: if it is not the same one, by its
time, another process counts now, whose cache began empty. A gap that stays open leaves nothing known.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from enum import Enum, auto

from ..errors import FormatError
from .block_index import BlockIndex
from .event_batch import Cleared, EventBatch, Removed, decode, time_of


class Order(Enum):
    NEXT = auto()
    AGAIN = auto()  # a replay has brought it already
    GAP = auto()
    RESTART = auto()


class Replay(Enum):
    """What a replay has come to."""

    OPEN = auto()
    CLOSED = auto()
    AGAIN = auto()  # it must be asked for once more, from `replay_from`


class EventStream:
    """One data-parallel rank's events, and what its engine holds by them."""

    def __init__(self, index: BlockIndex | None = None, *, reads_tokens: bool = False) -> None:
        self.index = BlockIndex() if index is None else index
        self._reads_tokens = reads_tokens
        self.counts = Counter[str]()  # of events by kind, and of those passed over by why
        self.is_behind = True  # batches are missing, or wait to be read: what it holds is not known now
        self.expected: int | None = None  # the number of the next batch; None: any
        self._last_live = -1
        self._last_time_s = 0.0
        self._is_joined = False  # the replay under way goes on from the batch that was taken last, or from none

    def held(self, session: int) -> int | None:
        return None if self.is_behind else self.index.held(session)

    def held_of(self, tokens: bytes, scope: str) -> int | None:
        return None if self.is_behind else self.index.held_of(tokens, scope)

    def has_told(self, session: int, tokens: int, *, of_newest: bool = False) -> bool:
        return not self.is_behind and self.index.has_told(session, tokens, of_newest=of_newest)

    @property
    def is_new(self) -> bool:
        """Nothing can be missing: it has taken no batch, or has given up what came before."""
        return self.expected is None

    # -- as batches come

    def order(self, sequence: int) -> Order:
        """Of a batch that was published just now; those of a replay have no order."""
        if self.expected is None:
            return Order.NEXT if sequence == 0 else Order.GAP
        if sequence == self.expected:
            return Order.NEXT
        if sequence > self.expected:
            return Order.GAP
        return Order.AGAIN if sequence > self._last_live else Order.RESTART

    def take(self, sequence: int, payload: bytes | memoryview) -> None:
        """The next batch. FormatError, and no change, if it can't be read, or is older than the one before."""
        batch = decode(payload, reads_tokens=self._reads_tokens)
        if batch.time_s < self._last_time_s:
            raise FormatError("KV events: a batch that is older than the last one")
        self._apply(sequence, batch)
        self._last_live = sequence

    def skip(self, sequence: int) -> None:
        """The next batch can't be read, nor be had otherwise."""
        self.index.forget()
        self.expected, self._last_live = sequence + 1, sequence

    def pass_over(self, sequence: int, payload: bytes | memoryview) -> bool:
        """A batch that a replay has brought already; False if it is younger than all that came, so that it is not."""
        with suppress(FormatError):  # the replay's may be readable
            if time_of(payload) > self._last_time_s:
                return False
        self._last_live = sequence
        return True

    def restarted(self) -> None:
        """Another process publishes now. Its cache was empty at its number 0, which is expected next."""
        self.index.clear()
        self.expected, self._last_live = 0, -1

    def lost(self) -> None:
        """What is missing can't be had: any batch may come next, and only what it says is known."""
        self.index.forget()
        self.expected, self._last_time_s = None, 0.0

    def resume(self, sequence: int) -> None:
        """What comes before this batch is given up."""
        self.lost()
        self.expected = sequence

    # -- replay

    def replay_from(self) -> int:
        """Where a replay is to begin; it is then read by `replayed` and `replay_ended`."""
        self._is_joined = False
        return max(0, (self.expected or 0) - 1)

    def replayed(self, sequence: int, payload: bytes | memoryview) -> Replay:
        """One batch of a replay, in the publisher's order. FormatError, and nothing is known, if it can't be read."""
        expected = self.expected or 0
        if sequence == expected - 1:
            if time_of(payload) != self._last_time_s:
                self.restarted()
                return Replay.AGAIN
            self._is_joined = True
        elif sequence >= expected and not self._is_joined:
            if sequence:
                self.resume(sequence)  # it keeps no older ones, so nothing shows that it is the same publisher
            self._is_joined = True
        elif sequence > expected:
            return Replay.AGAIN  # the publisher sent faster than was read
        if sequence >= expected:
            try:
                batch = decode(payload, reads_tokens=self._reads_tokens)
            except FormatError:
                self.index.forget()
                self.expected = sequence + 1
                raise
            self._apply(sequence, batch)
        return Replay.OPEN

    def replay_ended(self) -> Replay:
        if self._is_joined or not self.expected:
            return Replay.CLOSED
        self.restarted()  # it has not come as far as the batch that was taken last
        return Replay.AGAIN

    def _apply(self, sequence: int, batch: EventBatch) -> None:
        self.expected, self._last_time_s = sequence + 1, batch.time_s
        if not sequence:  # the cache was empty before it
            self.index.is_whole = True
        counts = self.counts
        for change in batch.changes:
            passed_over = self.index.apply(change)
            kind = "removed" if isinstance(change, Removed) else "cleared" if isinstance(change, Cleared) else "stored"
            counts[passed_over or kind] += 1
        counts.update(batch.passed_over)
