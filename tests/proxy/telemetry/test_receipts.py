from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec

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
    task = asyncio.create_task(log.run())
    await asyncio.sleep(0)
    log.write(receipt("a"))
    log.write(receipt("b"))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    lines = (tmp_path / "receipts.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=Receipt).id for line in lines] == ["a", "b"]


async def test_a_log_that_cannot_be_written_counts_its_losses(tmp_path: Path) -> None:
    log = ReceiptLog(tmp_path / "missing" / "receipts.jsonl")
    task = asyncio.create_task(log.run())
    await asyncio.sleep(0)
    log.write(receipt("a"))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert log.lost == 1
