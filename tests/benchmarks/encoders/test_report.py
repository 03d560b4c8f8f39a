"""The table of a comparison with and without encoders."""

from __future__ import annotations

from benchmarks.encoders.report import HEAD, EncoderComparison, markdown
from ppd.offline.experiment.records import Record


def record(ttft_s: float, tpot_s: float, images: int = 0, error: str = "") -> Record:
    last_s = None if error else ttft_s + tpot_s
    return Record(0, 1, True, 0.0, 0.0, ttft_s, last_s, 9, 0, 2, "REPLICA", "", "R1", 200, error, images)


def test_text_and_images_are_told_apart_and_failures_counted() -> None:
    without = [record(0.1, 0.02), record(0.3, 0.9, images=1), record(0.2, 0.02, error="lost")]
    row = markdown(
        [EncoderComparison("2R", "some", without, [record(0.1, 0.01), record(0.15, 0.9, images=1)])]
    ).splitlines()[2]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == len(HEAD)
    assert cells[2:] == ["1", "200.0", "125.0", "0.62", "300.0", "150.0", "0.50", "20.0", "10.0", "0.50", "-"]


def test_what_is_not_there_has_no_figure() -> None:
    cells = (
        markdown([EncoderComparison("2R", "text", [record(0.1, 0.02)], [record(0.1, 0.02)])]).splitlines()[2].split("|")
    )
    assert [cell.strip() for cell in cells[7:10]] == ["-", "-", "-"]
