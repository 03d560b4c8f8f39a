"""The result file of `ppd bench`.

It looks like a run's file (gzipped JSON lines, one array a request) but has a head of its own kind: a workload from a
file, or against an unknown fleet, has neither topology nor x.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from ppd.proxy.errors import FormatError

from ..experiment.files import decode_rows, encode_rows, write_whole
from ..experiment.records import Origin, Record

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
_SHARED = tuple(name for name in BenchResult.__struct_fields__ if name != "records")


def encode(result: BenchResult) -> bytes:
    shared = {name: getattr(result, name) for name in _SHARED}
    return encode_rows(_Head(version=VERSION, kind=KIND, requests=len(result.records), **shared), result.records)


def decode(data: bytes) -> BenchResult:
    head, records = decode_rows(data, _Head, _RECORD.decode, kind=KIND, version=VERSION)
    if len(records) != head.requests:
        raise FormatError(f"not whole: {len(records)} of {head.requests} requests")
    return BenchResult(records=records, **{name: getattr(head, name) for name in _SHARED})


def save(path: Path, result: BenchResult) -> None:
    write_whole(path, encode(result))
