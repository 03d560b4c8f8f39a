"""The runs of a sweep as decision tables: runs at x=0 are the split arms of a topology's cells, those at x=1 the local
arms.

A table's contexts are the first turns that were measured, its workload types the later turns. It holds conversations of
one kind: with other numbers of turns, pauses or shared prefixes the same QPS is another load. So each kind gets its own
table, with the kind in its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import TypeVar

from ppd.proxy.decision_table import format
from ppd.proxy.decision_table.format import Arm, Axes, ContextClass, FailedArms, Provenance, Tpot, Ttft, WorkloadType
from ppd.proxy.decision_table.table import KIND, VERSION, DecisionTable
from ppd.proxy.errors import ConfigError, FormatError

from ..experiment.cells import ROUTES, MeasuredCell, gather, why_no_evidence
from ..experiment.files import write_whole
from ..experiment.records import Outcome, RunResult
from ..experiment.run import Profile, Workload
from ..experiment.statistics import Estimate

BEYOND = 2  # the last class ends at this multiple of what was measured, as in the paper
SIMULATED = "simulate"  # the backend whose runs are not measured

T = TypeVar("T", Ttft, Tpot)
V = TypeVar("V", float, float | None)

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_Arms = Mapping[tuple[Workload, float, float | None], MeasuredCell]  # by workload, QPS and x


def build_tables(
    results: Iterable[RunResult],
    *,
    name: str,
    source: str = "ppd-build-table",
    licence: str = "",
    note: str = "",
) -> list[DecisionTable]:
    """The tables with evidence, named <name>-<topology> plus how their conversations differ from two plain turns.

    Runs at an x other than 0 and 1 are ignored. FormatError where no cell has both arms.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name = {name!r}: must be letters, digits, '_', '.' and '-'", param="name")
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        run = result.run
        if run.x in ROUTES and run.workload.turns > 1:
            groups.setdefault(f"{run.topology}{_kind(run.workload)}", []).append(result)
    tables = []
    for suffix, group in groups.items():
        origin = _provenance(group, source=source, licence=licence, note=note)
        for part, cells in _told_apart(gather(group, own_way=True)):
            tables.append(_table(f"{name}-{suffix}{part}", cells, origin))
    _check_evidence(tables, sum(map(len, groups.values())))
    return [table for table in tables if _has_evidence(table)]


def write_tables(tables: Iterable[DecisionTable], folder: Path) -> list[Path]:
    """Each as <its name>.json in this folder, whole or not at all. Other tables there are older, and are deleted."""
    paths = []
    for table in tables:
        paths.append(folder / f"{table.name}.json")
        write_whole(paths[-1], table.encode())
    for path in folder.glob("*.json"):
        if path not in paths and _is_table(path):
            path.unlink()
    return paths


def _is_table(path: Path) -> bool:
    try:
        return DecisionTable.load(path).name == path.stem
    except FormatError:
        return False


def _kind(workload: Workload) -> str:
    """What the name says beside the two turns: `-turns4-think5`."""
    return workload.name.removeprefix(f"{workload.first.name}_{workload.later.name}")


# -- axes


def _told_apart(cells: Sequence[MeasuredCell]) -> list[tuple[str, list[MeasuredCell]]]:
    """Cells by table. First turns that leave the same tokens would share a place on the axis: each goes into another
    table.
    """
    tokens = _measured_tokens(cells)
    parts: list[list[Profile]] = []
    for first in sorted(tokens, key=lambda first: (tokens[first], first.name)):
        fitting = next((part for part in parts if tokens[part[-1]] != tokens[first]), None)
        if fitting is None:
            parts.append([first])
        else:
            fitting.append(first)
    suffixes = ["", *("".join(f"-{first.name}" for first in part) for part in parts[1:])]
    chosen = [[cell for cell in cells if cell.workload.first in part] for part in parts]
    return list(zip(suffixes, chosen, strict=True))


def _measured_tokens(cells: Iterable[MeasuredCell]) -> dict[Profile, int]:
    """Tokens that D holds when a later turn comes, by first turn; the geometric mean over turns and types."""
    cached: dict[Profile, list[int]] = {}
    for workload in dict.fromkeys(cell.workload for cell in cells):
        cached.setdefault(workload.first, []).extend(_cached_tokens(workload))
    return {first: round(math.exp(sum(map(math.log, held)) / len(held))) for first, held in cached.items()}


def _cached_tokens(workload: Workload) -> list[int]:
    first, later = workload.first, workload.later
    step = later.new_tokens + later.output_tokens
    return [first.new_tokens + first.output_tokens + step * before for before in range(workload.turns - 1)]


def _contexts(cells: Sequence[MeasuredCell]) -> list[tuple[Profile, ContextClass]]:
    # The bound between two classes is the geometric mean of what was measured in them.
    ordered = sorted(_measured_tokens(cells).items(), key=lambda item: item[1])
    longest = max(max(_cached_tokens(cell.workload)) for cell in cells)
    bounds = [math.isqrt(low * high) for (_, low), (_, high) in pairwise(ordered)]
    bounds.append(max(BEYOND * ordered[-1][1], longest))
    return [
        (first, ContextClass(name=first.name, max_tokens=bound, measured_tokens=tokens))
        for (first, tokens), bound in zip(ordered, bounds, strict=True)
    ]


