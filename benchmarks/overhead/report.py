"""The table: medians over repetitions, PPD's ratio to the best peer, and whether the target is met.

Beside it the ratio to the best of the peers that know sessions, as a user would run in PPD's place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from .peers import PEERS
from .records import OverheadRun, RowRecord
from .rows import LINES, Better, ReportLine
from .subjects import AWARE, BEFORE, BLIND, DIRECT, PPD, SUBJECTS


@dataclass(frozen=True, slots=True)
class ReportCell:
    """One subject's median; `faults` are summed over the repetitions, `problem` says why there is no value."""

    value: float | None = None
    faults: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LineVerdict:
    """`ratio`: PPD's value over the best peer's. `holds` is None without a target, or without a measurement."""

    ratio: float | None = None
    best: str = ""
    holds: bool | None = None


def cells(line: ReportLine, records: Iterable[RowRecord]) -> dict[str, ReportCell]:
    """By subject. Without a direct connection, added latency is unknown."""
    found: dict[str, list[RowRecord]] = {}
    for record in records:
        if record.row == line.row:
            found.setdefault(record.subject, []).append(record)
    values = {subject: _cell(line, its) for subject, its in found.items()}
    if not line.is_added:
        return values
    direct = values.get(DIRECT, ReportCell()).value
    return {subject: cell if subject == DIRECT else _minus_direct(cell, direct) for subject, cell in values.items()}


def _cell(line: ReportLine, records: Sequence[RowRecord]) -> ReportCell:
    values = [value for record in records if (value := line.value(record)) is not None]
    problem = next((record.problem for record in records if record.problem), "")
    return ReportCell(median(values) if values else None, sum(record.faults for record in records), problem)


def _minus_direct(cell: ReportCell, direct: float | None) -> ReportCell:
    value = cell.value - direct if cell.value is not None and direct is not None else None
    return ReportCell(value, cell.faults, cell.problem)


def compare(line: ReportLine, by_subject: Mapping[str, ReportCell], others: Collection[str] = PEERS) -> LineVerdict:
    """With the best of the others. PPD with faults never holds its target; a peer's faults do not count."""
    ours = by_subject.get(PPD, ReportCell())
    peers = {name: cell.value for name, cell in by_subject.items() if name in others and cell.value is not None}
    choose = max if line.better is Better.MORE else min
    best = choose(peers, key=lambda name: peers[name]) if peers else ""
    ratio = ours.value / peers[best] if ours.value is not None and best and peers[best] > 0 else None
    if ours.value is None:
        return LineVerdict(ratio, best)
    kept = []
    if line.limit is not None:
        kept.append(ours.value <= line.limit)
    if line.target is not None and ratio is not None:
        kept.append(ratio >= line.target if line.better is Better.MORE else ratio <= line.target)
    return LineVerdict(ratio, best, all(kept) and ours.faults == 0 if kept else None)


def markdown(run: OverheadRun) -> str:
    names = [name for name in (*SUBJECTS, BEFORE) if any(record.subject == name for record in run.records)]
    measured = {record.row for record in run.records}
    before = ["ppd / before (lowest, highest)"] if BEFORE in names else []
    aware = ["ppd / best that knows sessions"] if set(AWARE) & set(names) else []
    heads = ["", *names, *before, *aware, "ppd / best peer", "target", "holds"]
    rows = [heads, ["---", *["---:"] * (len(heads) - 2), "---"]]
    for line in LINES:
        if line.row not in measured:
            continue
        by_subject = cells(line, run.records)
        verdict = compare(line, by_subject)
        shown = [_shown(by_subject.get(name), line) for name in names]
        shown += [_to_before(line, run.records)] if before else []
        shown += [_ratio(compare(line, by_subject, AWARE))] if aware else []
        rows.append([line.title, *shown, _ratio(verdict), _target(line), _holds(verdict)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    head = f"{about(run, 'the proxy on one core')} Peers without a policy choose workers by {BLIND}."
    return f"{head}\n\n{table}\n{problems(run)}"


def _ratio(verdict: LineVerdict) -> str:
    return f"{verdict.ratio:.2f} ({verdict.best})" if verdict.ratio is not None else "–"


def _to_before(line: ReportLine, records: Iterable[RowRecord]) -> str:
    """The median of the repetitions' ratios: in each, both builds are measured one after the other."""
    values: dict[int, dict[str, float]] = {}
    for record in records:
        if record.row == line.row and (value := line.value(record)):
            values.setdefault(record.repetition, {})[record.subject] = value
    ratios = [its[PPD] / its[BEFORE] for its in values.values() if {PPD, BEFORE} <= its.keys()]
    return f"{median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})" if ratios else "–"


def _shown(cell: ReportCell | None, line: ReportLine) -> str:
    if cell is None or cell.value is None:
        return "n/a" if cell and cell.problem else "–"
    faults = f" ({cell.faults:,} faults)" if cell.faults else ""
    return f"{cell.value:,.{line.digits}f}{faults}"


def _target(line: ReportLine) -> str:
    sign = "≥" if line.better is Better.MORE else "≤"
    parts = []
    if line.limit is not None:
        parts.append(f"≤ {line.limit:g}")
    if line.target is not None:
        parts.append(f"{sign} {line.target:.2g} x")
    return ", ".join(parts)


def _holds(verdict: LineVerdict) -> str:
    return "" if verdict.holds is None else "yes" if verdict.holds else "no"


def about(run: OverheadRun, cores: str) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    machine = run.machine
    return (
        f"{run.date}: {run.repetitions} repetitions, interleaved, {run.seconds:g} s a row; medians. {machine.cpu}, "
        f"{machine.cores} cores, {machine.memory_gib} GiB, Linux {machine.kernel}, Python {machine.python}; {cores}. "
        f"{versions}."
    )


def problems(run: OverheadRun) -> str:
    problems: dict[tuple[str, str], list[str]] = {}
    for record in run.records:
        if record.problem:
            rows = problems.setdefault((record.subject, record.problem), [])
            rows += [record.row] if record.row not in rows else []
    lines = [f"- {subject}, {', '.join(rows)}: {problem}" for (subject, problem), rows in problems.items()]
    return "\n".join(["", *lines, ""]) if lines else ""
