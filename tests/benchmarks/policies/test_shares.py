"""A mode's shares where the best other one is near its limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.policies import records
from benchmarks.policies.cells import Cell
from benchmarks.policies.records import CellRecord
from benchmarks.policies.shares import measured, table
from tests.benchmarks.policies.test_campaign import METHOD, NAME, Instantly

PAIRS, REPLICAS, ABSENT = Cell("chats", "1P_3D"), Cell("chats", "4R"), Cell("mix", "4R")


def goodput(cell: Cell, mode: str, *rates: float) -> CellRecord:
    return CellRecord(cell=cell.name, mode=mode, goodput={NAME: rates}, method=METHOD.name)


def test_a_mode_is_played_at_the_best_other_modes_rate_in_each_variant_of_its_fleet(tmp_path: Path) -> None:
    for cell in (PAIRS, REPLICAS):
        for mode, rates in (("slo", (9.0, 9.0)), ("always_local", (4.0, 6.0)), ("oracle", (8.0, 8.0))):
            records.append(tmp_path, goodput(cell, mode, *rates))
    executor = Instantly()

    rows = list(measured([PAIRS, REPLICAS, ABSENT], "slo", METHOD, tmp_path, executor))

    asked = {(job.cell.fleet, job.cell.variant): job.at_rate for job in executor.jobs}
    of_all = ("usual", "capped", "pooled")
    with_prefills = (*of_all, "prefills-answer", "capped-answer")
    variants = [*(("1P_3D", variant) for variant in with_prefills), *(("4R", variant) for variant in of_all)]
    assert asked == pytest.approx(dict.fromkeys(variants, 4.5))
    assert {job.mode for job in executor.jobs} == {"slo"}
    *_, pairs, replicas = table(rows)
    assert pairs == f"| chats, 1P_3D | 4.5 |{' 0.0%, 0.0%; 1.00 |' * 5}"
    shown = "0.0%, 0.0%; 1.00"
    assert replicas == f"| chats, 4R | 4.5 | {shown} |  | {shown} |  | {shown} |"


def test_a_cell_in_which_no_other_mode_meets_the_targets_has_no_row(tmp_path: Path) -> None:
    records.append(tmp_path, goodput(PAIRS, "slo", 9.0, 9.0))
    assert not list(measured([PAIRS], "slo", METHOD, tmp_path, Instantly()))
