"""Decision tables as text for a terminal: pure functions from tables to rich `Text`, readable without colour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.text import Text

from ..config import Lookup
from ..decision_table.format import Cell, WorkloadType
from ..decision_table.score import Verdict, Weights
from ..decision_table.table import DecisionTable, ScoredTable

LEGEND: Final = "L LOCAL   S SPLIT   x failed   - not measured   * some requests failed"
LOCAL_STYLE: Final = "bold white on blue"
SPLIT_STYLE: Final = "bold black on bright_yellow"
MUTED: Final = "dim"


@dataclass(frozen=True, slots=True)
class CellCounts:
    """Number of cells by decision."""

    local: int
    split: int
    none: int

    @staticmethod
    def of(scored: ScoredTable) -> CellCounts:
        found = Counter(verdict.local for verdict in scored.verdicts())
        return CellCounts(local=found[True], split=found[False], none=found[None])

    @property
    def evidence(self) -> int:
        return self.local + self.split

    @property
    def cells(self) -> int:
        return self.evidence + self.none

    def __str__(self) -> str:
        share = f" ({self.local / self.evidence:.1%} of {self.evidence})" if self.evidence else ""
        return f"LOCAL {self.local}{share}, SPLIT {self.split}, no evidence {self.none}"


def summary(scored: ScoredTable) -> Text:
    return Text(f"at w_ttft {scored.weights.ttft:g}, w_tpot {scored.weights.tpot:g}: {CellCounts.of(scored)}")


def provenance(table: DecisionTable) -> Text:
    origin = table.provenance
    hardware = f" on {origin.gpu_count} x {origin.gpu}" if origin.gpu else ""
    engine = f"{origin.engine} {origin.engine_version}".strip()
    connector = origin.connector and f"connector {origin.connector}"
    lines = (
        ", ".join(filter(None, (table.topology + hardware, origin.model))),
        ", ".join(filter(None, (engine, connector, origin.date))),
        origin.source + (f" ({origin.licence})" if origin.licence else ""),
    )
    return Text("\n".join(filter(None, lines))).append(f"\n{origin.note}", MUTED)


def decision_grids(scored: ScoredTable, *, with_scores: bool, width: int) -> Iterator[Text]:
    """Workloads down, QPS across; more than one grid where the QPS points need more than `width` characters."""
    axes = scored.table.axes
    cells = {(cell.context, cell.workload, cell.qps): cell for cell in scored.table.cells}
    marks = [_mark(v, cells.get((v.cell.context, v.cell.workload, v.cell.qps)), with_scores) for v in scored.verdicts()]
    rows = [marks[start : start + len(axes.qps)] for start in range(0, len(marks), len(axes.qps))]
    heading = f"  {axes.qps_counts}/s"
    label_width = max(len(heading), *(len(_label(workload)) for workload in axes.workloads))
    column = max(4, *(len(mark) for mark in marks), *(len(f"{qps:g}") + 1 for qps in axes.qps))
    fitting = max(1, (width - label_width) // column)
    for start in range(0, len(axes.qps), fitting):
        block = slice(start, start + fitting)
        points = "".join(f"{qps:g} ".rjust(column) for qps in axes.qps[block])
        grid = Text().append(heading.ljust(label_width) + points, MUTED)
        remaining = iter(rows)
        for context in axes.contexts:
            grid.append(f"\n  {context.name} context, {context.measured_tokens} tokens cached", "bold")
            for workload in axes.workloads:
                grid.append("\n" + _label(workload).ljust(label_width))
                for mark in next(remaining)[block]:
                    grid.append(" " * (column - len(mark))).append_text(mark)
        yield grid


def flips(before: ScoredTable, after: ScoredTable) -> list[tuple[Verdict, Verdict]]:
    """The cells that two sets of weights decide differently."""
    pairs = zip(before.verdicts(), after.verdicts(), strict=True)
    return [(old, new) for old, new in pairs if old.local is not new.local]


def flip_list(flipped: Sequence[tuple[Verdict, Verdict]], before: Weights, after: Weights) -> Text:
    heading = ("cell", "qps", "TTFT saved", "TPOT added", _score_heading(before), _score_heading(after), "now")
    rows = [
        (
            f"{new.cell.context} {new.cell.workload}",
            f"{new.cell.qps:g}",
            f"{new.d_ttft:.1%}",
            f"{new.d_tpot:.1%}",
            f"{old.score:+.3f}",
            f"{new.score:+.3f}",
            "LOCAL" if new.local else "SPLIT",
        )
        for old, new in flipped
    ]
    return columns([heading, *rows], right=range(1, 6))


def verdict_list(found: Mapping[Lookup, Verdict]) -> Text:
    heading = ("lookup", "decision", "score", "TTFT saved", "TPOT added", "evidence", "cell")
    rows = [
        (str(rule), *_figures(verdict), str(verdict.evidence), str(verdict.cell)) for rule, verdict in found.items()
    ]
    return columns([heading, *rows], right=range(2, 5))


def printable(text: str) -> str:
    """Clients and workers choose ids, models and versions: what would steer a terminal is replaced."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Text:
    """Aligned columns under a heading; never cropped, unlike a rich table in a narrow terminal."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    text = Text()
    for number, row in enumerate(rows):
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        text.append(("\n" if number else "") + "  ".join(cells).rstrip(), "bold" if number == 0 else "")
    return text


def show(parts: Iterable[Text]) -> None:
    """On the terminal; its width crops nothing."""
    console = Console(highlight=False, markup=False)
    for part in parts:
        console.print(part, soft_wrap=True)


def _figures(verdict: Verdict) -> tuple[str, str, str, str]:
    if verdict.local is None:
        return "-", "-", "-", "-"
    decision = "LOCAL" if verdict.local else "SPLIT"
    return decision, f"{verdict.score:+.3f}", f"{verdict.d_ttft:.1%}", f"{verdict.d_tpot:.1%}"


def _score_heading(weights: Weights) -> str:
    return f"at {weights.ttft:g}, {weights.tpot:g}"


def _label(workload: WorkloadType) -> str:
    return f"    {workload.name:<13} {workload.new_tokens:>4} -> {workload.output_tokens:<5}"


def _mark(verdict: Verdict, cell: Cell | None, with_score: bool) -> Text:
    if verdict.local is None:
        return Text(" x " if cell is not None and cell.failed is not None else " - ", MUTED)
    letter, style = ("L", LOCAL_STYLE) if verdict.local else ("S", SPLIT_STYLE)
    has_failures = cell is not None and any(arm is not None and arm.failures for arm in (cell.split, cell.local))
    content = f"{letter}{verdict.score:+.2f}" if with_score else letter
    return Text(f" {content}{'*' if has_failures else ' '}", style)
