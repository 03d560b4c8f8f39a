"""The files of records: what a stopped run leaves, and what is not to be mixed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.policies import records
from benchmarks.policies.records import CellRecord
from tests.benchmarks.policies.test_campaign import at


def outcome(mode: str, rate: float = 1.0, method: str = "m") -> CellRecord:
    return CellRecord(cell="chats.4R.usual", mode=mode, goodput={"25ms@0.9": (rate,)}, method=method)


def load(folder: Path) -> dict[str, CellRecord]:
    return records.load(folder, "chats.4R.usual", "m")


def test_the_newest_of_each_mode_counts(tmp_path: Path) -> None:
    for one in (outcome("table", 1.0), outcome("replica"), outcome("table", 2.0)):
        records.append(tmp_path, one)
    assert {mode: one.mean("25ms@0.9") for mode, one in load(tmp_path).items()} == {"table": 2.0, "replica": 1.0}


def test_a_line_that_was_not_finished_is_named_and_the_next_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records.append(tmp_path, outcome("table"))
    with (tmp_path / "chats.4R.usual.jsonl").open("a") as file:
        file.write('{"cell": "chats.4R.us')
    records.append(tmp_path, outcome("replica"))
    assert load(tmp_path).keys() == {"table", "replica"}
    assert "chats.4R.usual.jsonl:2 is damaged" in caplog.text


@pytest.mark.parametrize("line", [b'{"cell": "\xff"}', b'{"deep": ' + b"[" * 100_000, b"{}"])
def test_a_line_that_is_no_record_is_passed_over_and_kept(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "chats.4R.usual.jsonl"
    path.write_bytes(line + b"\n")
    records.append(tmp_path, outcome("table"))
    assert load(tmp_path).keys() == {"table"}
    forget(tmp_path)
    assert path.read_bytes() == line + b"\n"


def test_what_was_measured_otherwise_does_not_count(tmp_path: Path) -> None:
    records.append(tmp_path, outcome("table", method="another profile"))
    assert load(tmp_path) == {}


def forget(folder: Path, cell: str = "chats.4R.usual", questions: tuple[str, ...] = ("25ms@0.9",)) -> None:
    records.forget(folder, cell, ["table"], "m", questions)


def test_modes_can_be_forgotten(tmp_path: Path) -> None:
    for mode in ("table", "replica", "table"):
        records.append(tmp_path, outcome(mode))
    forget(tmp_path)
    forget(tmp_path, "no such cell")
    assert load(tmp_path).keys() == {"replica"}


def test_what_was_measured_otherwise_is_not_forgotten(tmp_path: Path) -> None:
    records.append(tmp_path, outcome("table", method="another profile"))
    with (tmp_path / "chats.4R.usual.jsonl").open("a") as file:
        file.write("damaged\n")
    before = (tmp_path / "chats.4R.usual.jsonl").read_bytes()
    forget(tmp_path)
    assert (tmp_path / "chats.4R.usual.jsonl").read_bytes() == before


def test_only_what_was_asked_is_forgotten_and_what_it_cost(tmp_path: Path) -> None:
    goodput = {"25ms@0.9": (1.0, 2.0, 3.0), "50ms@0.9": (4.0,)}
    whole = msgspec.structs.replace(outcome("table"), goodput=goodput, at_rate=at(2.0), windows=8, cpu_s=4.0)
    records.append(tmp_path, whole)
    forget(tmp_path, questions=("25ms@0.9", "25ms@0.98"))
    left = msgspec.structs.replace(whole, goodput={"50ms@0.9": (4.0,)}, at_rate=None, windows=2, cpu_s=1.0)
    assert load(tmp_path) == {"table": left}
