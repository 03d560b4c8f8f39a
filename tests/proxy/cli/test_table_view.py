from __future__ import annotations

from ppd.proxy.cli.table_view import (
    LOCAL_STYLE,
    SPLIT_STYLE,
    CellCounts,
    columns,
    decision_grids,
    flip_list,
    flips,
    provenance,
)
from ppd.proxy.decision_table.score import Weights
from ppd.proxy.decision_table.table import DecisionTable
from ppd.proxy.decision_table.table_import import GridDescription, build_table, read_rows

GRID = GridDescription.decode(b"""
version = 1
kind = "ppd-grid"
name = "lab"
[provenance]
model = "Tiny-1B"
gpu = "GPU"
gpu_count = 2
engine = "sim"
engine_version = "3"
connector = "none"
date = "2026-01-01"
source = "a test"
seeds = []
note = "made up"
licence = "Apache-2.0"
[axes]
qps_counts = "conversations"
contexts = [{ name = "small", max_tokens = 512, measured_tokens = 256 }]
workloads = [
    { name = "chat", new_tokens = 64, output_tokens = 64 },
    { name = "paste", new_tokens = 1024, output_tokens = 32 },
]
""")
ROWS = b"""config,workload,qps,n_t1,n_t2,t2_ttft_avg,t2_ttft_p50,t2_ttft_p99,t2_tpot_avg,t2_tpot_p99,success_pct
1P_1D,small_chat,0.5,5,5,200,200,200,10,10,100
1P_1pD,small_chat,0.5,5,5,100,100,100,12,12,100
1P_1D,small_chat,16,5,5,200,200,200,10,10,100
1P_1pD,small_chat,16,5,5,400,400,400,10,10,100
1P_1D,small_paste,0.5,0,0,0,0,0,0,0,0
1P_1pD,small_paste,0.5,5,5,100,100,100,12,12,100
1P_1D,small_paste,4,5,3,200,200,200,10,10,80
1P_1pD,small_paste,4,5,5,190,190,190,8,8,100
"""


def lab() -> DecisionTable:
    return build_table(read_rows(ROWS), GRID, "1P_1D")


def test_a_grid_is_readable_without_colour() -> None:
    (grid,) = decision_grids(lab().scored(Weights()), with_scores=False, width=80)
    assert [line.rstrip() for line in grid.plain.splitlines()] == [
        "  conversations/s              0.5   4  16",
        "  small context, 256 tokens cached",
        "    chat            64 -> 64     L   -   S",
        "    paste         1024 -> 32     x   L*  -",
    ]


def test_scores_stand_beside_their_decisions() -> None:
    (grid,) = decision_grids(lab().scored(Weights()), with_scores=True, width=80)
    assert [line.rstrip() for line in grid.plain.splitlines()[2:]] == [
        "    chat            64 -> 64    L+0.30       -  S-1.00",
        "    paste         1024 -> 32         x  L+0.25*      -",
    ]


def test_local_and_split_have_colours_of_their_own() -> None:
    (grid,) = decision_grids(lab().scored(Weights()), with_scores=False, width=80)
    styles = {grid.plain[span.start : span.end]: span.style for span in grid.spans}
    assert (styles[" L "], styles[" S "]) == (LOCAL_STYLE, SPLIT_STYLE)


def test_a_narrow_terminal_gets_more_grids_and_loses_no_column() -> None:
    grids = list(decision_grids(lab().scored(Weights()), with_scores=False, width=40))
    assert [grid.plain.splitlines()[0].split() for grid in grids] == [
        ["conversations/s", "0.5", "4"],
        ["conversations/s", "16"],
    ]
    assert [grid.plain.splitlines()[2].split()[4:] for grid in grids] == [["L", "-"], ["S"]]
    assert all(len(line) <= 40 for grid in grids for line in grid.plain.splitlines())


def test_counts_leave_cells_without_evidence_out_of_the_share() -> None:
    counts = CellCounts.of(lab().scored(Weights()))
    assert str(counts) == "LOCAL 2 (66.7% of 3), SPLIT 1, no evidence 3"
    assert (counts.evidence, counts.cells) == (3, 6)
    assert str(CellCounts(0, 0, 4)) == "LOCAL 0, SPLIT 0, no evidence 4"


def test_flips_name_the_cells_that_weights_change_with_their_scores() -> None:
    usual, careful = Weights(), Weights(1, 3)
    flipped = flips(lab().scored(usual), lab().scored(careful))
    assert flip_list(flipped, usual, careful).plain.splitlines() == [
        "cell        qps  TTFT saved  TPOT added  at 1, 1  at 1, 3  now",
        "small chat  0.5       50.0%       20.0%   +0.300   -0.100  SPLIT",
    ]


def test_equal_weights_flip_nothing() -> None:
    assert flips(lab().scored(Weights(1, 1)), lab().scored(Weights(2, 2))) == []


def test_provenance_says_where_the_figures_are_from() -> None:
    assert provenance(lab()).plain.splitlines() == [
        "1P_1D on 2 x GPU, Tiny-1B",
        "sim 3, connector none, 2026-01-01",
        "a test (Apache-2.0)",
        "made up",
    ]


def test_columns_are_aligned_and_never_cropped() -> None:
    assert columns([("a", "number"), ("x" * 90, "1")], right=[1]).plain.splitlines() == [
        "a".ljust(90) + "  number",
        "x" * 90 + "       1",
    ]
