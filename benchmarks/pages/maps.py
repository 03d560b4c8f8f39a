"""Maps of what a mode decides: over the tokens of a prompt that the session's D holds, and those that are new."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from ppd.offline.goodput.modes import ORACLE
from ppd.offline.report.figures.style import style
from ppd.proxy.config import Mode
from ppd.proxy.decision_table.score import Weights
from ppd.proxy.decision_table.table import DecisionTable, find
from ppd.proxy.policy import Limits, Rules

from . import scenes
from .pictures import COLOURS, legend, png, tokens
from .scenes import Destination, Scene

TABLE = "h100-llama-3.1-8b-2P_2D"
HELD = tuple(round(1000 * 10 ** (step / 24)) for step in range(49))  # 1k to 100k
NEW = tuple(round(64 * 2 ** (step / 4)) for step in range(33))  # 64 to 16k
FIRST_WIDTH = 0.12  # of the column of first turns, in decades
NAMES: Final[Mapping[Destination, str]] = {
    Destination.LOCAL: "LOCAL",
    Destination.LOCAL_ELSEWHERE: "LOCAL on the other D",
    Destination.SPLIT: "SPLIT",
    Destination.SPLIT_ELSEWHERE: "SPLIT to the other D",
}
INKS: Final = ListedColormap([COLOURS[name] for name in ("blue", "sky", "red", "yellow")])  # by `Destination`


@dataclass(frozen=True, slots=True)
class Panel:
    scene: Scene
    rules: Rules


def _guarded(mode: Mode) -> list[Panel]:
    rules = Rules(mode=mode, limits=Limits(decode_busy_requests=scenes.STREAMS))
    return [Panel(scene, rules) for scene in (scenes.IDLE, scenes.BUSY_D, scenes.BUSY_P)]


def _fixed(mode: Mode) -> list[Panel]:
    return [Panel(scene, Rules(mode=mode)) for scene in (scenes.IDLE, scenes.BUSY_D, scenes.BUSY_P)]


def _predicting(mode: Mode) -> list[Panel]:
    shown = (scenes.IDLE, scenes.BUSY_D, scenes.BUSY_BOTH, scenes.BUSY_OWN_D)
    return [Panel(scene, Rules(mode=mode, laws=scenes.laws())) for scene in shown]


def _table(mode: Mode) -> list[Panel]:
    return [
        Panel(
            replace(scenes.IDLE, title=f"w_tpot = {weight}; 4 turns a second", qps=4.0),
            Rules(mode=mode, scored=_loaded(TABLE).scored(Weights(1.0, weight))),
        )
        for weight in (1, 3, 6)
    ]


def _oracle() -> list[Panel]:
    rules = Rules(mode=Mode.SLO, laws=scenes.laws())
    return [
        Panel(replace(scenes.BUSY_D, title=f"its answer has {count:,} tokens", output_tokens=count), rules)
        for count in (20, 200, 2000)
    ]


PANELS: Final[Mapping[str, Callable[[], list[Panel]]]] = {
    **{
        mode.value: partial(panels, mode)
        for panels, modes in (
            (_table, (Mode.TABLE,)),
            (_fixed, (Mode.ALWAYS_LOCAL, Mode.ALWAYS_SPLIT, Mode.PREFIX_THRESHOLD, Mode.CONDITIONAL)),
            (_guarded, (Mode.ISL_BOUNDING, Mode.PREFILL_LOAD, Mode.ISL_OR_LOAD)),
            (_predicting, (Mode.SLO, Mode.WEIGHTS, Mode.LEAST_TTFT, Mode.LMETRIC, Mode.SLACK)),
        )
        for mode in modes
    },
    ORACLE: _oracle,
}
"""Of the modes whose figure is a map."""


@lru_cache(maxsize=1)
def _loaded(name: str) -> DecisionTable:
    return DecisionTable.load(find(name))


def destinations(panel: Panel, held: Sequence[int], new: Sequence[int]) -> NDArray[np.int8]:
    """`Destination` values, (len(new), len(held)); nothing held is a first turn."""
    fleet = scenes.fleet_in(panel.scene)

    def cell(held_tokens: int, new_tokens: int) -> int:
        turn = scenes.turn_in(panel.scene, held_tokens, new_tokens)
        return scenes.destination(turn, scenes.decided(turn, fleet, panel.rules, panel.scene)).value

    return np.array([[cell(one, other) for one in held] for other in new], dtype=np.int8)


def map_figure(name: str) -> bytes:
    panels = PANELS[name]()
    found = [(destinations(panel, (0,), NEW), destinations(panel, HELD, NEW)) for panel in panels]
    with style():
        figure = Figure(figsize=(2.35 * len(panels) + 0.5, 2.95), layout="constrained")
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)
        for axes, panel, (first, later) in zip(grid[0], panels, found, strict=True):
            _draw(axes, first, later)
            axes.set_title(panel.scene.title, fontsize=9)
        grid[0][0].set_ylabel("new tokens")
        figure.supxlabel("tokens of the prompt that its D holds", fontsize=10)
        seen = sorted({int(value) for pair in found for part in pair for value in part.flat})
        entries = [Patch(color=INKS(value), label=NAMES[Destination(value)]) for value in seen]
        legend(figure, entries)
        return png(figure)


def _draw(axes: Axes, first: NDArray[np.int8], later: NDArray[np.int8]) -> None:
    left, right = np.log10(HELD[0]), np.log10(HELD[-1])
    half_x, half_y = (right - left) / (len(HELD) - 1) / 2, 1 / 8
    low, high = np.log2(NEW[0]) - half_y, np.log2(NEW[-1]) + half_y
    column = left - 2.5 * FIRST_WIDTH, left - 1.5 * FIRST_WIDTH
    norm = BoundaryNorm(np.arange(len(Destination) + 1) - 0.5, len(Destination))
    for values, extent in ((first, column), (later, (left - half_x, right + half_x))):
        axes.imshow(
            values,
            cmap=INKS,
            norm=norm,
            extent=(*extent, low, high),
            origin="lower",
            aspect="auto",
            interpolation="nearest",
        )
    axes.set_xlim(left - 3 * FIRST_WIDTH, right + half_x)
    axes.set_ylim(low, high)
    axes.grid(visible=False)
    axes.set_xticks([sum(column) / 2, *(np.log10(each) for each in (3000, 10_000, 30_000, 100_000))])
    axes.set_xticklabels(["0", *(tokens(each) for each in (3000, 10_000, 30_000, 100_000))])
    named = (64, 256, 1024, 4096, 16_384)
    axes.set_yticks([np.log2(each) for each in named], [tokens(each) for each in named])
