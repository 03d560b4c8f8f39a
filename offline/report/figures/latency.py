"""TTFT and TPOT of follow-up turns against load, by topology and x; and TTFT against the number of turns (figure 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ...experiment.cells import MeasuredCell
from ..analysis import courses
from ..analysis.arms import Arm, arms
from ..analysis.courses import Courses, Which
from ..page.document import Picture
from ..page.numerals import ms
from . import style

_LOG_SPREAD = 3.0  # largest over smallest beyond which an axis is logarithmic
READING = (
    "Points are means over the workloads that every arm of a panel measured at every point; bars are 95 % intervals "
    "where the runs allow one."
)


@dataclass(frozen=True, slots=True)
class Quantity:
    name: str
    which: Which


TTFT = Quantity("TTFT", lambda cell: cell.later_ttft_s)
TPOT = Quantity("TPOT", lambda cell: cell.later_tpot_s)


def against_load(cells: Sequence[MeasuredCell]) -> list[Picture]:
    pictures = []
    looks = style.markers(cell.topology for cell in cells)
    for first in sorted({cell.workload.first.name for cell in cells}):
        group = [cell for cell in cells if cell.workload.first.name == first]
        profile = group[0].workload.first
        kind = f"conversations that begin with {profile.new_tokens} → {profile.output_tokens} tokens"
        for quantity in (TTFT, TPOT):
            drawn = _by_topology(group, lambda g, a, q=quantity: courses.by_load(g, a, q.which))  # type: ignore[misc]
            if drawn:
                name = f"{quantity.name.lower()}-by-load-{first}"
                title = f"Mean {quantity.name} of follow-up turns against load, {kind}"
                pictures.append(_picture(drawn, looks, name, title, quantity.name, "conversations/s"))
    return pictures


def against_turns(cells: Sequence[MeasuredCell]) -> Picture | None:
    if len({cell.workload.turns for cell in cells if cell.workload.turns > 1}) < 2:
        return None
    several = [cell for cell in cells if cell.workload.turns > 1]
    drawn = _by_topology(several, lambda group, chosen: courses.by_turns(group, chosen, TTFT.which))
    if not drawn:
        return None
    looks = style.markers(cell.topology for cell in cells)
    title = "Mean TTFT of follow-up turns against the number of turns"
    return _picture(drawn, looks, "ttft-by-turns", title, "TTFT", "turns in a conversation")


def _by_topology(
    cells: Sequence[MeasuredCell], find: Callable[[Sequence[MeasuredCell], Sequence[Arm]], Courses]
) -> dict[str, Courses]:
    """Each topology with D, together with the replicas; replicas alone where there is nothing else."""
    every = arms(cells)
    replicas = [arm for arm in every if arm.mode == "replica"]
    split = sorted({arm.topology for arm in every if arm.mode != "replica"})
    panels = {topology: [arm for arm in every if arm.topology == topology] + replicas for topology in split}
    if not split:
        panels = {arm.topology: [arm] for arm in replicas}
    found = {topology: find(cells, chosen) for topology, chosen in panels.items()}
    return {topology: drawn for topology, drawn in found.items() if any(c.steps for c in drawn.courses)}


def _picture(
    drawn: dict[str, Courses], looks: dict[str, str], name: str, title: str, quantity: str, across: str
) -> Picture:
    is_log = _spread(drawn) > _LOG_SPREAD
    places = sorted({step.at for each in drawn.values() for course in each.courses for step in course.steps})
    with style.style():
        rows, columns = style.grid_of(len(drawn))
        figure, axes = style.panels(rows, columns)
        for panel, (topology, each) in zip(axes.flat, drawn.items(), strict=False):
            _draw(panel, topology, each, looks)
            panel.set_xscale("log")
            style.log_points(panel.xaxis, places)
            if is_log:
                panel.set_yscale("log")
                style.log_numbers(panel.yaxis)
        for panel in axes.flat[len(drawn) :]:
            panel.set_visible(False)
        figure.supxlabel(across, fontsize=10)
        figure.supylabel(f"{quantity}, ms", fontsize=10)
        style.legend(figure, _entries(drawn, looks))
        data = style.png(figure)
    return Picture(name=name, png=data, title=title, message=_message(drawn, quantity, across), caption=_caption(drawn))


def _spread(drawn: dict[str, Courses]) -> float:
    means = [step.mean for each in drawn.values() for course in each.courses for step in course.steps]
    return max(means) / min(means)


def _draw(panel: Axes, topology: str, drawn: Courses, looks: dict[str, str]) -> None:
    for course in drawn.courses:
        panel.errorbar(
            [step.at for step in course.steps],
            [step.mean * 1e3 for step in course.steps],
            yerr=[min(step.half_width or 0.0, 0.95 * step.mean) * 1e3 for step in course.steps],
            capsize=2.5,
            elinewidth=1,
            **style.strokes(course.arm, looks[course.arm.topology]),
        )
    of_all = f"{drawn.workloads} of {drawn.swept}" if drawn.workloads < drawn.swept else str(drawn.swept)
    panel.set_title(f"{topology} ({of_all} workload{'s' if drawn.swept != 1 else ''})")


def _entries(drawn: dict[str, Courses], looks: dict[str, str]) -> list[Line2D]:
    every = {course.arm for each in drawn.values() for course in each.courses}
    return [
        Line2D([], [], label=arm.label, **style.strokes(arm, looks[arm.topology]))
        for arm in sorted(every, key=lambda arm: arm.rank)
    ]


def _message(drawn: dict[str, Courses], quantity: str, across: str) -> str:
    parts = []
    for topology, each in drawn.items():
        ends = [
            f"{course.arm.label} {ms(course.steps[0].mean)} to {ms(course.steps[-1].mean)} ms"
            for course in each.courses
            if course.steps and course.arm.topology == topology and course.arm.x in (None, 0.0, 1.0)
        ]
        low, high = each.courses[0].steps[0].at, each.courses[0].steps[-1].at
        parts.append(f"{', '.join(ends)} (from {low:g} to {high:g} {across})")
    return f"{quantity}: {'; '.join(parts)}."


def _caption(drawn: dict[str, Courses]) -> str:
    left = [
        f"{topology} {each.swept - each.workloads}" for topology, each in drawn.items() if each.workloads < each.swept
    ]
    varies = [topology for topology, each in drawn.items() if each.varies]
    words = [READING, "The lower axis is logarithmic, the other where it spans much."]
    if left:
        words.append(f"Left out because an arm has no evidence there: {', '.join(left)} of the workloads.")
    if varies:
        words.append(
            f"In {', '.join(varies)} no workload was measured at every point, so points are over different workloads."
        )
    return " ".join(words)
