"""Points as a Markdown table, with n, failures and intervals."""

from __future__ import annotations

from collections.abc import Sequence

from ppd.offline.experiment.statistics import Estimate

from .records import Experiment, TrialKind
from .slowdowns import SlowdownPoint

_AXIS = {
    Experiment.BATCH: "decoding sequences",
    Experiment.CONTEXT: "context before the prefill",
    Experiment.APPEND: "new tokens",
}
_COLUMNS = ("n", "failed", "TPOT, ms", "whole", "added, ms", "overlap", "stall, ms", "prefill TTFT, ms")
LEGEND = """\
`whole`: TPOT of the decoding sequences over the whole answer, against the batch alone. `added`: what that makes for a \
whole answer. `overlap`: the time between tokens while the prefill is under way, against the batch alone. `stall`: the \
time that each sequence loses to the prefills. ± is half the 95 % interval of the mean over repeats (the batch alone \
taken as exact); - was not recorded. Failed trials are in no mean.\
"""


def markdown(points: Sequence[SlowdownPoint], title: str, notes: Sequence[str]) -> str:
    parts = [f"# {title}", *notes, LEGEND]
    for experiment in Experiment:
        chosen = [point for point in points if point.place.experiment is experiment]
        if chosen:
            parts.append(_table(experiment, chosen))
    return "\n\n".join(parts) + "\n"


def _table(experiment: Experiment, points: Sequence[SlowdownPoint]) -> str:
    head = ("beside", _AXIS[experiment], *_COLUMNS)
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" + " ---: |" * (len(head) - 1)]
    lines += ["| " + " | ".join(_row(point)) + " |" for point in points]
    problems = [
        f"- {_beside(point)}, {point.place.at}: {point.failed} failed, the first because {point.first_problem}"
        for point in points
        if point.failed
    ]
    return "\n".join(lines + (["", *problems] if problems else []))


def _row(point: SlowdownPoint) -> list[str]:
    samples = point.tpot_s or point.prefill_ttft_s
    return [
        _beside(point),
        f"{point.place.at:,}",
        str(samples.n if samples else 0),
        str(point.failed),
        _figure(point.tpot_s, 1000, ".2f"),
        *(
            ["-"] * 4
            if point.place.kind is TrialKind.ALONE
            else [
                _figure(point.whole, 100, "+.1f", " %"),
                _figure(point.added_s, 1000, "+.0f"),
                _figure(point.overlap, 100, "+.1f", " %"),
                _figure(point.stall_s, 1000, "+.1f"),
            ]
        ),
        _figure(point.prefill_ttft_s, 1000, ".1f"),
    ]


def _beside(point: SlowdownPoint) -> str:
    return "alone" if point.place.kind is TrialKind.ALONE else f"{point.place.prefills} {point.place.kind}"


def _figure(estimate: Estimate | None, scale: float, form: str, unit: str = "") -> str:
    if estimate is None:
        return "-"
    half = "" if estimate.half_width is None else f" ± {scale * estimate.half_width:{form.lstrip('+')}}"
    return f"{scale * estimate.mean:{form}}{half}{unit}"
