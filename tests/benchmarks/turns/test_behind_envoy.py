"""The comparison as a whole, in short: Envoy and picker carry every turn, and each figure is there."""

from __future__ import annotations

import pytest

from benchmarks.turns.behind_envoy import COLUMNS, compare

pytestmark = pytest.mark.e2e


def test_each_column_has_its_figures_and_no_turn_fails() -> None:
    columns = [column for column in COLUMNS if column.name in ("direct", "Envoy alone", "Envoy and picker")]
    about, heads, _, *lines = compare(columns, rate=100.0, seconds=1.0, repetitions=2)
    assert "100 turns/s" in about and "2 repetitions" in about
    alone, picked = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(alone) == len(picked) == heads.count("|") - 1
    assert (alone[0], alone[-1]) == ("Envoy alone", "0") and (picked[0], picked[-1]) == ("Envoy and picker", "0")
    turn, of_ppd = float(alone[3]), float(alone[4])
    assert turn > 0 and of_ppd == 0
    turn, of_ppd = float(picked[3]), float(picked[4])
    assert turn > of_ppd > 0
