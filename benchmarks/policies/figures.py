"""A picture of each part: the goodput of every mode, or variant, in every cell, with the spread over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from ppd.offline.report.figures.style import grid_of, legend, panels, png, style

from .cells import Cell
from .records import CellRecord
from .summary import Comparison, Standing, standings

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*Xph<>"
WIDTH = 0.8  # of a cell on its axis
WIDEST = 3  # panels beside each other
MOST_SLANTED = 9  # names of cells below one panel: more stand upright, on one line each
USUAL_COLOUR, USUAL_LINE = "#555555", (0, (4, 2))
USUAL_LABEL = "usual (its sessions/s below)"


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
            _dress(axes, trace, [_label(cell, here) for cell in here])
        _finish(grid, len(traces), "of the best mode's goodput")
        legend(figure, _entries(marks))
        return png(figure)


def variants_figure(made: Mapping[str, Sequence[Comparison]]) -> bytes:
    """PNG: a panel for each question and trace; a mode's goodput in each variant relative to the usual one.

    made: by question, none empty. Bars are the range of that ratio over seeds.
    """
    every = [one.cell for known in made.values() for one in known]
    traces = list(dict.fromkeys(cell.trace for cell in every))
    marks = looks(list(dict.fromkeys(cell.variant for cell in every)))
    groups = {(question, trace): _of(trace, made[question]) for question, trace in product(made, traces)}
    shown = {key: here for key, here in groups.items() if here}
    with style():
        figure, grid = panels(*grid_of(len(shown), min(len(traces), WIDEST)), share_x=False)
        for axes, ((question, trace), here) in zip(grid.flat, shown.items(), strict=False):
            fleets = list(dict.fromkeys(one.cell.fleet for one in here))
            for one in here:
                _draw_change(axes, fleets.index(one.cell.fleet), one, marks)
            usual = {one.cell.fleet: one.other.mean for one in here if one.other}
            _dress(axes, f"{trace}, {question}", [f"{fleet}\n{usual[fleet]:.3g}/s" for fleet in fleets])
            axes.axhline(1.0, color=USUAL_COLOUR, linestyle=USUAL_LINE, linewidth=1.0)
        _finish(grid, len(shown), "of the usual goodput")
        usual_entry = Line2D([], [], color=USUAL_COLOUR, linestyle=USUAL_LINE, linewidth=1.0, label=USUAL_LABEL)
        legend(figure, [usual_entry, *_entries(marks)])
        return png(figure)


def _of(trace: str, known: Sequence[Comparison]) -> list[Comparison]:
    return [one for one in known if one.cell.trace == trace]


def _dress(axes: Axes, title: str, places: Sequence[str]) -> None:
    are_many = len(places) > MOST_SLANTED
    axes.set_xticks(range(len(places)), [place.replace("\n", " ") for place in places] if are_many else places)
    axes.tick_params(axis="x", rotation=90 if are_many else 30 if len(places) > 3 else 0)
    axes.set_title(title)
    axes.set_xlim(-0.5, len(places) - 0.5)
    for edge in range(1, len(places)):
        axes.axvline(edge - 0.5, color="#bbbbbb", linewidth=0.8)
    axes.grid(visible=False, axis="x")


def _finish(grid: NDArray[Any], used: int, what: str) -> None:
    grid[0, 0].set_ylim(bottom=0)  # for all panels, as they share the axis
    for axes in list(grid.flat)[used:]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel(what)


def _entries(marks: Mapping[str, tuple[str, str]]) -> list[Line2D]:
    return [
        Line2D([], [], color=colour, marker=marker, linestyle="none", label=name)
        for name, (colour, marker) in marks.items()
    ]


def _draw(axes: Axes, place: int, known: Sequence[Standing], marks: Mapping[str, tuple[str, str]]) -> None:
    best = known[0].mean if known and known[0].mean else 1.0
    for one in known:
        _point(axes, place, one.mode, marks, (one.mean / best, one.low / best, one.high / best))


def _draw_change(axes: Axes, place: int, one: Comparison, marks: Mapping[str, tuple[str, str]]) -> None:
    assert one.ratio is not None, "the caller saw a ratio"
    _point(axes, place, one.cell.variant, marks, (one.ratio, *one.seed_range))


def _point(
    axes: Axes, place: int, name: str, marks: Mapping[str, tuple[str, str]], values: tuple[float, float, float]
) -> None:
    """values: the mean, the lowest and the highest."""
    order, (mean, low, high) = list(marks), values
    at = place + (order.index(name) - (len(order) - 1) / 2) * WIDTH / len(order)
    colour, marker = marks[name]
    around = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
    axes.errorbar(at, mean, around, color=colour, marker=marker, markersize=5, linewidth=0.8)


def _label(cell: Cell, beside: Sequence[Cell]) -> str:
    """What this cell has of its own."""
    fleets, variants = {one.fleet for one in beside}, {one.variant for one in beside}
    parts = [cell.fleet] if len(fleets) > 1 else []
    return "\n".join([*parts, *([cell.variant] if len(variants) > 1 else [])]) or cell.fleet
