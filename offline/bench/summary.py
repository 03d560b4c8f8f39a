"""The figures of a bench, by turn, as a table for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from ..experiment.records import Record
from ..experiment.statistics import Estimate, estimate, percentile

NONE = "-"
NOTE = "± half the 95 % interval of the mean, taking requests as independent. Failed requests enter no time."


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSummary:
    """Figures of a group of requests; None where no request has the figure."""

    requests: int
    failures: int
    ttft_s: Estimate | None
    tpot_s: Estimate | None
    routes: dict[str, float]  # share of each among the requests that finished, where the answers say
    cached_share: float | None  # of prompt tokens
    requests_per_s: float | None
    tokens_per_s: float | None  # generated
    late_s: float | None  # p99 of how late requests were sent


def summarize(records: Sequence[Record], span_s: float | None) -> BenchSummary:
    finished = [record for record in records if not record.error]
    told = [record for record in finished if record.cached_tokens is not None]
    prompt = sum(record.prompt_tokens for record in told)
    routes = Counter(record.route for record in finished if record.route)
    return BenchSummary(
        requests=len(records),
        failures=len(records) - len(finished),
        ttft_s=_estimate(finished, lambda record: record.ttft_s),
        tpot_s=_estimate(finished, lambda record: record.tpot_s),
        routes={route: count / len(finished) for route, count in sorted(routes.items())},
        cached_share=sum(record.cached_tokens or 0 for record in told) / prompt if prompt else None,
        requests_per_s=len(finished) / span_s if span_s else None,
        tokens_per_s=sum(record.output_tokens for record in finished) / span_s if span_s else None,
        late_s=percentile([record.sent_s - record.scheduled_s for record in finished], 0.99) if finished else None,
    )


def span_s(records: Sequence[Record]) -> float | None:
    """From the time the first request was due to the last token of a finished one."""
    ends = [record.last_token_s for record in records if record.last_token_s is not None and not record.error]
    return max(ends) - min(record.scheduled_s for record in records) if ends else None


def results_table(records: Sequence[Record]) -> Table:
    groups = {
        "turn 1": [record for record in records if record.turn == 1],
        "later turns": [record for record in records if record.turn > 1],
        "all": records,
    }
    if with_image := [record for record in records if record.images]:
        groups |= {"text only": [record for record in records if not record.images], "with image": with_image}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in groups:
        table.add_column(name, justify="right")
    span = span_s(records)
    summaries = [summarize(group, span) for group in groups.values()]
    for label, cell in _ROWS:
        table.add_row(label, *(cell(summary) for summary in summaries))
    return table


def reasons(records: Sequence[Record], limit: int = 5) -> list[str]:
    return [f"{count} x {error}" for error, count in Counter(r.error for r in records if r.error).most_common(limit)]


def _estimate(records: Sequence[Record], figure: Callable[[Record], float | None]) -> Estimate | None:
    return estimate([[value for record in records if (value := figure(record)) is not None]])


def _ms(seconds: float | None) -> str:
    return NONE if seconds is None else f"{seconds * 1000:,.1f}"


def _mean(figure: Estimate | None) -> str:
    if figure is None:
        return NONE
    return _ms(figure.mean) + (f" ± {_ms(figure.half_width)}" if figure.half_width is not None else "")


def _rate(value: float | None) -> str:
    return NONE if value is None else f"{value:,.2f}"


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


def _routes(summary: BenchSummary) -> str:
    return "\n".join(f"{route} {share:.0%}" for route, share in summary.routes.items()) or NONE


_ROWS: tuple[tuple[str, Callable[[BenchSummary], str]], ...] = (
    ("requests", lambda one: str(one.requests)),
    ("failures", lambda one: str(one.failures)),
    ("TTFT mean, ms", lambda one: _mean(one.ttft_s)),
    ("TTFT p50, ms", lambda one: _ms(one.ttft_s.p50 if one.ttft_s else None)),
    ("TTFT p99, ms", lambda one: _ms(one.ttft_s.p99 if one.ttft_s else None)),
    ("TPOT mean, ms", lambda one: _mean(one.tpot_s)),
    ("TPOT p50, ms", lambda one: _ms(one.tpot_s.p50 if one.tpot_s else None)),
    ("TPOT p99, ms", lambda one: _ms(one.tpot_s.p99 if one.tpot_s else None)),
    ("routes", _routes),
    ("prompt tokens cached", lambda one: _share(one.cached_share)),
    ("requests/s", lambda one: _rate(one.requests_per_s)),
    ("tokens/s", lambda one: _rate(one.tokens_per_s)),
    ("sent late, p99, ms", lambda one: _ms(one.late_s)),
)
