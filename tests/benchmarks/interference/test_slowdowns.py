"""Slowdowns against cases worked out by hand: a batch that steps every 10 ms."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.interference.records import Experiment, Stream, Trial, TrialKind, TrialResult
from benchmarks.interference.slowdowns import FigurePoint, Measured, gather, measure


def times(start_s: float, *gaps_s: float) -> tuple[float, ...]:
    out = [start_s]
    for gap_s in gaps_s:
        out.append(out[-1] + gap_s)
    return tuple(out)


def decode(number: int, token_s: Sequence[float], *, cached: int | None = 128, error: str = "") -> Stream:
    return Stream(True, number, 132, cached, 0.0, tuple(token_s), 200, error)


def prefill(sent_s: float, first_s: float, *, cached: int | None = 0) -> Stream:
    return Stream(False, 0, 100, cached, sent_s, (first_s,), 200)


def trial(kind: TrialKind, *, batch: int = 1, cached: int = 0) -> Trial:
    return Trial(
        experiment=Experiment.BATCH,
        kind=kind,
        at=batch,
        batch=batch,
        decode_context_tokens=128,
        prefills=0 if kind is TrialKind.ALONE else 1,
        new_tokens=0 if kind is TrialKind.ALONE else 100,
        cached_tokens=cached,
        repeat=0,
    )


ALONE = measure(TrialResult(trial(TrialKind.ALONE), (decode(0, times(0.1, *[0.010] * 10)),)), 11)
# Sent at 0.125, between the third and the fourth token; three steps until its token at 0.19, one of them 50 ms.
BESIDE = TrialResult(
    trial(TrialKind.FULL),
    (decode(0, times(0.1, 0.010, 0.010, 0.010, 0.050, 0.010, *[0.010] * 5)), prefill(0.125, 0.19)),
)


def test_the_gaps_that_a_prefill_overlaps_are_those_that_count() -> None:
    measured = measure(BESIDE, 11)
    assert measured.problem == ""
    assert measured.window_gaps == 3  # (0.12, 0.13), (0.13, 0.18), (0.18, 0.19)
    assert measured.window_s == pytest.approx(0.070)
    assert measured.whole_s == pytest.approx(0.014)
    assert measured.prefill_ttft_s == pytest.approx(0.065)


def test_three_figures_of_one_slowdown() -> None:
    alone, point = gather([ALONE, measure(BESIDE, 11)])
    assert alone.place.kind is TrialKind.ALONE
    assert alone.alone_s == pytest.approx(0.010)
    assert point.overlap is not None and point.overlap.mean == pytest.approx(0.070 / 0.030 - 1)
    assert point.stall_s is not None and point.stall_s.mean == pytest.approx(0.040)
    assert point.whole is not None and point.whole.mean == pytest.approx(0.4)
    assert point.added_s is not None and point.added_s.mean == pytest.approx(0.040)


def test_longer_answers_water_down_the_whole_but_not_the_stall() -> None:
    longer = TrialResult(
        BESIDE.trial, (decode(0, times(0.1, 0.010, 0.010, 0.010, 0.050, *[0.010] * 36)), BESIDE.streams[1])
    )
    _, point = gather([ALONE, measure(longer, 41)])
    assert point.whole is not None and point.whole.mean == pytest.approx(0.1)
    assert point.stall_s is not None and point.stall_s.mean == pytest.approx(0.040)


def test_every_sequence_of_the_batch_counts_once() -> None:
    streams = (
        decode(0, times(0.1, *[0.010] * 10)),
        decode(1, times(0.1, 0.010, 0.010, 0.010, 0.050, *[0.010] * 6)),
        prefill(0.125, 0.19),
    )
    measured = measure(TrialResult(trial(TrialKind.FULL, batch=2), streams), 11)
    # The first has eight gaps in the window, 0.12 to 0.2, less one that begins at its end; the second has three.
    assert measured.window_gaps == pytest.approx((7 + 3) / 2)
    assert measured.window_s == pytest.approx((0.070 + 0.070) / 2)


def test_the_batch_alone_is_measured_while_all_of_it_decodes() -> None:
    # Binary fractions, so that the window's ends are exact: the second begins at 0.25, the first ends at 1.25.
    streams = (decode(0, times(0.125, 0.0625, 0.0625, *[0.125] * 8)), decode(1, times(0.25, *[0.125] * 8, 0.5, 0.5)))
    measured = measure(TrialResult(trial(TrialKind.ALONE, batch=2), streams), 11)
    assert measured.window_s == 1.0
    assert measured.window_gaps == 8


@pytest.mark.parametrize(
    ("streams", "cached", "said"),
    [
        ((decode(0, (), error="HTTP 500: no"), prefill(0.1, 0.2)), 0, "decode 0: HTTP 500: no"),
        ((decode(0, times(0, *[0.01] * 10), cached=16), prefill(0.02, 0.05)), 0, "decode 0: 16 of 128 context tokens"),
        ((decode(0, times(0, *[0.01] * 10)), prefill(0.02, 0.05, cached=0)), 128, "prefill 0: 0 of 128 context"),
        ((decode(0, times(0, *[0.01] * 10)), prefill(0.02, 0.05, cached=96)), 0, "prefill 0: 96 of 100 new tokens"),
        ((decode(0, times(0, *[0.01] * 10)), prefill(0.02, 0.15)), 0, "decode 0 had ended before the prefill"),
    ],
)
def test_a_trial_that_says_nothing_counts_as_failed(streams: tuple[Stream, ...], cached: int, said: str) -> None:
    kind = TrialKind.APPEND if cached else TrialKind.FULL
    failed = measure(TrialResult(trial(kind, cached=cached), streams), 11)
    assert failed.problem.startswith(said)
    point = gather([ALONE, failed])[1]
    assert (point.failed, point.first_problem) == (1, failed.problem)
    assert point.whole is None
    assert point.overlap is None


def test_streams_that_never_decode_together_are_no_batch() -> None:
    streams = (decode(0, times(0.1, 0.01, 0.01)), decode(1, times(0.5, 0.01, 0.01)))
    assert "longer answers" in measure(TrialResult(trial(TrialKind.ALONE, batch=2), streams), 3).problem


@pytest.mark.parametrize("kind", [TrialKind.FULL, TrialKind.APPEND])
def test_prefills_at_an_endpoint_that_does_not_tell_what_it_cached_are_no_measurement(kind: TrialKind) -> None:
    streams = (decode(0, times(0.1, *[0.01] * 10), cached=None), prefill(0.125, 0.15, cached=None))
    said = measure(TrialResult(trial(kind, cached=128 * (kind is TrialKind.APPEND)), streams), 11).problem
    assert said == "the endpoint does not report cached tokens"


@pytest.mark.parametrize(
    ("kind", "problem"), [(TrialKind.FULL, ""), (TrialKind.APPEND, "prefill 0: 0 of 128 context tokens were cached")]
)
def test_no_word_from_an_endpoint_that_reports_means_that_nothing_was_cached(kind: TrialKind, problem: str) -> None:
    streams = (decode(0, times(0.1, *[0.01] * 10)), prefill(0.125, 0.15, cached=None))
    assert measure(TrialResult(trial(kind, cached=128 * (kind is TrialKind.APPEND)), streams), 11).problem == problem


def test_the_batch_alone_needs_no_report_of_its_cache() -> None:
    streams = (decode(0, times(0.1, *[0.01] * 10), cached=None),)
    assert measure(TrialResult(trial(TrialKind.ALONE), streams), 11).problem == ""


def test_without_the_batch_alone_there_is_nothing_to_compare_with() -> None:
    (point,) = gather([measure(BESIDE, 11)])
    assert point.tpot_s is not None
    assert (point.alone_s, point.whole, point.overlap, point.stall_s) == (None, None, None, None)


def test_a_batch_is_compared_with_itself_alone() -> None:
    def row(kind: TrialKind, batch: int, whole_s: float) -> Measured:
        return Measured(
            FigurePoint(Experiment.BATCH, kind, int(kind is TrialKind.FULL), batch), batch, 64, whole_s=whole_s
        )

    rows = [
        row(TrialKind.ALONE, 1, 0.01),
        row(TrialKind.ALONE, 2, 0.02),
        row(TrialKind.FULL, 1, 0.02),
        row(TrialKind.FULL, 2, 0.03),
    ]
    wholes = [point.whole.mean for point in gather(rows) if point.place.kind is TrialKind.FULL and point.whole]
    assert wholes == pytest.approx([1.0, 0.5])
