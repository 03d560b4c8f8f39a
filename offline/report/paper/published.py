"""The rows that were published with the paper, as a study of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ppd.proxy.decision_table.table import DecisionTable

from ...experiment.cells import MeasuredCell
from ...experiment.files import load
from ...tables import published_cells
from ...tables.published_rows import GridDescription, build_table, pair_of, read_rows
from ..analysis.study import Study, grid_facts

CAUTIONS = (
    "The load generator opened at most 50 connections and started a request's clock before it had one. Above about 8 "
    "conversations/s with large first turns, the client is the bottleneck: TTFT of first turns is its queue, and the "
    "offered load does not arrive.",
    "One run of 10 s a cell, about four conversations at 0.5 conversations/s, and no repeats: nothing has an interval, "
    "and only pairs over many cells say how certain a figure is.",
    "Runs that failed did so at any load: the transfer path crashed. It is no saturation.",
    "At x=0 the whole prompt's KV was sent again each turn, even what D still held. Token counts are nominal.",
)


def of_rows(rows: Path, description: Path) -> Study:
    """`rows`: CSV, gzipped or not. `description`: the TOML file that says where they come from and what they mean."""
    cells = [_without_zeros(cell) for cell in published_cells.read_cells(rows)]
    grid = load(description, GridDescription.decode)
    origin = grid.provenance
    return Study(
        title="The published PPD measurements",
        lead=(
            "The rows that were published with “Not All Prefills Are Equal: PPD Disaggregation for Multi-turn LLM "
            "Serving”, reported by the code that reports a sweep, and beside the figures that the paper prints."
        ),
        facts=(
            ("Source", origin.source),
            ("Licence", origin.licence),
            ("Model", origin.model),
            ("GPUs", f"{origin.gpu_count} × {origin.gpu}"),
            ("Engine", f"{origin.engine} {origin.engine_version}"),
            ("Connector", origin.connector),
            ("Published", origin.date),
            *grid_facts(cells),
        ),
        cells=tuple(cells),
        tables=tuple(_tables(rows, grid, cells)),
        cautions=CAUTIONS,
    )


def _without_zeros(cell: MeasuredCell) -> MeasuredCell:
    # A run that failed left zeros, not a count of its requests.
    if not cell.failed:
        return cell
    return replace(cell, seeds=(), requests=0, failures=0, later_requests=0, later_failures=0)


def _tables(rows: Path, grid: GridDescription, cells: list[MeasuredCell]) -> list[DecisionTable]:
    found = load(rows, read_rows)
    configs = {row.config for row in found}
    pairs = [topology for topology in sorted({cell.topology for cell in cells}) if topology.endswith("D")]
    return [build_table(found, grid, config) for config in pairs if {config, pair_of(config)} <= configs]
