from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ppd.offline.tables.published_rows import GridDescription, build_table, pair_of, read_rows
from ppd.proxy.decision_table.format import Arm, FailedArms, Tpot, Ttft
from ppd.proxy.decision_table.table import bundled
from ppd.proxy.errors import FormatError

SOURCE = Path(__file__).parents[3] / "tables" / "source"
HEADER = "config,workload,qps,n_t1,n_t2,t2_ttft_avg,t2_ttft_p50,t2_ttft_p99,t2_tpot_avg,t2_tpot_p99,success_pct,more"
SPLIT = "1P_1D,small_big_paste,0.5,5,4,100.26,100,120,9.54,10.1,90.0,z"
LOCAL = "1P_1pD,small_big_paste,0.5,5,5,45.72,31.94,102.99,7.97,8.15,100.0,z"
DESCRIPTION = b"""
version = 1
kind = "ppd-grid"
name = "g"
[provenance]
model = "m"
gpu = "g"
gpu_count = 2
engine = "e"
engine_version = "1"
connector = "c"
date = "2026-01-01"
source = "s"
seeds = [7]
note = ""
licence = "Apache-2.0"
[axes]
qps_counts = "conversations"
contexts = [{ name = "small", max_tokens = 512, measured_tokens = 256 }]
workloads = [{ name = "big_paste", new_tokens = 512, output_tokens = 64 }]
"""
GRID = GridDescription.decode(DESCRIPTION)


def csv_of(*rows: str) -> bytes:
    return "\n".join((HEADER, *rows, "")).encode()


@pytest.mark.parametrize("topology", ["1P_3D", "2P_2D", "3P_1D"])
def test_the_shipped_tables_are_what_the_import_makes_of_the_shipped_rows(topology: str) -> None:
    rows = read_rows((SOURCE / "ppd-h100-grid.csv.gz").read_bytes())
    grid = GridDescription.decode((SOURCE / "ppd-h100-grid.toml").read_bytes())
    built = build_table(rows, grid, topology)
    assert bundled()[built.name].read_bytes() == built.encode()


@pytest.mark.parametrize(
    "data", [csv_of(SPLIT, LOCAL), gzip.compress(csv_of(SPLIT, LOCAL), mtime=0)], ids=["plain", "gzip"]
)
def test_milliseconds_become_seconds_and_the_lost_requests_are_counted(data: bytes) -> None:
    table = build_table(read_rows(data), GRID, "1P_1D")
    assert table.name == "g-1P_1D"
    assert table.axes.qps == (0.5,)
    (cell,) = table.cells
    assert cell.split == Arm(
        n=4,
        failures=1,
        ttft_s=Ttft(mean=0.10026, p50=0.1, p99=0.12, std=None),
        tpot_s=Tpot(mean=0.00954, p50=None, p99=0.0101, std=None),
    )
    assert cell.local is not None
    assert (cell.local.n, cell.local.failures, cell.failed) == (5, 0, None)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1P_1D,small_big_paste,0.5,0,0,0,0,0,0,0,0.0,", "no follow-up turn finished"),
        ("1P_1D,small_big_paste,0.5,5,4,1,1,1,1,1,0.0,", "no follow-up turn finished"),
        ("1P_1D,small_big_paste,0.5,5,0,1,1,1,1,1,50.0,", "no follow-up turn finished"),
        (
            "1P_1D,small_big_paste,0.5,50,39,152.61,160.57,200,0,0,68.99,",
            "t2_tpot_avg was not recorded; 89 of 129 requests finished",
        ),
    ],
)
def test_a_run_without_measurements_is_no_evidence_and_says_why(row: str, reason: str) -> None:
    (cell,) = build_table(read_rows(csv_of(row, LOCAL)), GRID, "1P_1D").cells
    assert cell.split is None
    assert cell.local is not None
    assert cell.failed == FailedArms(split=reason)


