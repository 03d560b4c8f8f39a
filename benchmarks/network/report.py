"""The trials' results as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ppd.offline.experiment.statistics import percentile

from ..soak.records import FINE, ClientOutcome, RequestRecord

_HEAD = (
    "network",
    "made by",
    "requests",
    "success",
    "broken off, and said so",
    "wrong texts",
    "TTFT p50",
    "p99",
    "max",
)


class NetworkResult(msgspec.Struct, frozen=True, kw_only=True):
    trial: str
    made_by: str
    retries: int
    requests: list[RequestRecord]


def markdown(found: Sequence[NetworkResult]) -> str:
    rows = [(*_HEAD, "retries"), ("---",) * (len(_HEAD) + 1), *map(_row, found)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def wrong(found: NetworkResult) -> int:
    """Wrong texts, and incomplete answers that do not say so."""
    return sum(request.outcome in (ClientOutcome.WRONG, ClientOutcome.UNMARKED) for request in found.requests)


def _row(found: NetworkResult) -> tuple[str, ...]:
    requests = found.requests
    fine = sum(request.outcome in FINE for request in requests)
    broken = sum(request.outcome is ClientOutcome.BROKEN for request in requests)
    first_s = [
        request.first_text_s - request.sent_s
        for request in requests
        if request.stream and request.outcome is ClientOutcome.COMPLETED and request.first_text_s is not None
    ]
    times = [f"{percentile(first_s, share) * 1e3:.0f} ms" if first_s else "none" for share in (0.5, 0.99, 1.0)]
    success = f"{fine / len(requests):.1%}" if requests else "none"
    counts = (str(len(requests)), success, str(broken), str(wrong(found)))
    return (found.trial, found.made_by, *counts, *times, str(found.retries))
