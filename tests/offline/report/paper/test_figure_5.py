"""The paper's figure 5 beside the published rows."""

from __future__ import annotations

from ppd.offline.report.page.document import Table, Text
from ppd.offline.report.paper import figure_5
from ppd.proxy.decision_table.table import DecisionTable, find


def test_the_published_rows_do_not_give_the_printed_shares() -> None:
    section = figure_5.section([DecisionTable.load(find("h100-llama-3.1-8b-1P_3D"))])
    assert section is not None
    table, text = section.blocks
    assert isinstance(table, Table)
    assert isinstance(text, Text)
    assert [(row[0], row[2]) for row in table.rows] == [("1", "95 %"), ("3", "50 %"), ("6", "20 %")]
    assert [row[3] for row in table.rows] == ["100 %", "100 %", "95 %"]
    assert "disagree at w_tpot 3, 6" in text.words


def test_without_the_printed_topology_there_is_nothing_to_compare() -> None:
    assert figure_5.section([DecisionTable.load(find("h100-llama-3.1-8b-2P_2D"))]) is None