def test_an_arm_that_was_never_tried_has_no_reason() -> None:
    later = LOCAL.replace(",0.5,", ",1.0,")
    cells = build_table(read_rows(csv_of(SPLIT, later)), GRID, "1P_1D").cells
    assert [(cell.qps, cell.split is None, cell.local is None, cell.failed) for cell in cells] == [
        (0.5, False, True, None),
        (1.0, True, False, None),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "column config is missing"),
        (csv_of().replace(b"t2_tpot_avg", b"tpot"), "column t2_tpot_avg is missing"),
        (csv_of(SPLIT, LOCAL.replace("45.72", "fast")), "line 3: t2_ttft_avg must be a number .*'fast'"),
        (csv_of(SPLIT.replace("100.26", "-1")), "line 2: t2_ttft_avg must be a number"),
        (csv_of(SPLIT.replace("100.26", "nan")), "line 2: t2_ttft_avg must be a number"),
        (csv_of(SPLIT.replace("100.26", "inf")), "line 2: t2_ttft_avg must be a number"),
        (csv_of(SPLIT.replace(",4,", ",4.5,")), "line 2: n_t2 must be a number"),
        (csv_of(SPLIT.replace(",90.0,", ",101,")), "line 2: qps must be above 0 and success_pct at most 100"),
        (csv_of(SPLIT.replace(",0.5,", ",0,")), "line 2: qps must be above 0"),
        (csv_of("1P_1D,small_big_paste,0.5"), "line 2: n_t1 must be a number .*None"),
        (csv_of(SPLIT.replace("small_big_paste", "small")), "line 2: config must be a name and workload"),
        (gzip.compress(csv_of(SPLIT), mtime=0)[:-12], "neither CSV nor gzipped CSV"),
        (b"\xff\xfe", "neither CSV nor gzipped CSV"),
    ],
)
def test_bad_rows_are_named_by_line_and_column(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_rows(data)


@pytest.mark.parametrize(
    ("rows", "config", "message"),
    [
        ((SPLIT, LOCAL), "2P_1D", "no rows of '2P_1D'; there are 1P_1D, 1P_1pD"),
        ((SPLIT,), "1P_1D", "no rows of '1P_1pD'; there are 1P_1D"),
        ((SPLIT, SPLIT, LOCAL), "1P_1D", "line 3: 1P_1D has this cell on line 2 already"),
        ((SPLIT, LOCAL.replace("big", "huge")), "1P_1D", "line 3: small_huge_paste is not on"),
        ((SPLIT.replace("1P_1D", "4R"), LOCAL), "4R", "'4R' does not end in a number of D"),
    ],
)
def test_rows_that_make_no_table_say_why(rows: tuple[str, ...], config: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        build_table(read_rows(csv_of(*rows)), GRID, config)


def test_another_pair_can_be_named() -> None:
    other = LOCAL.replace("1P_1pD", "hybrid")
    (cell,) = build_table(read_rows(csv_of(SPLIT, other)), GRID, "1P_1D", "hybrid").cells
    assert cell.local is not None


@pytest.mark.parametrize(("config", "pair"), [("2P_2D", "2P_2pD"), ("1R_1P_2D", "1R_1P_2pD"), ("8P_16D", "8P_16pD")])
def test_the_pair_is_the_configuration_with_local_decoders(config: str, pair: str) -> None:
    assert pair_of(config) == pair


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"version = 1", b"version = 2", "version"),
        (b'kind = "ppd-grid"', b'kind = "x"', "kind"),
        (b'licence = "Apache-2.0"', b"", "missing required field `licence`"),
        (b"[axes]", b"[axes", "grid description: "),
        (b'note = ""', b"note = " + b"[" * 100_000, "grid description: "),
        (b'note = ""', b"nota = 1", "nota|note"),
    ],
)
def test_a_bad_description_is_named(old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        GridDescription.decode(DESCRIPTION.replace(old, new, 1))
