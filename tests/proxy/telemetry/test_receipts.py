from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from ppd.proxy.telemetry.receipts import Receipt, ReceiptLog, Receipts


def receipt(request_id: str) -> Receipt:
    return Receipt(
        id=request_id,
        at="2026-01-01T00:00:00Z",
        endpoint="/v1/chat/completions",
        model="m",
        stream=True,
        session="s",
        turn=1,
        kind="first",
    )


def test_only_the_newest_receipts_are_kept() -> None:
    receipts = Receipts(2)
    for name in ("a", "b", "c"):
        receipts.open(receipt(name))
    assert receipts.find("a") is None
    assert [kept.id for kept in receipts.newest(5)] == ["c", "b"]


def test_a_repeated_id_keeps_one_receipt_the_newer() -> None:
    receipts = Receipts(2)
    old, new = receipt("a"), receipt("a")
    receipts.open(old)
    receipts.open(new)
    assert receipts.find("a") is new
    assert len(receipts.newest(5)) == 1


async def test_what_waits_when_the_log_is_closed_is_still_written(tmp_path: Path) -> None:
    log = ReceiptLog(tmp_path / "receipts.jsonl")
    log.write(receipt("a"))
    log.write(receipt("b"))
    await log.close()
    lines = (tmp_path / "receipts.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=Receipt).id for line in lines] == ["a", "b"]


@pytest.mark.parametrize("path", ["/dev/full", "missing/receipts.jsonl"])
async def test_lost_receipts_are_counted_and_told_once_a_while(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = ReceiptLog(tmp_path / path, now=lambda: 100.0)  # an absolute path stays one
    for name in ("a", "b"):
        log.write(receipt(name))
        await asyncio.to_thread(log._lines.flush, 20)
    await log.close()
    assert log.lost == 2
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "No s" in caplog.text


async def test_when_there_is_room_again_the_log_goes_on_and_says_what_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "later"
    log = ReceiptLog(folder / "receipts.jsonl")
    log.write(receipt("a"))
    await asyncio.to_thread(log._lines.flush, 20)
    folder.mkdir()
    log.write(receipt("b"))
    await log.close()
    (line,) = (folder / "receipts.jsonl").read_bytes().splitlines()
    assert msgspec.json.decode(line, type=Receipt).id == "b"
    assert "receipts lost: 1" in caplog.text
