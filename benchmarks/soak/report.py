"""The records of a soak as a page of Markdown."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from . import summary
from .fault_plan import felt
from .records import ClientOutcome, Records, RequestRecord
from .summary import StreamTimes


def markdown(records: Records) -> str:
    found = summary.problems(records)
    parts = [
        "# Soak",
        _about(records),
        "**Passed.**" if not found else "\n".join(["**Failed:**", "", *(f"- {problem}" for problem in found)]),
        _figures(records),
        "## By API",
        _by_endpoint(records),
        "## What went wrong, and what was done to the fleet at the time",
        _failures(records),
        "## What was done",
        _disturbances(records),
        "## What the engines counted",
        _table(("counter", "sum"), [(name, f"{value:,.0f}") for name, value in records.ending.engine_counts.items()]),
    ]
    return "\n\n".join(parts) + "\n"


def _about(records: Records) -> str:
    head = records.head
    return (
        f"{head.seconds / 60:.1f} minutes, {head.clients} clients{', TLS between all' if head.tls else ''}, "
        f"{head.processes} of the proxy's processes, engines with {head.connector}, "
        f"seed {head.seed}, {head.machine}, {head.started}. "
        "Every answer is compared with the text of one engine without faults."
    )


def _figures(records: Records) -> str:
    requests, ending = records.requests, records.ending
    outcomes = Counter(one.outcome for one in requests)
    calm = [one for one in requests if not felt(one, records.disturbances)]
    calm_times, stormy_times = summary.first_text(records)
    line, settled = summary.growth(records), summary.settled(records)
    per_request = 1024 / max(summary.requests_per_minute(records), 1e-9)
    rows = [
        ("requests", f"{len(requests):,}"),
        ("of them while nothing was done to the fleet", f"{len(calm):,}"),
        ("success", f"{summary.success(requests):.3%}"),
        ("success while nothing was done", f"{summary.success(calm):.3%}"),
        *((str(outcome).replace("_", " "), f"{outcomes[outcome]:,}") for outcome in ClientOutcome),
        ("time to first text, calm", _times(calm_times)),
        ("time to first text, during disturbances", _times(stormy_times)),
        ("counters that did not return to 0", str(len(ending.leaked))),
        ("all 0 after the last request", f"{ending.quiet_after_s:.1f} s"),
        ("proxy's log: lines that should not be", str(len(ending.log_defects))),
        ("descriptors before, after", f"{ending.descriptors_before}, {ending.descriptors_after}"),
        ("sessions at most", f"{max((one.sessions for one in records.samples), default=0):,}"),
    ]
    if settled:
        rows.append(("RSS after warm-up, at the end", f"{settled[0].rss_kib:,}, {settled[-1].rss_kib:,} KiB"))
    if line is not None:
        low, high, value = (per_request * figure for figure in (line.low, line.high, line.value))
        rows.append(("RSS slope after warm-up", f"{line.value:+.1f} ({line.low:+.1f} to {line.high:+.1f}) KiB/min"))
        rows.append(("the same per request", f"{value:+.1f} ({low:+.1f} to {high:+.1f}) B"))
    return _table(("figure", "value"), rows)


def _by_endpoint(records: Records) -> str:
    groups: dict[str, list[RequestRecord]] = defaultdict(list)
    for request in records.requests:
        groups[f"{request.endpoint}, {'streamed' if request.stream else 'whole'}"].append(request)
    head = ("API", "requests", "success", *(outcome.replace("_", " ") for outcome in ClientOutcome))
    rows = []
    for name, group in sorted(groups.items()):
        outcomes = Counter(one.outcome for one in group)
        rows.append(
            (name, str(len(group)), f"{summary.success(group):.2%}", *(str(outcomes[o]) for o in ClientOutcome))
        )
    routes = Counter(one.route or "none" for one in records.requests)
    share = ", ".join(f"{route} {count:,}" for route, count in routes.most_common())
    return f"{_table(head, rows)}\n\nRoutes: {share}."


def _failures(records: Records) -> str:
    rows = [
        (one.during, one.outcome, str(one.status), one.detail, "yes" if one.explained else "**no**", str(one.count))
        for one in summary.failures(records)
    ]
    ids = [one for one in records.requests if one.outcome in summary.NEVER]
    listed = [f"- {one.outcome} `{one.id}` {one.endpoint} at {one.sent_s:.1f} s: {one.detail}" for one in ids[:50]]
    table = _table(("done to the fleet", "outcome", "status", "detail", "explained", "count"), rows)
    return "\n".join([table, "", *listed]) if rows else "Nothing."


def _disturbances(records: Records) -> str:
    rows = [
        (f"{one.at_s:.1f}", f"{one.lasts_s:.1f}", one.kind, one.worker, str(one.detail or ""), one.problem)
        for one in sorted(records.disturbances, key=lambda one: one.at_s)
    ]
    return _table(("at, s", "until whole, s", "what", "worker", "detail", "problem"), rows)


def _times(times: StreamTimes | None) -> str:
    if times is None:
        return "-"
    return f"p50 {times.p50_s * 1e3:.0f} ms, p99 {times.p99_s * 1e3:.0f} ms ({times.n:,})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
