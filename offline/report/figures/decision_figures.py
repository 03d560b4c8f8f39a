"""What the weights decide: heat maps of the cells' scores, and TTFT saved for TPOT paid (the paper's figure 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ppd.proxy.decision_table.score import Verdict, Weights
from ppd.proxy.decision_table.table import DecisionTable

from ..analysis.arms import CLASSES
from ..analysis.tradeoff import TradeOff, by_topology, trade_offs
from ..page.document import Picture
from ..page.numerals import count, signed_percent
from . import style

WEIGHTS: Final = (Weights(1, 1), Weights(1, 3), Weights(1, 6))
MARKED: Final = (0.0, 1.0, 3.0, 6.0)  # w_tpot of the marks in the trade-off
SWEPT: Final = (0.0, *(float(weight) for weight in np.geomspace(0.1, 1000, 120)))
KINDS: Final = {"all": CLASSES, "prefill-heavy": (CLASSES[2],)}  # of workloads
_COLOURS: Final = "cividis"  # rises in brightness, so it is readable in grey and to the colour-blind
_SCALE: Final = Normalize(-1, 1)
_LINES: Final = ("-", (0, (5, 2)), (0, (5, 1.5, 1, 1.5)), (0, (1, 1.2)))
_INKS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")
_MARKS: Final = {0.0: "o", 1.0: "s", 3.0: "^", 6.0: "D"}


def heat_map(table: DecisionTable) -> Picture:
    contexts, points = table.axes.contexts, table.axes.qps
    width = max(3.3, 1.1 + 0.3 * len(points))
    with style.style():
        figure, axes = style.panels(len(contexts), len(WEIGHTS))
        figure.set_size_inches(
            width * len(WEIGHTS), max(0.27 * len(table.axes.workloads) + 0.75, 1.5) * len(contexts) + 0.7
        )
        for column, weights in enumerate(WEIGHTS):
            verdicts = list(table.scored(weights).verdicts())
            for row, context in enumerate(contexts):
                mine = [verdict for verdict in verdicts if verdict.cell.context == context.name]
                title = f"{context.name}, {context.measured_tokens} cached" if column == 0 else ""
                heading = f"w_ttft {weights.ttft:g}, w_tpot {weights.tpot:g}" if row == 0 else ""
                _draw_map(axes[row][column], table, mine)
                axes[row][column].set_title("\n".join(filter(None, (heading, title))), loc="left")
        figure.supxlabel(f"{table.axes.qps_counts}/s", fontsize=10)
        figure.colorbar(ScalarMappable(_SCALE, _COLOURS), ax=axes, pad=0.01).set_label("score")
        data = style.png(figure)
    return Picture(
        name=f"decisions-{_short(table)}",
        png=data,
        title=f"Decisions of {_short(table)}",
        message=_counts(table),
        caption=(
            "L is LOCAL, S is SPLIT, × is a cell without evidence for both arms: it is no decision. Colours "
            "end at scores of −1 and 1."
        ),
    )


def _short(table: DecisionTable) -> str:
    # From the topology on: the part that tells it from the sweep's other tables.
    return table.name[max(table.name.rfind(table.topology), 0) :]


def trade_off_picture(tables: Sequence[DecisionTable]) -> Picture | None:
    drawn = {
        title: {
            topology: found
            for topology, mine in by_topology(tables).items()
            if (found := trade_offs(mine, SWEPT, classes))
        }
        for title, classes in KINDS.items()
    }
    drawn = {title: curves for title, curves in drawn.items() if curves}
    if not drawn:
        return None
    topologies = sorted({topology for curves in drawn.values() for topology in curves})
    with style.style():
        figure, axes = style.panels(1, len(drawn))
        figure.set_size_inches(4.9 * len(drawn), 4.4)
        for panel, (title, curves) in zip(axes.flat, drawn.items(), strict=True):
            panel.set_title(f"{title} workloads")
            for topology, curve in curves.items():
                marked = trade_offs(by_topology(tables)[topology], MARKED, KINDS[title])
                _draw_curve(panel, curve, marked, topologies.index(topology))
        figure.supxlabel("TPOT added over x=0, % (mean over cells)", fontsize=10)
        figure.supylabel("TTFT saved over x=0, %", fontsize=10)
        style.legend(figure, _trade_off_entries(topologies))
        data = style.png(figure)
    return Picture(
        name="trade-off",
        png=data,
        title="What w_tpot buys",
        message=_trade_off_message(drawn),
        caption=(
            "Each line is a topology whose tables are decided with w_ttft 1 and w_tpot from 0, at the end where "
            "most is saved, to 1000; marks name some weights. A cell that is SPLIT counts as 0 in both figures. "
            "Every point is the most TTFT that deciding cell by cell can save at that TPOT."
        ),
    )


def _draw_map(panel: Axes, table: DecisionTable, verdicts: Sequence[Verdict]) -> None:
    names, points = [workload.name for workload in table.axes.workloads], list(table.axes.qps)
    scores = np.full((len(names), len(points)), np.nan)
    for verdict in verdicts:
        row, column = names.index(verdict.cell.workload), points.index(verdict.cell.qps)
        if verdict.score is None:
            panel.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, hatch="////", linewidth=0))
            panel.text(column, row, "×", ha="center", va="center", fontsize=9)
            continue
        scores[row, column] = verdict.score
        is_dark = _SCALE(max(-1.0, min(1.0, verdict.score))) < 0.5
        ink, letter = ("white" if is_dark else "black"), ("L" if verdict.local else "S")
        panel.text(column, row, letter, ha="center", va="center", fontsize=8.5, color=ink)
    panel.imshow(scores, cmap=_COLOURS, norm=_SCALE, aspect="auto", interpolation="nearest")
    panel.set_xticks(range(len(points)), [f"{point:g}" for point in points])
    panel.set_yticks(range(len(names)), names)
    panel.grid(visible=False)


def _counts(table: DecisionTable) -> str:
    parts = []
    for weights in WEIGHTS:
        verdicts = list(table.scored(weights).verdicts())
        local = sum(verdict.local is True for verdict in verdicts)
        known = sum(verdict.local is not None for verdict in verdicts)
        parts.append(f"{local} of {known} cells with evidence are LOCAL at w_tpot {weights.tpot:g}")
    without = sum(verdict.local is None for verdict in verdicts)
    return f"{'; '.join(parts)}; {count(without, 'cell')} without evidence."


def _draw_curve(panel: Axes, curve: Sequence[TradeOff], marked: Sequence[TradeOff], number: int) -> None:
    ink = _INKS[number % len(_INKS)]
    panel.plot(
        [100 * point.tpot_added for point in curve],
        [100 * point.ttft_saved for point in curve],
        color=ink,
        linestyle=_LINES[number % len(_LINES)],
        zorder=2,
    )
    for point in marked:
        x, y = 100 * point.tpot_added, 100 * point.ttft_saved
        panel.plot([x], [y], _MARKS[point.w_tpot], color=ink, markerfacecolor="white", markeredgewidth=1.4, zorder=3)


def _trade_off_entries(topologies: Sequence[str]) -> list[Line2D]:
    lines = [
        Line2D([], [], label=topology, color=_INKS[number % len(_INKS)], linestyle=_LINES[number % len(_LINES)])
        for number, topology in enumerate(topologies)
    ]
    marks = [
        Line2D(
            [], [], label=f"w_tpot {weight:g}", linestyle="none", marker=_MARKS[weight], color="#333333", mfc="white"
        )
        for weight in MARKED
    ]
    return [*lines, *marks]


def _trade_off_message(drawn: dict[str, dict[str, list[TradeOff]]]) -> str:
    parts = []
    for title, curves in drawn.items():
        for topology, curve in curves.items():
            most = curve[0]
            parts.append(
                f"{topology}, {title} workloads: at most {signed_percent(-most.ttft_saved)} TTFT for "
                f"{signed_percent(most.tpot_added)} TPOT, over {most.cells} cells"
            )
    return f"{'; '.join(parts)}."
