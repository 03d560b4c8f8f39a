from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest

from ppd.offline.bench.results import BenchResult, decode, encode, save
from ppd.offline.experiment import records
from ppd.offline.experiment.records import Origin, Record
from ppd.proxy.errors import FormatError

RECORD = Record(0, 1, True, 0.5, 0.6, 0.7, 0.9, 128, None, 32, "SPLIT", "P1", "D1", 200)
RESULT = BenchResult(
    workload="128:32",
    pace="open loop, 2 conversations a second",
    api="completions",
    seed=3,
    origin=Origin(backend="target", engine="", model="m"),
    started="2026-01-01T00:00:00+00:00",
    wall_s=4.5,
    records=(RECORD, RECORD),
)


def test_a_bench_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    save(tmp_path / "b.jsonl.gz", RESULT)
    assert decode((tmp_path / "b.jsonl.gz").read_bytes()) == RESULT


def test_a_bench_is_no_run_of_a_sweep() -> None:
    with pytest.raises(FormatError, match="kind: must be 'ppd-run', got 'ppd-bench'"):
        records.decode(encode(RESULT))


def changed(**members: object) -> bytes:
    head, *rows = gzip.decompress(encode(RESULT)).splitlines()
    new = msgspec.json.encode({**msgspec.json.decode(head), **members})
    return gzip.compress(b"\n".join((new, *rows)))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (changed(version=2), "version: must be 1, got 2"),
        (changed(kind="ppd-run"), "kind: must be .ppd-bench., got .ppd-run."),
        (changed(requests=3), "not whole: 2 of 3 requests"),
        (changed(colour="red"), "colour"),
        (b"plain text", "not a ppd-bench file"),
        (encode(RESULT)[:-20], "not a ppd-bench file"),
    ],
)
def test_a_file_that_is_none_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        decode(data)
