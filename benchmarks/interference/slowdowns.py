"""How much slower a batch decodes beside a prefill, from the times of its tokens. Pure.

Three figures, each for another question:

* overlap: the mean time between tokens while a prefill is under way (from its sending to its first token), over the
  same mean in the batch alone, minus one. It is the slowdown that a reader sees at that moment. It includes the time of
  host work on the prompt, which slows no other sequence, so it is an underestimate of the steps' slowdown.
* stall: the time that each sequence loses to the prefills, in s: the sum of those gaps, minus the time of as many gaps
  in the batch alone. It does not depend on the length of the answers.
* whole: TPOT over the whole answer over that of the batch alone, minus one, as the published program has it. It falls
  as answers get longer, so it serves only for comparison.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ppd.offline.experiment.statistics import Estimate, estimate

from .records import Experiment, Stream, Trial, TrialKind, TrialResult

_MOSTLY = 0.9  # share of a context that must be cached, and of new tokens that must not be


class FigurePoint(NamedTuple):
    """A point of a figure; `prefills` is 0 and `kind` ALONE for the batch by itself."""

    experiment: Experiment
    kind: TrialKind
    prefills: int
    at: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One trial. Times are means over its decode streams, in s; None where they are not known."""

    place: FigurePoint
    batch: int
    output_tokens: int
    whole_s: float | None = None  # TPOT over the whole answer
    window_s: float | None = None  # sum of the gaps between tokens in the window, see `_window`
    window_gaps: float | None = None  # how many
    prefill_ttft_s: float | None = None
    problem: str = ""  # why it counts as failed; the times are then None


@dataclass(frozen=True, slots=True)
class SlowdownPoint:
    """All repeats of a point, compared with the batch alone."""

    place: FigurePoint
    failed: int
    first_problem: str
    alone_s: float | None  # mean TPOT of the batch alone
    tpot_s: Estimate | None
    whole: Estimate | None
    added_s: Estimate | None  # by which a whole answer takes longer
    overlap: Estimate | None
    stall_s: Estimate | None
    prefill_ttft_s: Estimate | None


def measure(result: TrialResult, output_tokens: int) -> Measured:
    trial = result.trial
    place = FigurePoint(trial.experiment, trial.kind, trial.prefills, trial.at)
    if problem := _problem(trial, result.streams):
        return Measured(place, trial.batch, output_tokens, problem=problem)
    decodes = [stream for stream in result.streams if stream.is_decode]
    start_s, end_s = _window(result.streams)
    chosen = _gaps_overlapping if trial.prefills else _gaps_inside
    gaps = [gap for stream in decodes for gap in chosen(stream, start_s, end_s)]
    ttfts = [stream.token_s[0] - stream.sent_s for stream in result.streams if not stream.is_decode]
    return Measured(
        place,
        trial.batch,
        output_tokens,
        whole_s=_mean([(s.token_s[-1] - s.token_s[0]) / (len(s.token_s) - 1) for s in decodes]),
        window_s=sum(gaps) / len(decodes),
        window_gaps=len(gaps) / len(decodes),
        prefill_ttft_s=_mean(ttfts),
    )


def _problem(trial: Trial, streams: Sequence[Stream]) -> str:
    """Why a trial does not count (a failure, a cache miss, a prefill that did not meet the batch); else empty."""
    for stream in streams:
        if stream.error:
            return f"{_name(stream)}: {stream.error}"
    if problem := _cache_problem(trial, streams):
        return problem
    start_s, end_s = _window(streams)
    if start_s >= end_s:
        return "the first stream had ended before the last began: longer answers are needed"
    for stream in streams:
        if trial.prefills and stream.is_decode and not stream.token_s[0] <= start_s <= end_s <= stream.token_s[-1]:
            return f"decode {stream.number} had ended before the prefill: longer answers are needed"
    return ""


