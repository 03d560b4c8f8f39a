"""The figures of a soak, and why it failed, from its records. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ppd.offline.experiment.statistics import Slope, percentile, slope

from .fault_plan import costs, felt
from .records import FINE, ClientOutcome, ProcessSample, Records, RequestRecord

NEVER = frozenset({ClientOutcome.WRONG, ClientOutcome.UNMARKED, ClientOutcome.UNANSWERED})
UNEXPLAINED_LIMIT = 0.001  # share of all requests that may fail without a fault at the time that explains it
GROWTH_LIMIT_BYTES = 100.0  # per request: less than any object kept for one would take
MEMORY_SPAN_S = 600.0  # a shorter run still fills buffers and caches: its slope is shown, and no reason to fail
DESCRIPTORS_LIMIT = 32  # that may be added by the load: pooled connections to workers


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Requests that went wrong in the same way. `during`: the faults at the time."""

    during: str
    outcome: ClientOutcome
    status: int
    detail: str
    explained: bool
    count: int


def failures(records: Records) -> list[FailureGroup]:
    found: Counter[tuple[str, ClientOutcome, int, str, bool]] = Counter()
    for request in records.requests:
        if request.outcome in FINE:
            continue
        during = sorted({f"{one.kind} {_kind(one.worker)}" for one in felt(request, records.disturbances)})
        explained = request.outcome in costs(request, records.disturbances)
        detail = "" if request.outcome is ClientOutcome.WRONG else request.detail
        found[" and ".join(during) or "nothing", request.outcome, request.status, detail, explained] += 1
    return [FailureGroup(*key, count) for key, count in found.most_common()]


def _kind(worker: str) -> str:
    return worker.rstrip("0123456789")


def growth(records: Records) -> Slope | None:
    """The slope of the proxy's resident memory after the warm-up, in KiB per minute."""
    samples = settled(records)
    return slope([one.at_s / 60 for one in samples], [float(one.rss_kib) for one in samples])


def settled(records: Records) -> list[ProcessSample]:
    head = records.head
    return [one for one in records.samples if head.warm_up_s <= one.at_s <= head.seconds]


def requests_per_minute(records: Records) -> float:
    return len(records.requests) / records.head.seconds * 60


def problems(records: Records) -> list[str]:
    outcomes, ending, found = Counter(one.outcome for one in records.requests), records.ending, list[str]()
    found += [f"{outcomes[outcome]} {outcome}" for outcome in sorted(NEVER) if outcomes[outcome]]
    if not outcomes[ClientOutcome.COMPLETED]:
        found.append("no request was completed")
    unexplained = sum(one.count for one in failures(records) if not one.explained and one.outcome not in NEVER)
    if unexplained > UNEXPLAINED_LIMIT * len(records.requests):
        found.append(f"{unexplained} of {len(records.requests)} requests failed without a cause")
    found += [f"leaked: {name} = {value:g}" for name, value in sorted(ending.leaked.items())]
    if ending.descriptors_after > ending.descriptors_before + DESCRIPTORS_LIMIT:
        found.append(f"descriptors: {ending.descriptors_before} before, {ending.descriptors_after} after")
    found += [f"the proxy's log: {line}" for line in ending.log_defects]
    found += [
        f"{one.kind} of {one.worker} at {one.at_s:.0f} s: {one.problem}" for one in records.disturbances if one.problem
    ]
    samples, line = settled(records), growth(records)
    is_long = bool(samples) and samples[-1].at_s - samples[0].at_s >= MEMORY_SPAN_S
    if is_long and line is not None and line.low * 1024 > GROWTH_LIMIT_BYTES * requests_per_minute(records):
        found.append(f"memory grows by {line.value:.0f} KiB a minute, at least {line.low:.0f}")
    return found


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Times to first text, in seconds; `n` requests."""

    n: int
    p50_s: float
    p99_s: float


def first_text(records: Records) -> tuple[StreamTimes | None, StreamTimes | None]:
    calm: list[float] = []
    stormy: list[float] = []
    for request in records.requests:
        if request.first_text_s is not None:
            place = stormy if felt(request, records.disturbances) else calm
            place.append(request.first_text_s - request.sent_s)
    return _times(calm), _times(stormy)


def _times(values: Sequence[float]) -> StreamTimes | None:
    return StreamTimes(len(values), percentile(values, 0.5), percentile(values, 0.99)) if values else None


def success(requests: Sequence[RequestRecord]) -> float:
    """The completed share of the requests that could be served and whose client stayed."""
    asked = [one for one in requests if one.outcome not in (ClientOutcome.LEFT, ClientOutcome.REJECTED)]
    return sum(one.outcome is ClientOutcome.COMPLETED for one in asked) / len(asked) if asked else 0.0
