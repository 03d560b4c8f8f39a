"""Records, tables and figures of interference."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from benchmarks.interference.figures import draw
from benchmarks.interference.records import (
    Experiment,
    Stream,
    Trial,
    TrialHead,
    TrialKind,
    TrialResult,
    decode,
    encode,
    load,
    save,
)
from benchmarks.interference.slowdowns import FigurePoint, Measured, SlowdownPoint, gather
from benchmarks.interference.table import markdown
from ppd.proxy.errors import FormatError

HEAD = TrialHead(
    model="m",
    note="sim",
    output_tokens=3,
    shared_context=False,
    seed=0,
    nonce="a",
    started="2026-01-01T00:00:00+00:00",
)
TRIAL = Trial(
    experiment=Experiment.BATCH,
    kind=TrialKind.ALONE,
    at=1,
    batch=1,
    decode_context_tokens=128,
    prefills=0,
    new_tokens=0,
    cached_tokens=0,
    repeat=0,
)
RESULTS = (
    TrialResult(TRIAL, (Stream(True, 0, 132, None, 0.0, (0.1, 0.2, 0.3), 200),)),
    TrialResult(TRIAL, (Stream(True, 0, 132, 128, 0.0, (), 500, "HTTP 500: no"),)),
)


def row(kind: TrialKind, at: int, whole_s: float | None, *, experiment: Experiment = Experiment.BATCH) -> Measured:
    place = FigurePoint(experiment, kind, 0 if kind is TrialKind.ALONE else 1, at)
    if whole_s is None:
        return Measured(place, 8, 64, problem="HTTP 500")
    return Measured(place, 8, 64, whole_s, 10 * whole_s, 10, 0.05)


POINTS: list[SlowdownPoint] = gather(
    [
        *(row(TrialKind.ALONE, 8, 0.010) for _ in range(2)),
        row(TrialKind.FULL, 8, 0.014),
        row(TrialKind.FULL, 8, 0.016),
        row(TrialKind.FULL, 8, None),
        row(TrialKind.APPEND, 8, 0.0101),
    ]
)


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    save(tmp_path / "new" / "r.jsonl.gz", HEAD, RESULTS)
    assert load(tmp_path / "new" / "r.jsonl.gz") == (HEAD, RESULTS)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"version":1', b'"version":2', "version: must be 1, got 2"),
        (b'"kind":"ppd-interference"', b'"kind":"ppd-run"', "kind: must be 'ppd-interference', got 'ppd-run'"),
        (b'"seed":0', b'"seeds":0', "seeds"),
        (b'"repeat":0', b'"repeats":0', "repeats"),
        (b'"alone"', b'"lonely"', "lonely"),
    ],
)
def test_wrong_records_are_named(old: bytes, new: bytes, said: str) -> None:
    data = gzip.compress(gzip.decompress(encode(HEAD, RESULTS)).replace(old, new))
    with pytest.raises(FormatError, match=said):
        decode(data)


@pytest.mark.parametrize("data", [b"", b"x", gzip.compress(b"", mtime=0), encode(HEAD, RESULTS)[:40]])
def test_what_is_not_whole_is_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError, match="not a ppd-interference file"):
        decode(data)


def test_the_table_gives_n_failures_and_intervals() -> None:
    lines = markdown(POINTS, "Title", ["A note."]).splitlines()
    assert lines[0] == "# Title"
    assert "A note." in lines
    (full,) = [line for line in lines if line.startswith("| 1 full")]
    # Mean of +40 % and +60 %; t(0.975, 1) = 12.7 times 10 % is half the interval.
    assert full.startswith("| 1 full | 8 | 2 | 1 | 15.00 ± 12.71 | +50.0 ± 127.1 % |")
    (append,) = [line for line in lines if line.startswith("| 1 append")]
    assert append.startswith("| 1 append | 8 | 1 | 0 | 10.10 | +1.0 % |")
    assert any(line.startswith("| alone | 8 | 2 | 0 | 10.00 ± 0.00 | - | - | - | - |") for line in lines)
    assert "- 1 full, 8: 1 failed, the first because HTTP 500" in lines


@pytest.mark.e2e  # draws for seconds
def test_a_figure_is_a_png_and_the_same_each_time() -> None:
    image = draw(POINTS, Experiment.BATCH, "Title")
    assert image is not None and image.startswith(b"\x89PNG")
    assert draw(POINTS, Experiment.BATCH, "Title") == image


@pytest.mark.e2e  # draws for seconds
def test_the_other_experiments_have_figures_too() -> None:
    for experiment in (Experiment.CONTEXT, Experiment.APPEND):
        points = gather(
            [
                row(TrialKind.ALONE, 8, 0.01, experiment=experiment),
                *(
                    row(kind, at, 0.02, experiment=experiment)
                    for kind in (TrialKind.FULL, TrialKind.APPEND)
                    for at in (64, 4096)
                ),
            ]
        )
        assert draw(points, experiment, "Title") is not None


def test_nothing_to_draw_is_no_figure() -> None:
    assert draw(POINTS, Experiment.CONTEXT, "Title") is None
    assert draw(gather([row(TrialKind.ALONE, 8, 0.01)]), Experiment.BATCH, "Title") is None
