"""The comparison as a Markdown table: each workload on a fleet without and with an E."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ppd.offline.experiment.records import Record
from ppd.offline.experiment.statistics import percentile

HEAD = (
    *("fleet", "workload", "failures", "TTFT p50, ms", "with E", "ratio"),
    *("TTFT p50 with image, ms", "with E", "ratio", "TPOT p99 of text only, ms", "with E", "ratio", "images with E"),
)


@dataclass(frozen=True, slots=True)
class EncoderComparison:
    fleet: str
    workload: str
    without: Sequence[Record]
    with_encoder: Sequence[Record]
    items: str = ""  # what became of the images of the fleet with E
    slowness: float = 1.0  # of engines and clients


def markdown(found: Sequence[EncoderComparison]) -> str:
    rows = [HEAD, ("---",) * len(HEAD), *map(_row, found)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _row(one: EncoderComparison) -> tuple[str, ...]:
    failures = sum(bool(record.error) for record in (*one.without, *one.with_encoder))
    return (
        *(f"`{one.fleet}`", one.workload, str(failures)),
        *_cells(one, _ttft_p50),
        *_cells(one, lambda records: _ttft_p50([record for record in records if record.images])),
        *_cells(one, _text_tpot_p99),
        one.items or "-",
    )


def _cells(one: EncoderComparison, figure: Callable[[Sequence[Record]], float | None]) -> tuple[str, str, str]:
    before, after = figure(one.without), figure(one.with_encoder)
    if before is None or after is None:
        return ("-",) * 3
    ms = 1000 / one.slowness
    return f"{before * ms:.1f}", f"{after * ms:.1f}", f"{after / before:.2f}"


def _ttft_p50(records: Sequence[Record]) -> float | None:
    times = [record.ttft_s for record in records if record.ttft_s is not None]
    return percentile(times, 0.5) if times else None


def _text_tpot_p99(records: Sequence[Record]) -> float | None:
    times = [record.tpot_s for record in records if not record.images and record.tpot_s is not None]
    return percentile(times, 0.99) if times else None
