"""Receipts: for every turn, what was decided, from which numbers, and how each leg went.

Kept in a ring in memory for `GET /admin/requests/{id}`, and written as JSON lines when a log is configured. They hold
counts, names and times; never text of a prompt or an answer, nor a key.
"""

from __future__ import annotations

import asyncio
import errno
import gzip
import logging
import math
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import msgspec

from ..errors import LegError
from ..failures import Leg, Phase
from ..laws.targets import USUAL, SloTargets
from ..runtime.line_writer import FileSink, LineWriter, WriterLimits

log = logging.getLogger(__name__)

RECEIPT_LIMITS = WriterLimits(queue_bytes=64 * 1024 * 1024, pause_s=0.5)
COMPLAIN_EVERY_S = 60.0
LEGS_OF_ONE = 8  # so many take as much memory as a receipt without any
LINE_LIMIT_BYTES = 1024 * 1024
CLOSE_S = 3.0


class LegRecord(msgspec.Struct, kw_only=True, gc=False):
    """One upstream request; times in seconds from the turn's arrival."""

    kind: Leg
    id: str = ""  # its X-Request-Id, which is in the worker's log
    worker: str  # the registry's name, "D2"
    address: str
    started_s: float
    first_event_s: float | None = None
    events: int | None = None  # of a stream that broke off: how many had arrived
    ended_s: float | None = None
    status: int | None = None
    phase: Phase | None = None  # in which it failed
    error: str | None = None  # why it failed: a `failures.Cause`
    told_by: str = ""  # the D whose sidecar ran it; empty: this proxy did

    def fail(self, exc: LegError) -> None:
        self.phase, self.error = exc.phase, exc.cause


class EncoderLegRecord(msgspec.Struct, kw_only=True):
    """One request to an E; times in seconds from the turn's arrival."""

    id: str  # its X-Request-Id
    worker: str  # the registry's name, "E1"
    address: str
    items: int
    started_s: float
    ended_s: float | None = None
    error: str | None = None  # phase and cause


class EncoderRecord(msgspec.Struct, kw_only=True):
    """What became of a turn's images, sounds and videos."""

    began_s: float
    waited_s: float = 0.0  # for all encoders, in all attempts
    on_encoder_s: float | None = None  # that an item took at an E lately; None: not known
    in_place_s: float | None = None  # the same on the workers that compute prompts
    items: list[str] = []  # "image: encoded": kind and `ItemDecision` of each, at the last attempt; empty if left in it
    legs: list[EncoderLegRecord] = []  # of all attempts

    @property
    def decisions(self) -> list[str]:
        return [item.partition(": ")[2] for item in self.items]


class CellRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the decision table answered."""

    table: str
    lookup: str  # nearest or interpolated
    cell: str  # of several, the one with the largest weight
    evidence: str  # inside, interpolated, extrapolated or none
    score: float | None
    d_ttft: float | None
    d_tpot: float | None
    w_ttft: float
    w_tpot: float


class CandidatesRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The ways to serve the turn that were judged, the best first, as columns: one item a way.

    Columns that say nothing are left out. Workers by the registry's names, "D2". None: not predicted, or not a number.
    Numbers have four significant digits; terms as many decimals as the largest of their way needs for that.
    """

    route: list[str]
    decode: list[str]  # or the R
    prefill: list[str] = []  # empty for none
    source: list[str] = []  # whose KV is moved to where the prompt is computed
    fetched_tokens: list[int] = []  # by that
    ttft_s: list[float | None] = []  # predicted, from the decision on
    tpot_s: list[float | None] = []
    terms: dict[str, list[float | None]] = {}  # of which a way's score is the sum
    excluded: list[str] = []  # the rule that forbids it; empty for none
    chosen: int | None = 0  # which of them, from 0; None: another
    held: dict[str, dict[str, int]] = {}  # tokens of the prompt, by evidence and worker


class ShadowRecord(msgspec.Struct, kw_only=True):
    """What a picker would have done that only watches. The rest of its receipt is what was done."""

    route: str
    reason: str
    decode: str
    prefill: str
    order: str = ""
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None