# -- cells


def _table(name: str, cells: Sequence[MeasuredCell], origin: Provenance) -> DecisionTable:
    # Decoded from what will be written, so that it is what the proxy reads.
    contexts = _contexts(cells)
    types = sorted({cell.workload.later for cell in cells}, key=lambda type_: (type_.new_tokens, type_.output_tokens))
    axes = Axes(
        contexts=tuple(context for _, context in contexts),
        workloads=tuple(
            WorkloadType(name=t.name, new_tokens=t.new_tokens, output_tokens=t.output_tokens) for t in types
        ),
        qps=tuple(sorted({cell.qps for cell in cells})),
        qps_counts="conversations",
    )
    arms = {(cell.workload, cell.qps, cell.x): cell for cell in cells}
    workloads = {(cell.workload.first, cell.workload.later): cell.workload for cell in cells}
    made = [
        _cell(context.name, workload, qps, arms)
        for (first, context), later, qps in product(contexts, types, axes.qps)
        if (workload := workloads.get((first, later))) is not None
    ]
    table = DecisionTable(
        version=VERSION,
        kind=KIND,
        name=name,
        topology=cells[0].topology,
        provenance=origin,
        axes=axes,
        cells=tuple(cell for cell in made if cell is not None),
    )
    return DecisionTable.decode(table.encode())


def _cell(context: str, workload: Workload, qps: float, arms: _Arms) -> format.Cell | None:
    tried = [arms.get((workload, qps, x)) for x in ROUTES]
    if not any(tried):
        return None
    (split, why_no_split), (local, why_no_local) = map(_arm, tried)
    failed = FailedArms(split=why_no_split, local=why_no_local)
    return format.Cell(
        context=context,
        workload=workload.later.name,
        qps=qps,
        split=split,
        local=local,
        failed=failed if failed != FailedArms() else None,
    )


def _arm(cell: MeasuredCell | None) -> tuple[Arm | None, str]:
    """The arm, or None and the reason. An arm that was not tried has no reason."""
    if cell is None:
        return None, ""
    ttft, tpot, why = cell.later_ttft_s, cell.later_tpot_s, why_no_evidence(cell)
    if why or ttft is None or tpot is None:
        return None, why
    return Arm(n=ttft.n, failures=cell.failures, ttft_s=_times(Ttft, ttft), tpot_s=_times(Tpot, tpot)), ""


def _times(kind: type[T], estimate: Estimate) -> T:
    return kind(
        mean=_to_the_nanosecond(estimate.mean),
        p50=_to_the_nanosecond(estimate.p50),
        p99=_to_the_nanosecond(estimate.p99),
        std=_to_the_nanosecond(estimate.std),
        half_width=_to_the_nanosecond(estimate.half_width),
    )


def _to_the_nanosecond(value_s: V) -> V:
    return value_s if value_s is None else round(value_s, 9)


# -- where it comes from


def _provenance(results: Sequence[RunResult], *, source: str, licence: str, note: str) -> Provenance:
    origins = [result.origin for result in results]
    backends = {origin.backend for origin in origins}
    if SIMULATED in backends and len(backends) > 1:
        raise FormatError(f"{results[0].run.topology}: simulated and measured runs cannot be in one table")
    profiles = _joined(origin.profile for origin in origins)
    simulated = f"simulated with engine profile {profiles}, not measured" if SIMULATED in backends else ""
    engine, _, version = _joined(origin.engine for origin in origins).partition(" ")
    days = sorted({result.started[:10] for result in results})
    engines = "its engines were simulated" if not simulated and any(one.is_simulated for one in origins) else ""
    notes = (simulated, engines, *dict.fromkeys(origin.note for origin in origins), note)
    return Provenance(
        model=_joined(origin.model for origin in origins),
        gpu=_joined(origin.gpu for origin in origins),
        gpu_count=max(origin.gpu_count for origin in origins),
        engine="simulator" if simulated else engine,
        engine_version="" if simulated else version,
        connector=_joined(origin.connector for origin in origins),
        date="/".join(dict.fromkeys((days[0], days[-1]))),
        source=source,
        seeds=tuple(sorted({result.run.seed for result in results if result.outcome is Outcome.FINISHED})),
        note="; ".join(filter(None, notes)),
        licence=licence,
    )


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, texts)))


def _has_evidence(table: DecisionTable) -> bool:
    return any(cell.split is not None and cell.local is not None for cell in table.cells)


def _check_evidence(tables: Sequence[DecisionTable], runs: int) -> None:
    if any(map(_has_evidence, tables)):
        return
    reasons = [
        reason
        for table in tables
        for cell in table.cells
        if cell.failed is not None
        for reason in (cell.failed.split, cell.failed.local)
        if reason
    ]
    first = f"; the first reason: {reasons[0]}" if reasons else ""
    raise FormatError(f"a table without evidence: no cell has both arms, from {runs} runs at x=0 or x=1{first}")
