"""Figures of slowdowns: full against append beside a decode batch (the paper's figures 2 and 6), over context (7)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ppd.offline.experiment.statistics import Estimate

from .records import Experiment, TrialKind
from .slowdowns import SlowdownPoint

_DPI = 150


@dataclass(frozen=True, slots=True)
class _Style:
    """Distinct in grey and for the colour-blind: Okabe and Ito's colours, with a marker and a line style each."""

    colour: str
    marker: str
    line: str


_STYLES = {
    TrialKind.ALONE: _Style("#000000", "o", "-"),
    TrialKind.FULL: _Style("#D55E00", "^", "--"),
    TrialKind.APPEND: _Style("#0072B2", "s", "-"),
}
_AXIS = {
    Experiment.BATCH: "decoding sequences",
    Experiment.CONTEXT: "tokens of context before the prefill",
    Experiment.APPEND: "new tokens of the prefill",
}


@dataclass(frozen=True, slots=True)
class _Quantity:
    label: str
    of: Callable[[SlowdownPoint], Estimate | None]
    scale: float
    with_alone: bool = False


_QUANTITIES = (
    _Quantity("TPOT, ms", lambda point: point.tpot_s, 1000, with_alone=True),
    _Quantity("TPOT over whole answers,\n% above the batch alone", lambda point: point.whole, 100),
    _Quantity("while the prefill is under way,\n% above the batch alone", lambda point: point.overlap, 100),
    _Quantity("lost by each sequence, ms", lambda point: point.stall_s, 1000),
)


def draw(points: Sequence[SlowdownPoint], experiment: Experiment, title: str) -> bytes | None:
    """A PNG with a row for each quantity and a column for each number of prefills; None if there is nothing to draw."""
    chosen = [point for point in points if point.place.experiment is experiment]
    counts = sorted({point.place.prefills for point in chosen} - {0})
    quantities = [q for q in _QUANTITIES if any(q.of(point) for point in chosen if point.place.prefills)]
    if not counts or not quantities:
        return None
    figure = Figure(figsize=(3.6 * len(counts) + 1.2, 2.6 * len(quantities) + 0.8), layout="constrained", dpi=_DPI)
    grid = figure.subplots(len(quantities), len(counts), squeeze=False, sharex=True, sharey="row")
    for row, quantity in zip(grid, quantities, strict=True):
        for axes, count in zip(row, counts, strict=True):
            _panel(axes, [p for p in chosen if p.place.prefills in (0, count)], quantity, experiment)
        row[0].set_ylabel(quantity.label)
    for axes, count in zip(grid[0], counts, strict=True):
        axes.set_title(f"{count} prefill{'s' if count > 1 else ''} at once")
    for axes in grid[-1]:
        axes.set_xlabel(_AXIS[experiment])
    grid[0][0].legend(loc="upper left", fontsize="small")
    figure.suptitle(title)
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _panel(axes: Axes, points: Sequence[SlowdownPoint], quantity: _Quantity, experiment: Experiment) -> None:
    if not quantity.with_alone:
        axes.axhline(0, color="#666666", linewidth=0.8)
    if experiment is not Experiment.BATCH:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.25)
    for kind, group in groupby(points, key=lambda point: point.place.kind):
        known = [(point, estimate) for point in group if (estimate := quantity.of(point))]
        if known and kind is not TrialKind.ALONE:
            _line(axes, known, quantity.scale, kind)
        elif known and quantity.with_alone:
            _alone(axes, known, quantity.scale, experiment)
    if quantity.with_alone:
        axes.set_ylim(bottom=0)  # last: earlier, it would fix the top as well


def _line(axes: Axes, known: Sequence[tuple[SlowdownPoint, Estimate]], scale: float, kind: TrialKind) -> None:
    style = _STYLES[kind]
    x = [point.place.at for point, _ in known]
    mean = [scale * estimate.mean for _, estimate in known]
    half = [scale * (estimate.half_width or 0) for _, estimate in known]
    axes.plot(x, mean, color=style.colour, marker=style.marker, linestyle=style.line, markersize=4, label=str(kind))
    low, high = ([m + sign * h for m, h in zip(mean, half, strict=True)] for sign in (-1, 1))
    axes.fill_between(x, low, high, color=style.colour, alpha=0.15, linewidth=0)


def _alone(axes: Axes, known: Sequence[tuple[SlowdownPoint, Estimate]], scale: float, experiment: Experiment) -> None:
    if experiment is Experiment.BATCH:
        _line(axes, known, scale, TrialKind.ALONE)
    else:
        axes.axhline(
            scale * known[0][1].mean, color=_STYLES[TrialKind.ALONE].colour, linewidth=1, label=str(TrialKind.ALONE)
        )
