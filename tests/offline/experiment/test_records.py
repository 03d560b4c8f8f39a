"""Runs on disk: what is written is read again, and what is no run is one clear error."""

from __future__ import annotations

import gzip
import resource
from pathlib import Path

import pytest

from ppd.offline.experiment.files import write_whole
from ppd.offline.experiment.records import Origin, Outcome, Record, RunResult, decode, encode, load, save
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.proxy.errors import FormatError

WORKLOAD = Workload(
    first=Profile(name="small", new_tokens=128, output_tokens=128),
    later=Profile(name="tiny", new_tokens=16, output_tokens=32),
)
GOOD = Record(0, 1, True, 0.5, 0.6, 0.9, 1.9, 128, None, 101, "SPLIT", "P1", "D2", 200)
LOST = Record(0, 2, True, 2.0, 2.0, None, None, 273, None, 0, "LOCAL", "", "D2", 502, "worker gone")
RESULT = RunResult(
    run=Run(topology="1P_3D", x=1 / 3, workload=WORKLOAD, qps=0.5),
    outcome=Outcome.FINISHED,
    origin=Origin(backend="target", engine="vllm 0.32.0"),
    started="2026-01-01T00:00:00Z",
    wall_s=12.5,
    records=(GOOD, LOST),
)


def lines(*rows: bytes) -> bytes:
    return gzip.compress(b"\n".join(rows), mtime=0)


HEAD, FIRST, SECOND = gzip.decompress(encode(RESULT)).splitlines()


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run.jsonl.gz"
    save(path, RESULT)
    assert load(path) == RESULT
    assert list(path.parent.iterdir()) == [path]
    assert encode(RESULT) == encode(decode(encode(RESULT)))


def test_ttft_counts_from_the_intended_time_and_a_failure_has_no_figures() -> None:
    assert GOOD.ttft_s == pytest.approx(0.4)
    assert GOOD.tpot_s == pytest.approx(0.01)
    assert (LOST.ttft_s, LOST.tpot_s) == (None, None)
    assert RESULT.failures == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no gzip", "not a ppd-run file"),
        (encode(RESULT)[:-20], "not a ppd-run file"),
        (encode(RESULT)[:60] + bytes(40) + encode(RESULT)[100:], "not a ppd-run file"),
        (lines(b"{}"), "missing required field `version`"),
        (lines(HEAD[:-1] + b',"deep":' + b"[" * 100_000), "not a ppd-run file"),
        (lines(HEAD.replace(b"ppd-run", b"\xff")), "not a ppd-run file"),
        (lines(HEAD.replace(b'"version":1', b'"version":2'), FIRST, SECOND), "version: must be 1, got 2"),
        (lines(HEAD.replace(b"ppd-run", b"ppd-table")), "kind: must be 'ppd-run'"),
        (lines(HEAD.replace(b'"started"', b'"began"'), FIRST, SECOND), "unknown field `began`"),
        (lines(HEAD, FIRST), "not a whole run: 1 of 2 requests"),
        (lines(HEAD, FIRST, b"[1,2]"), "not a ppd-run file"),
        (lines(HEAD.replace(b"1P_3D", b"1P"), FIRST, SECOND), "topology = '1P'"),
    ],
)
def test_what_is_no_run_says_why(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        decode(data)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    path.write_bytes(b"")
    with pytest.raises(FormatError, match=r"run\.jsonl\.gz: not a ppd-run file"):
        load(path)
    with pytest.raises(FormatError, match="No such file"):
        load(tmp_path / "absent")


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_whole(path, b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a larger file is EFBIG, as a full disk is ENOSPC
    try:
        with pytest.raises(FormatError, match=r"table\.json: cannot be written: File too large"):
            write_whole(path, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(FormatError, match=r"taken/run: cannot be written"):
        write_whole(tmp_path / "taken" / "run", b"")