class Receipt(msgspec.Struct, kw_only=True, gc=False):
    """One turn. Token counts named `estimated_...` are from before the turn; the others are the engine's."""

    id: str
    at: str  # wall clock, ISO 8601
    endpoint: str
    client: str = ""  # the name of its key
    model: str
    stream: bool
    session: str
    turn: int
    kind: str  # first, next, retry, branch or lost
    route: str = ""
    reason: str = ""
    wanted: str = ""
    forced: str = ""  # the route that the request itself asked for, with the admin key
    vetoes: tuple[str, ...] = ()
    mode: str = ""
    order: str = ""  # in which the workers of a SPLIT are chosen: mode, prefill_first or decode_first
    decode: str = ""
    prefill: str = ""
    qps: float = 0.0
    waited_s: float = 0.0  # in the queue
    estimated_prompt_tokens: int = 0
    prompt_evidence: str = "estimate"  # for that: estimate, or tokenizer
    estimated_new_tokens: int = 0
    estimated_cached_tokens: int = 0  # that the answering worker was believed to hold
    cached_evidence: str = ""  # for that: own_turns, shared_prefix or kv_events
    estimated_output_tokens: int = 0
    slo: SloTargets = USUAL
    cell: CellRecord | None = None
    candidates: CandidatesRecord | None = None  # None: the mode judges no single ways
    predicted_ttft_s: float | None = None  # from the decision on
    predicted_tpot_s: float | None = None
    laws: str = ""  # the version that the decision went by
    ttft_error: float | None = None  # measured over predicted, less 1
    tpot_error: float | None = None
    shadow: ShadowRecord | None = None  # None: this proxy decides itself
    encoder: EncoderRecord | None = None  # None: no media, or no E in the fleet
    legs: list[LegRecord] = []
    handoff_missing: str | None = None  # why D got the plain prompt although P had answered
    status: int = 0
    error: str | None = None
    # completed, rejected (the request's own fault), failed, cancelled, or broken (the answer ended early)
    outcome: str = "running"
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    counts_evidence: str = "usage"  # for these: usage in the answer, a sidecar's report, or estimate
    finish_reason: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    ended_s: float | None = None

    def note_encoders(self, record: EncoderRecord) -> None:
        """Of one attempt."""
        if (before := self.encoder) is not None:
            record.began_s, record.waited_s = before.began_s, before.waited_s + record.waited_s
            record.legs = [*before.legs, *record.legs]
        self.encoder = record

    @property
    def has_been_sent(self) -> bool:
        """Whether any worker was asked, be it to encode."""
        return bool(self.legs) or (self.encoder is not None and bool(self.encoder.legs))


class UnwrittenWays(Protocol):
    """The ways to serve a turn, as they were judged."""

    def record(self) -> CandidatesRecord: ...