def _cache_problem(trial: Trial, streams: Sequence[Stream]) -> str:
    if all(stream.cached_tokens is None for stream in streams):
        return "the endpoint does not report cached tokens" if trial.prefills else ""
    for stream in streams:
        expected = trial.decode_context_tokens if stream.is_decode else trial.cached_tokens
        cached = stream.cached_tokens or 0  # vLLM leaves out a zero
        if cached < _MOSTLY * expected:
            return f"{_name(stream)}: {cached} of {expected} context tokens were cached"
        if not stream.is_decode and cached - expected > (1 - _MOSTLY) * trial.new_tokens:
            return f"{_name(stream)}: {cached - expected} of {trial.new_tokens} new tokens were cached"
    return ""


def _name(stream: Stream) -> str:
    return f"{'decode' if stream.is_decode else 'prefill'} {stream.number}"


def _window(streams: Sequence[Stream]) -> tuple[float, float]:
    """From the first prefill's sending to the last prefill's token; without prefills, while all streams decode."""
    prefills = [stream for stream in streams if not stream.is_decode]
    if prefills:
        return min(stream.sent_s for stream in prefills), max(stream.token_s[0] for stream in prefills)
    return max(stream.token_s[0] for stream in streams), min(stream.token_s[-1] for stream in streams)


def _gaps_inside(stream: Stream, start_s: float, end_s: float) -> list[float]:
    return [later - earlier for earlier, later in pairwise(stream.token_s) if earlier >= start_s and later <= end_s]


def _gaps_overlapping(stream: Stream, start_s: float, end_s: float) -> list[float]:
    return [later - earlier for earlier, later in pairwise(stream.token_s) if later > start_s and earlier < end_s]


def gather(measured: Iterable[Measured]) -> list[SlowdownPoint]:
    trials: defaultdict[FigurePoint, list[Measured]] = defaultdict(list)
    alone: defaultdict[tuple[Experiment, int], list[Measured]] = defaultdict(list)
    for trial in measured:
        trials[trial.place].append(trial)
        if trial.place.kind is TrialKind.ALONE and not trial.problem:
            alone[trial.place.experiment, trial.batch].append(trial)
    order = list(TrialKind)
    places = sorted(trials, key=lambda place: (place.experiment, order.index(place.kind), place.prefills, place.at))
    return [_point(place, trials[place], alone[place.experiment, trials[place][0].batch]) for place in places]


def _point(place: FigurePoint, trials: list[Measured], alone: list[Measured]) -> SlowdownPoint:
    failed = [trial for trial in trials if trial.problem]
    good = [trial for trial in trials if not trial.problem]
    whole_s = _mean([trial.whole_s for trial in alone if trial.whole_s is not None])
    steps = [(t.window_s, t.window_gaps) for t in alone if t.window_s is not None and t.window_gaps]
    gap_s = sum(s for s, _ in steps) / sum(n for _, n in steps) if steps else None
    wholes = [(t.whole_s, t.output_tokens) for t in good if t.whole_s is not None]
    windows = [(t.window_s, t.window_gaps) for t in good if t.window_s is not None and t.window_gaps]
    return SlowdownPoint(
        place,
        failed=len(failed),
        first_problem=failed[0].problem if failed else "",
        alone_s=whole_s,
        tpot_s=_estimate([value for value, _ in wholes]),
        whole=_estimate([value / whole_s - 1 for value, _ in wholes]) if whole_s else None,
        added_s=_estimate([(value - whole_s) * (tokens - 1) for value, tokens in wholes]) if whole_s else None,
        overlap=_estimate([total / count / gap_s - 1 for total, count in windows]) if gap_s else None,
        stall_s=_estimate([total - count * gap_s for total, count in windows]) if gap_s else None,
        prefill_ttft_s=_estimate([t.prefill_ttft_s for t in good if t.prefill_ttft_s is not None]),
    )


def _estimate(values: list[float]) -> Estimate | None:
    return estimate([values])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
