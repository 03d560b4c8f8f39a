"""The published rows, by the same code as our own; the values are those of `interference.csv.gz` at a batch of 200."""

from __future__ import annotations

import gzip

import pytest

from benchmarks.interference.published import OUTPUT_TOKENS, read
from benchmarks.interference.records import TrialKind
from benchmarks.interference.slowdowns import gather
from ppd.proxy.errors import FormatError

HEAD = (
    "batch_size,decode_avg_tpot_ms,decode_count,decode_success_count,prefill_count,prefill_success,prefill_ttft_ms,"
    "prefill_type\n"
)
ROWS = (
    HEAD
    + "0,0,0,0,0,True,,\n"
    + "1,0,0,0,1,True,82.8,full\n"
    + "".join(f"200,{tpot},200,200,0,True,,\n" for tpot in (42.0858, 36.3392, 38.5936, 37.0862, 37.6801))
    + "201,80,200,200,1,True,2000,full\n201,86,200,200,1,True,2100,full\n201,90,200,197,1,True,2100,full\n"
    + "201,42,200,200,1,True,1900,append\n"
)


def test_rows_are_compared_at_equal_decode_batches() -> None:
    points = {(point.place.kind, point.place.at): point for point in gather(read(ROWS.encode()))}
    alone, full, append = (points[kind, 200] for kind in TrialKind)
    assert alone.tpot_s is not None and alone.tpot_s.mean == pytest.approx(0.03836, rel=1e-3)
    assert full.whole is not None and full.whole.mean == pytest.approx(83 / 38.357 - 1, rel=1e-3)
    assert append.whole is not None and append.whole.mean == pytest.approx(42 / 38.357 - 1, rel=1e-3)
    assert full.added_s is not None and full.added_s.mean == pytest.approx((0.083 - 0.038357) * (OUTPUT_TOKENS - 1))


def test_a_batch_of_which_some_failed_is_counted_and_not_averaged() -> None:
    (full,) = [p for p in gather(read(ROWS.encode())) if p.place.kind is TrialKind.FULL and p.place.at == 200]
    assert full.tpot_s is not None and full.tpot_s.n == 2
    assert (full.failed, full.first_problem) == (1, "3 of 200 decode requests failed")


def test_a_prefill_beside_nothing_has_a_ttft_only() -> None:
    (lone,) = [point for point in gather(read(ROWS.encode())) if point.place.at == 0]
    assert lone.prefill_ttft_s is not None and lone.prefill_ttft_s.mean == pytest.approx(0.0828)
    assert lone.tpot_s is None


def test_what_single_tokens_did_was_not_published() -> None:
    assert all(point.overlap is None and point.stall_s is None for point in gather(read(ROWS.encode())))


def test_rows_may_be_gzipped() -> None:
    assert read(gzip.compress(ROWS.encode())) == read(ROWS.encode())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("prefill_type\n", "x\n", "column prefill_type is missing"),
        ("42.0858", "fast", "line 4: decode_avg_tpot_ms: must be a number, got 'fast'"),
        (",append\n", ",half\n", "line 12: prefill_type: must be full or append, got 'half'"),
        ("True,82.8,full", "False,82.8,full", None),
    ],
)
def test_wrong_rows_are_named(old: str, new: str, said: str | None) -> None:
    data = ROWS.replace(old, new).encode()
    if said is None:
        assert any(row.problem == "a prefill failed" for row in read(data))
        return
    with pytest.raises(FormatError, match=said):
        read(data)


@pytest.mark.parametrize("data", [b"\x1f\x8bnot gzip", b"\xff\xfe\x00"])
def test_what_is_no_csv_is_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        read(data)
