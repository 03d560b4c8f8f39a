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
from ppd.proxy.decision_table.format import (
    Arm,
    Axes,
    Cell,
    ContextClass,
    FailedArms,
    WorkloadType,
)
from ppd.proxy.decision_table.score import Weights
from ppd.proxy.decision_table.table import KIND, VERSION, DecisionTable
from tests.proxy.decision_table.made_up import ORIGIN, arm

AXES = Axes(
    contexts=(ContextClass(name="small", max_tokens=512, measured_tokens=256),),
    workloads=(
        WorkloadType(name="chat", new_tokens=64, output_tokens=64),
        WorkloadType(name="paste", new_tokens=1024, output_tokens=32),
    ),
    qps=(0.5, 4.0, 16.0),
    qps_counts="conversations",
)


def cell(workload: str, qps: float, split: Arm | None, local: Arm) -> Cell:
    failed = None if split else FailedArms(split="no follow-up turn finished")
    return Cell(context="small", workload=workload, qps=qps, split=split, local=local, failed=failed)


def lab() -> DecisionTable:
    return DecisionTable(
        version=VERSION,
        kind=KIND,
        name="lab-1P_1D",
        topology="1P_1D",
        provenance=ORIGIN,
        axes=AXES,
        cells=(
            cell("chat", 0.5, arm(0.2, 0.01), arm(0.1, 0.012)),
            cell("chat", 16.0, arm(0.2, 0.01), arm(0.4, 0.01)),
            cell("paste", 0.5, None, arm(0.1, 0.012)),
            cell("paste", 4.0, arm(0.2, 0.01, failures=2), arm(0.19, 0.008)),
        ),
    )


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
