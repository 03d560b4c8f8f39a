from __future__ import annotations

import pytest

from ppd.offline.report.analysis.tradeoff import by_topology, trade_off, trade_offs
from ppd.proxy.decision_table.format import Axes, Cell, ContextClass, WorkloadType
from ppd.proxy.decision_table.table import DecisionTable
from tests.proxy.decision_table.made_up import ORIGIN, arm


def table(name: str = "t-2P_2D") -> DecisionTable:
    """chat: LOCAL saves half the TTFT for a tenth of TPOT; paste: a fifth for three tenths; dead: no local arm."""
    kinds = {"chat": (32, 256), "paste": (1024, 32), "dead": (512, 64)}
    split, cells = arm(0.1, 0.01), {"chat": arm(0.05, 0.011), "paste": arm(0.08, 0.013), "dead": None}
    return DecisionTable(
        version=1,
        kind="ppd-decision-table",
        name=name,
        topology="2P_2D",
        provenance=ORIGIN,
        axes=Axes(
            contexts=(ContextClass(name="small", max_tokens=512, measured_tokens=256),),
            workloads=tuple(WorkloadType(name=k, new_tokens=n, output_tokens=o) for k, (n, o) in kinds.items()),
            qps=(1.0,),
            qps_counts="conversations",
        ),
        cells=tuple(Cell(context="small", workload=k, qps=1.0, split=split, local=c) for k, c in cells.items()),
    )


@pytest.mark.parametrize(
    ("w_tpot", "local", "saved", "added"),
    [(0.0, 2, 0.35, 0.2), (0.6, 2, 0.35, 0.2), (1.0, 1, 0.25, 0.05), (4.9, 1, 0.25, 0.05), (5.1, 0, 0.0, 0.0)],
)
def test_a_split_cell_saves_and_pays_nothing(w_tpot: float, local: int, saved: float, added: float) -> None:
    found = trade_off([table()], w_tpot)
    assert found is not None
    assert (found.cells, found.local, found.local_share) == (2, local, local / 2)
    assert found.ttft_saved == pytest.approx(saved)
    assert found.tpot_added == pytest.approx(added)


def test_a_class_of_workloads_stands_alone() -> None:
    found = trade_off([table()], 0.0, ("prefill-heavy",))
    assert found is not None
    assert (found.cells, found.ttft_half_width) == (1, None)
    assert [found.ttft_saved, found.tpot_added] == pytest.approx([0.2, 0.3])
    assert trade_off([table()], 0.0, ("balanced",)) is None
    assert trade_offs([table()], [0.0, 1.0], ("balanced",)) == []


def test_tables_of_one_topology_are_taken_together() -> None:
    tables = [table("t-2P_2D"), table("t-2P_2D-turns4")]
    assert {name: len(group) for name, group in by_topology(tables).items()} == {"2P_2D": 2}
    found = trade_off(tables, 1.0)
    assert found is not None
    assert (found.cells, found.local) == (4, 2)
