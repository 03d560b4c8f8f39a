"""The figure of docs/laws.md: what the laws predict of a turn, and what was published.

The published rows tell no batch. The sequences that decoded on each D are tokens a second of one D times their TPOT.
Only arms whose turns all went through P are shown there: on their D, nothing else was computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ppd.offline.experiment.cells import ROUTES, MeasuredCell
from ppd.offline.report.figures.style import style
from ppd.offline.tables.published_cells import read_cells
from ppd.proxy.config import Mode
from ppd.proxy.laws.prediction import Prediction
from ppd.proxy.policy import Route, Rules
from ppd.servers.fleet.topology import Topology

from . import scenes
from .pictures import COLOURS, png, tokens
from .scenes import D1, Scene

PUBLISHED = Path(__file__).parents[2] / "tables" / "source" / "ppd-h100-grid.csv.gz"
FITTED_TOKENS: Final = 1024  # the most new tokens of a published turn
HELD_TOKENS: Final = 256  # of the published turns that are shown: 128 of a prompt, and the answer
LOW_QPS: Final = 2.0
NEW = tuple(round(16 * 2 ** (step / 4)) for step in range(41))  # 16 to 16k
SEQUENCES = tuple(range(1, 73))
CONTEXTS: Final = {500: ("blue", "-"), 8192: ("green", "--"), 32_768: ("red", "-.")}
BESIDE: Final = f"LOCAL beside {scenes.STREAMS} streams of {tokens(scenes.STREAM_TOKENS)}"
NEAR: Final = (300, 800)  # mean contexts of published cells that stand beside the curve of 500


def predicted(scene: Scene, route: Route, held_tokens: int, new_tokens: int) -> Prediction:
    """Of the way over the session's D."""
    rules = Rules(mode=Mode.LEAST_TTFT, laws=scenes.laws())
    turn = scenes.turn_in(scene, held_tokens, new_tokens)
    decision = scenes.decided(turn, scenes.fleet_in(scene), rules, scene)
    found = next(way for way in decision.candidates if way.route is route and way.decode.id == D1)
    assert found.prediction is not None, "all have the profile"
    return found.prediction


def tpot_s(sequences: int, context_tokens: int) -> float:
    """Of a turn that is the last of so many sequences, each as long."""
    scene = replace(scenes.IDLE, streams=(sequences - 1, 0), stream_tokens=context_tokens, output_tokens=2)
    return predicted(scene, Route.LOCAL, context_tokens - 2, 1).tpot_s


def published_ttft_s(cells: Sequence[MeasuredCell], x: float) -> dict[int, float]:
    """By new tokens: the median over fleets and low rates of medians, of turns after a short first one."""
    found: dict[int, list[float]] = {}
    for cell in cells:
        small = cell.workload.first.new_tokens + cell.workload.first.output_tokens == HELD_TOKENS
        if cell.x == x and small and cell.qps <= LOW_QPS and cell.later_ttft_s and cell.later_ttft_s.p50:
            found.setdefault(cell.workload.later.new_tokens, []).append(cell.later_ttft_s.p50)
    return {new: median(times_s) for new, times_s in sorted(found.items())}


def published_tpot_s(cells: Sequence[MeasuredCell]) -> Iterator[tuple[float, float]]:
    """Sequences on each D, and TPOT."""
    for cell in cells:
        if cell.x == 0.0 and cell.tpot_s and cell.tokens_per_s and NEAR[0] <= _context_tokens(cell) <= NEAR[1]:
            at_each = cell.tokens_per_s / Topology.parse(cell.topology).decodes
            yield at_each * cell.tpot_s.mean, cell.tpot_s.mean


def _context_tokens(cell: MeasuredCell) -> float:
    """Mean over the steps that decode, by the nominal lengths."""
    first, later = cell.workload.first, cell.workload.later
    before = first.new_tokens + first.output_tokens + later.new_tokens
    steps = first.output_tokens + later.output_tokens
    sums = (first.new_tokens + first.output_tokens / 2) * first.output_tokens
    return (sums + (before + later.output_tokens / 2) * later.output_tokens) / steps


def laws_figure() -> bytes:
    cells = read_cells(PUBLISHED)
    with style():
        figure = Figure(figsize=(9.4, 3.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_ttft(left, cells)
        _draw_tpot(right, cells)
        return png(figure)


def _draw_ttft(axes: Axes, cells: Sequence[MeasuredCell]) -> None:
    curves = (
        ("SPLIT", scenes.IDLE, Route.SPLIT, "red", "-"),
        (BESIDE, scenes.BUSY_D, Route.LOCAL, "sky", "--"),
        ("LOCAL, its D idle", scenes.IDLE, Route.LOCAL, "blue", "-"),
    )
    for label, scene, route, colour, line in curves:
        times_ms = [1000 * predicted(scene, route, HELD_TOKENS, new).ttft_s for new in NEW]
        axes.plot(NEW, times_ms, color=COLOURS[colour], linestyle=line, label=label)
    for x, colour, marker in ((0.0, "red", "s"), (1.0, "blue", "o")):
        found = published_ttft_s(cells, x)
        axes.plot(
            list(found),
            [1000 * time_s for time_s in found.values()],
            color=COLOURS[colour],
            marker=marker,
            linestyle="none",
            markersize=5,
            label=f"{ROUTES[x]}, published",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    named = (16, 64, 256, 1024, 4096, 16_384)
    axes.set_xticks(named, [tokens(each) for each in named])
    axes.set_yticks((20, 50, 100, 200, 500, 1000), ["20", "50", "100", "200", "500", "1,000"])
    axes.set_ylim(20, 2000)
    axes.minorticks_off()
    axes.axvline(FITTED_TOKENS, color="#777777", linewidth=0.9, linestyle=":")
    axes.text(FITTED_TOKENS * 1.15, 22, "beyond what\nwas fitted", fontsize=8, color="#555555")
    axes.set_xlabel(f"new tokens, after {HELD_TOKENS} that D holds")
    axes.set_ylabel("TTFT, ms")
    axes.legend(frameon=False, loc="upper left")


def _draw_tpot(axes: Axes, cells: Sequence[MeasuredCell]) -> None:
    for context, (colour, line) in CONTEXTS.items():
        times_ms = [1000 * tpot_s(sequences, context) for sequences in SEQUENCES]
        axes.plot(SEQUENCES, times_ms, color=COLOURS[colour], linestyle=line, label=f"{tokens(context)} tokens each")
    points = [(at, 1000 * time_s) for at, time_s in published_tpot_s(cells)]
    axes.plot(*zip(*points, strict=True), "k.", markersize=3, label="published, about 500")
    axes.set_xlim(0, SEQUENCES[-1])
    axes.set_ylim(0, 45)
    axes.set_xlabel("sequences that decode on D")
    axes.set_ylabel("TPOT, ms")
    axes.legend(frameon=False, loc="upper right")
