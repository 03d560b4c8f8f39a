"""What interpolation is worth on the tables that ship: the claim in tables/README.md."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.small import lookup
from ppd.proxy.config import Lookup
from ppd.proxy.decision_table.table import DecisionTable, bundled

TABLES = [DecisionTable.load(path) for path in bundled().values() if path.stem.startswith("h100-llama-3.1-8b")]


@pytest.mark.parametrize(
    ("leave_out", "arms", "nearest", "interpolated"),
    [
        ("without_each_qps", 702, (0.189, 0.036), (0.132, 0.019)),
        ("without_each_type", 430, (0.201, 0.027), (0.151, 0.020)),
    ],
)
def test_a_left_out_point_is_found_better_by_interpolation(
    leave_out: str, arms: int, nearest: tuple[float, float], interpolated: tuple[float, float]
) -> None:
    found: dict[Lookup, list[tuple[float, float]]] = {rule: [] for rule in Lookup}
    for table in TABLES:
        for rule, errors in lookup.errors(table, getattr(lookup, leave_out)(table)).items():
            found[rule] += errors
    assert [len(errors) for errors in found.values()] == [arms, arms]
    for rule, expected in ((Lookup.NEAREST, nearest), (Lookup.INTERPOLATED, interpolated)):
        ttft, tpot = zip(*found[rule], strict=True)
        assert (fmean(ttft), fmean(tpot)) == pytest.approx(expected, abs=0.0005)
