"""What the weights buy: TTFT saved and TPOT added over the cells of tables, as w_tpot grows (the paper's figure 5)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ppd.proxy.decision_table.score import Verdict, Weights
from ppd.proxy.decision_table.table import DecisionTable

from ...experiment.statistics import half_width
from .arms import CLASSES, workload_class


@dataclass(frozen=True, slots=True)
class TradeOff:
    """Under one weight, over the cells with evidence. Changes are relative to x=0; a SPLIT cell counts as 0."""

    w_tpot: float  # w_ttft is 1
    cells: int
    local: int
    ttft_saved: float  # mean of (split - local) / split
    ttft_half_width: float | None  # of its 95 % interval over the cells
    tpot_added: float  # mean of (local - split) / split
    tpot_half_width: float | None

    @property
    def local_share(self) -> float:
        return self.local / self.cells


def by_topology(tables: Iterable[DecisionTable]) -> dict[str, list[DecisionTable]]:
    found: dict[str, list[DecisionTable]] = {}
    for table in tables:
        found.setdefault(table.topology, []).append(table)
    return found


def trade_off(tables: Iterable[DecisionTable], w_tpot: float, classes: Collection[str] = CLASSES) -> TradeOff | None:
    """None where no cell of these classes has evidence."""
    verdicts = [verdict for table in tables for verdict in _verdicts(table, w_tpot, classes)]
    if not verdicts:
        return None
    saved = [verdict.d_ttft or 0.0 if verdict.local else 0.0 for verdict in verdicts]
    added = [verdict.d_tpot or 0.0 if verdict.local else 0.0 for verdict in verdicts]
    return TradeOff(
        w_tpot=w_tpot,
        cells=len(verdicts),
        local=sum(verdict.local is True for verdict in verdicts),
        ttft_saved=sum(saved) / len(saved),
        ttft_half_width=half_width(saved),
        tpot_added=sum(added) / len(added),
        tpot_half_width=half_width(added),
    )


def trade_offs(
    tables: Sequence[DecisionTable], weights: Sequence[float], classes: Collection[str] = CLASSES
) -> list[TradeOff]:
    found = (trade_off(tables, w_tpot, classes) for w_tpot in weights)
    return [point for point in found if point is not None]


def _verdicts(table: DecisionTable, w_tpot: float, classes: Collection[str]) -> Iterator[Verdict]:
    chosen = {
        workload.name
        for workload in table.axes.workloads
        if workload_class(workload.new_tokens, workload.output_tokens) in classes
    }
    for verdict in table.scored(Weights(1.0, w_tpot)).verdicts():
        if verdict.local is not None and verdict.cell.workload in chosen:
            yield verdict
