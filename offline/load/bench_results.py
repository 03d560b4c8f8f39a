"""What `ppd bench` leaves behind: the records of a run that is no cell of a sweep.

The file is a run's (gzipped JSON lines, one array a request) with a head of its own kind, as a workload from a file or
against an unknown fleet has neither topology nor x.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from ppd.proxy.errors import FormatError

from ..files import decode_rows, encode_rows, write_whole
from ..records import Origin, Record

VERSION: Final = 1
KIND: Final = "ppd-bench"


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    workload: str  # its shape, or the name of its file
    pace: str
    api: str  # chat or completions
    seed: int
    origin: Origin
    started: str  # ISO 8601, UTC
    wall_s: float
    records: tuple[Record, ...]
    interrupted: bool = False


class _Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    kind: str
    workload: str
    pace: str
    api: str
    seed: int
    origin: Origin
    started: str
    wall_s: float
    requests: int
    interrupted: bool = False


_RECORD = msgspec.json.Decoder(Record)


def encode(result: BenchResult) -> bytes:
    head = _Head(
        version=VERSION,
        kind=KIND,
        workload=result.workload,
        pace=result.pace,
        api=result.api,
        seed=result.seed,
        origin=result.origin,
        started=result.started,
        wall_s=result.wall_s,
        requests=len(result.records),
        interrupted=result.interrupted,
    )
    return encode_rows(head, result.records)


def decode(data: bytes) -> BenchResult:
    """FormatError names what is missing, unknown or of another version."""
    head, records = decode_rows(data, _Head, _RECORD.decode, kind=KIND, version=VERSION)
    if len(records) != head.requests:
        raise FormatError(f"not whole: {len(records)} of {head.requests} requests")
    return BenchResult(
        workload=head.workload,
        pace=head.pace,
        api=head.api,
        seed=head.seed,
        origin=head.origin,
        started=head.started,
        wall_s=head.wall_s,
        records=records,
        interrupted=head.interrupted,
    )


def save(path: Path, result: BenchResult) -> None:
    write_whole(path, encode(result))
