"""How figures look: readable in print, in grey and to the colour-blind, and the same bytes each time.

The colours are those of Okabe and Ito and never stand alone: a share of LOCAL turns has its own line style and marker
filling, a topology its own marker. Nothing here uses pyplot, whose state is global.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle
from matplotlib.ticker import FuncFormatter, LogFormatter, NullFormatter
from numpy.typing import NDArray

from ..analysis.arms import Arm

DPI: Final = 150
SOFTWARE: Final = "ppd-build-table"  # written into every picture
PANEL_IN: Final = (3.3, 2.6)
_ENTRY_IN: Final = 1.9  # of a legend
_SETTINGS: Final[dict[Any, Any]] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 6,
    "hatch.linewidth": 0.6,
    "hatch.color": "#777777",
    "figure.constrained_layout.h_pad": 0.08,
}
_MARKERS: Final = "osD^vP*Xph<>"
_ROOM: Final = 1.4  # least ratio of two neighbouring numbers on a logarithmic axis
Fill = Literal["full", "none", "left", "bottom"]


@dataclass(frozen=True, slots=True)
class Look:
    colour: str
    line: str | tuple[int, tuple[float, ...]]
    fill: Fill


_REPLICA: Final = Look("#000000", (0, (1, 1.2)), "full")
_HYBRID: Final = "#CC79A7"
_LOOKS: Final = (  # by x: 0, below 1/2, 1/2, above 1/2, 1; lines and markers get fuller with x
    Look("#D55E00", (0, (5, 2)), "none"),
    Look("#E69F00", (0, (5, 1.5, 1, 1.5)), "left"),
    Look("#009E73", (0, (8, 1.5, 1, 1.5)), "left"),
    Look("#56B4E9", (0, (12, 1.5, 1, 1.5)), "bottom"),
    Look("#0072B2", "-", "full"),
)


def look(arm: Arm) -> Look:
    # All shares between 0 and 1/2 look alike, and so do those between 1/2 and 1: few figures have two of them.
    if arm.x is None:
        return _REPLICA
    position = {0.0: 0, 0.5: 2, 1.0: 4}.get(arm.x, 1 if arm.x < 0.5 else 3)
    found = _LOOKS[position]
    return replace(found, colour=_HYBRID) if arm.mode == "hybrid" else found


@contextmanager
def style() -> Iterator[None]:
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield


def panels(rows: int, columns: int, *, share_x: bool = True, share_y: bool = True) -> tuple[Figure, NDArray[Any]]:
    """An empty figure and its axes, (rows, columns)."""
    width, height = PANEL_IN
    figure = Figure(figsize=(max(width * columns, 6.0), height * rows + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=share_x, sharey=share_y)
    return figure, np.asarray(axes)


def grid_of(count: int, widest: int = 3) -> tuple[int, int]:
    """(rows, columns) for `count` panels."""
    columns = min(count, widest)
    return -(-count // columns), columns


def png(figure: Figure) -> bytes:
    """Without version and date, so equal figures are equal bytes. The Software field lets `is_own` recognise them."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": SOFTWARE}, facecolor="white")
    return buffer.getvalue()


def is_own(data: bytes) -> bool:
    return f"Software\0{SOFTWARE}".encode() in data[:200]


def markers(topologies: Iterable[str]) -> dict[str, str]:
    return {topology: _MARKERS[number % len(_MARKERS)] for number, topology in enumerate(sorted(set(topologies)))}


def strokes(arm: Arm, marker: str, *, line: bool = True) -> dict[str, Any]:
    found = look(arm)
    return {
        "color": found.colour,
        "linestyle": found.line if line else "none",
        "marker": MarkerStyle(marker, fillstyle=found.fill, joinstyle="round"),
        "markerfacecoloralt": "white",
        "markeredgewidth": 1.3,
    }


def legend(figure: Figure, entries: Sequence[Line2D]) -> None:
    # Above the panels: below them it would overlap the axis' name.
    columns = max(1, min(int(figure.get_figwidth() / _ENTRY_IN), len(entries)))
    figure.legend(handles=list(entries), loc="outside upper center", ncols=columns, frameon=False)


def log_points(axis: Axis, points: Sequence[float]) -> None:
    """Plain numbers on a logarithmic axis: the first and last point, and those between that have room."""
    named = [points[0]]
    for point in points[1:-1]:
        if point >= _ROOM * named[-1] and points[-1] >= _ROOM * point:
            named.append(point)
    axis.set_ticks([*named, *points[1:][-1:]])
    axis.set_ticks([point for point in points if point not in named and point != points[-1]], minor=True)
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_formatter(NullFormatter())


def log_numbers(axis: Axis) -> None:
    """Plain numbers on a logarithmic axis; also between the decades where there are few."""
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_formatter(_Minor(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))


def _plain(value: float, _: object = None) -> str:
    return f"{value:g}"


class _Minor(LogFormatter):
    def __call__(self, x: float, pos: int | None = None) -> str:
        return _plain(x) if super().__call__(x, pos) else ""