class Receipts:
    """The newest `kept` receipts, by request id; fewer where some have many legs.

    What is said of the ways that were judged takes as long to write as a tenth of a turn. So it is written only once a
    receipt is read.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._by_id: dict[str, Receipt] = {}
        self._in_turn: deque[str] = deque()  # ids, oldest first; one that is repeated has a place for each time
        self._repeated: dict[str, int] = {}  # of ids with several places: how many are before the last one
        self._more: dict[str, int] = {}  # by id, how many others a receipt of many legs counts as
        self._all_more = 0
        self._unwritten: dict[str, UnwrittenWays] = {}

    def open(self, receipt: Receipt) -> None:
        by_id = self._by_id
        if (before := by_id.get(receipt.id)) is not None:
            self._repeated[receipt.id] = self._repeated.get(receipt.id, 0) + 1
            self._close(before)
        by_id[receipt.id] = receipt
        self._in_turn.append(receipt.id)
        if len(self._in_turn) + self._all_more > self._kept:
            self._forget()

    def ended(self, receipt: Receipt) -> None:
        """Its turn has ended, so all its legs are known."""
        encoder = receipt.encoder
        legs = len(receipt.legs) + (0 if encoder is None else len(encoder.legs))
        if legs >= LEGS_OF_ONE and self._by_id.get(receipt.id) is receipt:
            more = legs // LEGS_OF_ONE
            self._all_more += more - self._more.get(receipt.id, 0)
            self._more[receipt.id] = more
            self._forget()

    def _forget(self) -> None:
        in_turn, repeated = self._in_turn, self._repeated
        while 1 < len(in_turn) > self._kept - self._all_more:
            oldest = in_turn.popleft()
            if not repeated or (times := repeated.pop(oldest, 0)) == 0:
                self._close(self._by_id.pop(oldest))
            elif times > 1:
                repeated[oldest] = times - 1

    def judged(self, receipt: Receipt, ways: UnwrittenWays | None) -> None:
        """Of its newest decision; None: the mode judges none."""
        if self._by_id.get(receipt.id) is not receipt:  # it is not kept
            receipt.candidates = None if ways is None else ways.record()
            return
        receipt.candidates = None
        if ways is None:
            self._unwritten.pop(receipt.id, None)
        else:
            self._unwritten[receipt.id] = ways

    def written(self, receipt: Receipt) -> Receipt:
        """To be asked before it is read."""
        if self._by_id.get(receipt.id) is receipt and (ways := self._unwritten.pop(receipt.id, None)) is not None:
            receipt.candidates = ways.record()
        return receipt

    def find(self, request_id: str) -> Receipt | None:
        receipt = self._by_id.get(request_id)
        return None if receipt is None else self.written(receipt)

    def newest(self, limit: int) -> list[Receipt]:
        return list(self.one_by_one(limit))

    def one_by_one(self, limit: int) -> Iterator[Receipt]:
        """Those that are the newest at first. Each is written as it is taken, so other turns may go on between."""
        newest: dict[str, Receipt] = {}  # each once
        for one in reversed(self._in_turn):
            if len(newest) >= limit:
                break
            newest[one] = self._by_id[one]
        for receipt in newest.values():
            yield self.written(receipt)

    def _close(self, receipt: Receipt) -> None:
        """It is no longer kept; its turn may go on, and be logged."""
        if self._more:
            self._all_more -= self._more.pop(receipt.id, 0)
        ways = self._unwritten.pop(receipt.id, None) if self._unwritten else None
        if ways is not None and receipt.outcome == "running":
            receipt.candidates = ways.record()


class ReceiptLog:
    """Appends finished receipts to a file, in batches and off the event loop; what the file does not take is lost."""

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._now = now
        self._told_s = -math.inf
        self._lines = LineWriter(FileSink(path, self._failed), self._told_lost, limits=RECEIPT_LIMITS)

    @property
    def lost(self) -> int:
        return self._lines.lost

    def write(self, receipt: Receipt) -> None:
        self._lines.put(msgspec.json.encode(receipt) + b"\n")

    async def close(self) -> None:
        """What waits is still written, if that takes no longer than a few seconds."""
        await asyncio.to_thread(self._lines.close, CLOSE_S)

    def _failed(self, exc: OSError) -> None:
        if self._now() - self._told_s >= COMPLAIN_EVERY_S:
            self._told_s = self._now()
            log.error("receipts are lost: %s cannot be written: %s", self._path, exc.strerror)

    def _told_lost(self, count: int) -> bytes:
        log.warning("receipts lost: %d; %s takes them again", count, self._path)
        return b""


@contextmanager
def open_receipts(path: Path) -> Iterator[BinaryIO]:
    """A receipt log, also one that was compressed with gzip as it was rotated. OSError where it cannot be read."""
    with path.open("rb") as file:
        if not file.peek(2).startswith(b"\x1f\x8b"):
            yield file
            return
        try:
            with gzip.open(file) as unpacked:
                yield cast(BinaryIO, unpacked)
        except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
            raise OSError(errno.EIO, f"it is no whole gzip file: {exc}") from exc


def receipt_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Of a receipt log, with their numbers, from 1. Of one that is too long to be a receipt, the beginning."""
    number, is_rest = 0, False
    while line := file.readline(LINE_LIMIT_BYTES):
        if not is_rest:
            number += 1
            yield number, line
        is_rest = not line.endswith(b"\n")


# -- a request's id, and the time at which it came


def new_id() -> str:
    """128 random bits, as 32 hexadecimal digits. Clients see ids, and must not foretell those of others."""
    return os.urandom(16).hex()


def now_text() -> str:
    """The time in UTC to the millisecond, in ISO 8601: 2026-01-31T23:59:59.123+00:00."""
    seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
    return f"{_second(seconds)}.{milliseconds:03d}+00:00"


@lru_cache(2)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
