"""What a report is about: cells, the tables made of them, and where they come from."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ppd.proxy.decision_table.table import DecisionTable
from ppd.proxy.errors import FormatError

from ...experiment.cells import MeasuredCell, gather, is_evidence
from ...experiment.records import Origin, RunResult
from ...sweep.folder import Sweep, SweepFolder
from ...tables.build import build_tables
from ..page.numerals import count, percent
from .arms import arms

FEW: Final = 30  # with fewer follow-up turns a cell's p99 is its maximum, and its interval a guess
LATE: Final = 0.05  # share of the mean TTFT within which 99 % of the requests must be sent
_BACKENDS: Final = {
    "simulate": "simulation in virtual time",
    "launch": "fleets started for it",
    "target": "a running proxy",
}
_LISTED: Final = 5  # reasons for failures that are listed at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    title: str
    lead: str
    facts: tuple[tuple[str, str], ...]
    cells: tuple[MeasuredCell, ...]
    tables: tuple[DecisionTable, ...]
    cautions: tuple[str, ...]


def of_sweep(folder: Path) -> Study:
    """FormatError where there is no sweep, no run in it, or a file that cannot be read."""
    sweep = SweepFolder(folder)
    results = list(sweep.results())
    cells = gather(results)
    if not cells:
        raise FormatError(f"{folder}: no run is there yet")
    origin = sweep.sweep.origin
    return Study(
        title=f"Sweep {folder.resolve().name}",
        lead=(
            "How follow-up turns did when they went through P (x=0) and when they stayed on their session's D (x=1). "
            "Every time is measured from when a request was to be sent; failed requests are counted and in no mean."
        ),
        facts=(*_provenance(sweep.sweep), *grid_facts(cells)),
        cells=tuple(cells),
        tables=_tables(results, folder.resolve().name),
        cautions=(*_origin_cautions(origin), *_gaps(sweep.sweep, cells)),
    )


def grid_facts(cells: Sequence[MeasuredCell]) -> tuple[tuple[str, str], ...]:
    workloads = {cell.workload for cell in cells}
    firsts = sorted({(w.first.new_tokens, w.first.output_tokens, w.first.name) for w in workloads})
    laters = sorted({(w.later.new_tokens, w.later.output_tokens, w.later.name) for w in workloads})
    several = (
        ("Turns", {workload.turns for workload in workloads}, ""),
        ("Pause before a turn", {workload.think_s for workload in workloads}, " s on average"),
        ("Shared prefix", {workload.shared_prefix_tokens for workload in workloads}, " tokens"),
    )
    return (
        ("Arms", ", ".join(arm.label for arm in arms(cells))),
        ("First turns", ", ".join(f"{name} {new} → {output}" for new, output, name in firsts)),
        ("Follow-up turns", ", ".join(f"{name} {new} → {output}" for new, output, name in laters)),
        ("Conversations/s", ", ".join(f"{qps:g}" for qps in sorted({cell.qps for cell in cells}))),
        *((name, ", ".join(f"{v:g}" for v in sorted(values)) + unit) for name, values, unit in several if any(values)),
        ("Cells", f"{len(cells):,}, of which {sum(map(is_evidence, cells)):,} are evidence"),
        ("Requests", f"{sum(cell.requests for cell in cells):,}, of which {_failures(cells):,} failed"),
    )


def is_other_share(cell: MeasuredCell) -> bool:
    """Whether the LOCAL share differs from x by more than 1 % and more than three standard deviations of chance."""
    if cell.x is None or cell.local_share is None:
        return False
    chance = math.sqrt(cell.x * (1 - cell.x) / (cell.local_turns + cell.split_turns))
    return abs(cell.local_share - cell.x) > max(0.01, 3 * chance) + 1e-9


def is_late(cell: MeasuredCell) -> bool:
    if cell.ttft_s is None or cell.lateness_p99_s is None:
        return False
    return cell.lateness_p99_s > LATE * cell.ttft_s.mean


def cell_cautions(cells: Sequence[MeasuredCell]) -> tuple[str, ...]:
    failed = [cell for cell in cells if cell.failed]
    reasons = sorted({reason for cell in failed for reason in cell.failed})
    some = [cell for cell in cells if not cell.failed and cell.failures]
    few = [cell for cell in cells if cell.later_ttft_s is not None and cell.later_ttft_s.n < FEW]
    alone = [cell for cell in cells if len(cell.seeds) == 1]
    others, late = sum(map(is_other_share, cells)), sum(map(is_late, cells))
    points = []
    if failed:
        named = "; ".join(reasons[:_LISTED]) + ("; and others" if len(reasons) > _LISTED else "")
        runs = sum(len(cell.failed) for cell in failed)
        points.append(f"{count(runs, 'run')} failed, in {count(len(failed), 'cell')}, which are no evidence: {named}.")
    if some:
        points.append(
            f"In {count(len(some), 'more cell')} some requests failed; figures are of those that did not. Beyond 5 % "
            "failed, of all requests or of follow-up turns, a cell is no evidence."
        )
    if others:
        points.append(
            f"In {count(others, 'cell')} the share of LOCAL turns is not what x says: follow-up turns went another way "
            "than they were sent. Where more than 10 % of those of x=0 or x=1 did, the cell is no evidence."
        )
    if late:
        points.append(
            f"In {count(late, 'cell')} requests were sent late: the 99th percentile of the delay is above "
            f"{percent(LATE, 0)} of the mean TTFT, which contains it. There the load generator was measured too."
        )
    if few:
        points.append(
            f"{count(len(few), 'cell')} of {len(cells):,} rest on fewer than {FEW} follow-up turns: their p99 is about "
            "the slowest turn."
        )
    if alone:
        points.append(
            f"{count(len(alone), 'cell')} of {len(cells):,} were measured by one run. Requests of one run wait for "
            "each other, so an interval from one run, where there is one, is too narrow."
        )
    return tuple(points)


def _tables(results: Sequence[RunResult], name: str) -> tuple[DecisionTable, ...]:
    # Made of the runs that are there now, so that page and tables agree; none where no cell has both arms.
    try:
        return tuple(build_tables(results, name=re.sub(r"[^A-Za-z0-9_.-]+", "-", name)))
    except FormatError:
        return ()


def _provenance(sweep: Sweep) -> tuple[tuple[str, str], ...]:
    origin, grid = sweep.origin, sweep.grid
    gpus = f"{origin.gpu_count} × {origin.gpu}" if origin.gpu_count else origin.gpu
    facts = (
        ("Measured by", _BACKENDS.get(origin.backend, origin.backend)),
        ("Engine", origin.engine),
        ("Engine profile", origin.profile),
        ("Model", origin.model),
        ("GPUs", gpus),
        ("Connector", origin.connector),
        ("Note", origin.note),
        ("Begun", sweep.started),
        ("Written by", f"ppd {sweep.ppd}"),
        ("Arrivals", f"{grid.arrivals}; {grid.seconds:g} s and {count(grid.conversations, 'conversation')} at least"),
        ("Warm-up", f"{grid.warm_up_s:g} s, in no figure"),
        ("Runs a cell", f"{grid.seeds} to {grid.max_seeds}, until known to {percent(grid.precision, 0)}"),
    )
    return tuple((name, value) for name, value in facts if value)


def _origin_cautions(origin: Origin) -> tuple[str, ...]:
    if not origin.is_simulated:
        return ()
    if origin.backend != "simulate":
        return ("Nothing here was measured on hardware: the engines were simulated ones, `ppd sim`, over real HTTP.",)
    name, note = origin.profile, origin.note
    using = f"with the engine profile {name}, and is worth what that profile is" if name else "in virtual time"
    return (f"Nothing here was measured on hardware: it was simulated {using}.{f' {_sentence(note)}' if note else ''}",)


def _sentence(note: str) -> str:
    return f"{note[0].upper()}{note[1:].rstrip('.')}."


def _gaps(sweep: Sweep, cells: Sequence[MeasuredCell]) -> tuple[str, ...]:
    planned = {run.cell for run in sweep.grid.runs(0)}
    missing = len(planned) - len(cells)
    if missing <= 0:
        return ()
    return (f"{missing:,} of the grid's {len(planned):,} cells have no run: not yet, or not asked for.",)


def _failures(cells: Sequence[MeasuredCell]) -> int:
    return sum(cell.failures for cell in cells)
