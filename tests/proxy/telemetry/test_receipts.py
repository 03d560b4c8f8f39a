from __future__ import annotations

import asyncio
import weakref
from pathlib import Path

import msgspec
import pytest

from ppd.proxy.failures import Leg
from ppd.proxy.telemetry.receipts import (
    LEGS_OF_ONE,
    CandidatesRecord,
    EncoderLegRecord,
    EncoderRecord,
    LegRecord,
    Receipt,
    ReceiptLog,
    Receipts,
)


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
    receipts.open(receipt("b"))  # in place of the old one
    assert [kept.id for kept in receipts.newest(5)] == ["b", "a"]
    assert receipts.find("a") is new


def test_a_receipt_of_many_legs_takes_the_places_of_several() -> None:
    receipts, large, encoded = Receipts(10), receipt("large"), receipt("encoded")
    large.legs = [LegRecord(kind=Leg.LOCAL, worker="D1", address="d:1", started_s=0.0)] * (3 * LEGS_OF_ONE)
    leg = EncoderLegRecord(id="e", worker="E1", address="e:1", items=1, started_s=0.0)
    encoded.encoder = EncoderRecord(began_s=0.0, legs=[leg] * (50 * LEGS_OF_ONE))
    for one in (large, *map(receipt, "abcdef")):
        receipts.open(one)
        receipts.ended(one)
    assert [one.id for one in receipts.newest(20)] == [*"fedcba", "large"], "7 and 3 more"
    receipts.open(receipt("g"))
    assert [one.id for one in receipts.newest(20)] == [*"gfedcba"]
    receipts.open(encoded)
    receipts.ended(encoded)
    assert [one.id for one in receipts.newest(20)] == ["encoded"], "the newest stays in any case"
    receipts.ended(large)  # it is not kept
    for name in "hijklmnopq":
        receipts.open(receipt(name))
    assert [one.id for one in receipts.newest(20)] == [*"qponmlkjih"]


def test_a_receipt_whose_id_is_repeated_is_not_held() -> None:
    """A client chooses its ids, and a receipt of hundreds of legs takes 100 KB."""

    class Watched(Receipt, kw_only=True, gc=True, weakref=True):
        pass

    receipts, held = Receipts(10), list[weakref.ref[Watched]]()
    for _ in range(5):
        one = Watched(**msgspec.structs.asdict(receipt("a")))
        held.append(weakref.ref(one))
        receipts.open(one)
    del one
    assert [ref() is None for ref in held] == [True, True, True, True, False]
    for name in "bcdef":
        receipts.open(receipt(name))
    assert [one.id for one in receipts.newest(20)] == [*"fedcb", "a"]
    for name in "ghij":
        receipts.open(receipt(name))
    assert [one.id for one in receipts.newest(20)] == [*"jihgfedcb", "a"]
    receipts.open(receipt("k"))
    assert receipts.find("a") is None


def test_a_repeated_id_gives_the_places_of_the_older_receipt_back() -> None:
    receipts = Receipts(4)
    for _ in range(3):
        one = receipt("a")
        one.legs = [LegRecord(kind=Leg.LOCAL, worker="D1", address="d:1", started_s=0.0)] * (2 * LEGS_OF_ONE)
        receipts.open(one)
        receipts.ended(one)
    receipts.open(receipt("b"))
    assert [one.id for one in receipts.newest(5)] == ["b", "a"]


class Ways:
    """As a decision judged them; counts how often they are written."""

    def __init__(self) -> None:
        self.times = 0

    def record(self) -> CandidatesRecord:
        self.times += 1
        return CandidatesRecord(route=["LOCAL"], decode=["D1"])


def test_judged_ways_are_written_once_their_receipt_is_read() -> None:
    receipts, one, ways = Receipts(2), receipt("a"), Ways()
    receipts.open(one)
    receipts.judged(one, ways)
    assert (one.candidates, ways.times) == (None, 0)
    assert receipts.find("a") is one and receipts.newest(1) == [one] and receipts.written(one) is one
    assert one.candidates is not None and ways.times == 1


def test_ways_of_an_earlier_decision_are_not_those_of_a_later_one() -> None:
    receipts, one = Receipts(2), receipt("a")
    receipts.open(one)
    for ways in (Ways(), None):
        receipts.judged(one, ways)
    assert receipts.written(one).candidates is None
    for ways in (Ways(), None):
        receipts.judged(one, ways)
        receipts.written(one)
    assert one.candidates is None


def test_ways_of_a_turn_that_goes_on_outlive_its_place_among_the_kept() -> None:
    receipts, running, ended = Receipts(2), receipt("a"), receipt("b")
    for one in (running, ended):
        receipts.open(one)
        receipts.judged(one, ways := Ways())
    ended.outcome = "completed"
    for name in ("c", "d"):
        receipts.open(receipt(name))
    assert running.candidates is not None and (ended.candidates, ways.times) == (None, 0)
    receipts.judged(running, Ways())  # tried again: it is not kept, but may be logged
    assert receipts.written(running).candidates is not None
    assert not receipts._unwritten


def test_a_repeated_id_takes_nothing_from_the_older_receipt() -> None:
    receipts, old, new = Receipts(2), receipt("a"), receipt("a")
    receipts.open(old)
    receipts.judged(old, Ways())
    receipts.open(new)
    assert old.candidates is not None and receipts.written(new).candidates is None
    receipts.judged(new, Ways())
    for ways in (Ways(), None):
        receipts.judged(old, ways)
        assert (old.candidates is None) == (ways is None)
    assert receipts.written(new).candidates is not None


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


def test_receipts_that_are_read_one_by_one_may_be_pushed_out_meanwhile() -> None:
    receipts, ways = Receipts(3), Ways()
    for name in ("a", "b", "c"):
        receipts.open(one := receipt(name))
        receipts.judged(one, ways)
    reading = receipts.one_by_one(2)
    assert next(reading).id == "c" and ways.times == 1, "the others are not written yet"
    for name in ("d", "e"):
        receipts.open(receipt(name))
    assert [one.id for one in reading] == ["b"]
