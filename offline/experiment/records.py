"""The records of a run: one row a request, raw, in a file of its own. Statistics are computed from them later.

A file is gzipped JSON lines: a head (the run, how it went, where it was done), then one array a request, its members in
the order of `Record`. Times are seconds since the run began. Files are written beside and renamed.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from ppd.proxy.errors import FormatError

from . import files
from .files import decode_rows, encode_rows
from .run import Run

VERSION: Final = 1
KIND: Final = "ppd-run"


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One request. A failed one keeps what is known of it, except its end: with an `error`, last_token_s is None."""

    conversation: int  # number, in order of arrival
    turn: int  # 1-based
    measured: bool  # False: part of the warm-up
    scheduled_s: float  # when it was due: at its arrival, or a pause after the answer before it
    sent_s: float  # when it was really sent
    first_token_s: float | None
    last_token_s: float | None
    prompt_tokens: int
    cached_tokens: int | None  # of the prompt, as the answer reported; None: not reported
    output_tokens: int  # generated
    route: str  # that it really took: LOCAL, SPLIT or REPLICA
    prefill: str  # names of the workers; empty for none or unknown
    decode: str
    status: int  # HTTP; 0: no answer
    error: str = ""
    images: int = 0  # that came with the turn; those of earlier ones come again and are not counted

    @property
    def ttft_s(self) -> float | None:
        """From the time when the request was due, so that a late load generator does not hide its delay."""
        return None if self.first_token_s is None or self.error else self.first_token_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        if self.first_token_s is None or self.last_token_s is None or self.error or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


class Outcome(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"  # the fleet did not survive it; `reason` says how


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run was done; empty where that is not known."""

    backend: str  # simulate, launch, target
    engine: str  # "vllm 0.32.0", "ppd simulator"
    model: str = ""
    gpu: str = ""
    gpu_count: int = 0
    connector: str = ""
    profile: str = ""  # of a simulated engine
    note: str = ""

    @property
    def is_simulated(self) -> bool:
        """No real engine: runs in virtual time, or engines of `ppd sim`."""
        return self.backend == "simulate" or self.engine.partition(" ")[0] == "sim"


def in_order(records: Iterable[Record]) -> tuple[Record, ...]:
    """By conversation and turn; records come in the order in which answers end."""
    return tuple(sorted(records, key=lambda record: (record.conversation, record.turn)))


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    run: Run
    outcome: Outcome
    origin: Origin
    started: str  # ISO 8601, UTC
    wall_s: float  # that measuring took
    records: tuple[Record, ...]
    reason: str = ""  # why it failed

    @property
    def failures(self) -> int:
        return sum(bool(record.error) for record in self.records)


class _Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    kind: str
    run: Run
    outcome: Outcome
    origin: Origin
    started: str
    wall_s: float
    requests: int
    reason: str = ""


_RECORD = msgspec.json.Decoder(Record)
_SHARED = tuple(name for name in RunResult.__struct_fields__ if name != "records")


def encode(result: RunResult) -> bytes:
    shared = {name: getattr(result, name) for name in _SHARED}
    return encode_rows(_Head(version=VERSION, kind=KIND, requests=len(result.records), **shared), result.records)


def decode(data: bytes) -> RunResult:
    head, records = decode_rows(data, _Head, _RECORD.decode, kind=KIND, version=VERSION)
    if len(records) != head.requests:
        raise FormatError(f"not a whole run: {len(records)} of {head.requests} requests")
    return RunResult(records=records, **{name: getattr(head, name) for name in _SHARED})


def load(path: Path) -> RunResult:
    return files.load(path, decode)


def save(path: Path, result: RunResult) -> None:
    files.write_whole(path, encode(result))
