"""A picture of each part: the goodput of every mode in every cell, with the spread over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ppd.offline.report.figures.style import grid_of, legend, panels, png, style

from .cells import Cell
from .records import CellRecord
from .summary import Standing, standings

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*Xph<>"
WIDTH = 0.8  # of a cell on its axis


def looks(modes: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Of each mode the colour and the marker; no two share both."""
    return {mode: (COLOURS[at % len(COLOURS)], MARKERS[at % len(MARKERS)]) for at, mode in enumerate(modes)}


def goodput_figure(
    cells: Sequence[Cell], modes: Sequence[str], found: Mapping[str, Mapping[str, CellRecord]], question: str
) -> bytes:
    """PNG: a panel for each trace; goodput relative to the best mode of the cell, with the range over seeds."""
    traces = list(dict.fromkeys(cell.trace for cell in cells))
    marks = looks(modes)
    with style():
        figure, grid = panels(*grid_of(len(traces)), share_x=False)
        for axes, trace in zip(grid.flat, traces, strict=False):
            here = [cell for cell in cells if cell.trace == trace]
            for place, cell in enumerate(here):
                _draw(axes, place, standings(found[cell.name], question), marks)
            axes.set_xticks(range(len(here)), [_label(cell, here) for cell in here])
            axes.tick_params(axis="x", rotation=30 if len(here) > 3 else 0)
            axes.set_title(trace)
            axes.set_xlim(-0.5, len(here) - 0.5)
            for edge in range(1, len(here)):
                axes.axvline(edge - 0.5, color="#bbbbbb", linewidth=0.8)
            axes.grid(visible=False, axis="x")
        grid[0, 0].set_ylim(bottom=0)  # for all panels, as they share the axis
        for axes in list(grid.flat)[len(traces) :]:
            axes.set_axis_off()
        for axes in grid[:, 0]:
            axes.set_ylabel("of the best mode's goodput")
        legend(
            figure,
            [
                Line2D([], [], color=colour, marker=marker, linestyle="none", label=mode)
                for mode, (colour, marker) in marks.items()
            ],
        )
        return png(figure)


def _draw(axes: Axes, place: int, known: Sequence[Standing], marks: Mapping[str, tuple[str, str]]) -> None:
    best = known[0].mean if known and known[0].mean else 1.0
    order = list(marks)
    for one in known:
        at = place + (order.index(one.mode) - (len(order) - 1) / 2) * WIDTH / len(order)
        colour, marker = marks[one.mode]
        around = [[max(0.0, one.mean - one.low) / best], [max(0.0, one.high - one.mean) / best]]
        axes.errorbar(at, one.mean / best, around, color=colour, marker=marker, markersize=5, linewidth=0.8)


def _label(cell: Cell, beside: Sequence[Cell]) -> str:
    """What this cell has of its own."""
    fleets, variants = {one.fleet for one in beside}, {one.variant for one in beside}
    parts = [cell.fleet] if len(fleets) > 1 else []
    return "\n".join([*parts, *([cell.variant] if len(variants) > 1 else [])]) or cell.fleet
