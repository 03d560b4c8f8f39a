"""The rows that were published with the PPD paper, and the decision tables that they make.

A row is one run of a configuration, workload and QPS; times are in ms, and a zero marks a figure that is missing. The
rows are CSV, gzipped or plain, and a TOML description beside them says what their names mean. `xP_yD` sent every turn
through P, `xP_ypD` every follow-up turn to its D: such a pair becomes the two arms of one table. tables/README.md
describes the columns.

This module needs neither NumPy nor pandas, so that `ppd table import` works without the extra `offline`.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Literal

import msgspec

from ppd.proxy.decision_table.format import (
    Arm,
    Axes,
    Cell,
    ContextClass,
    FailedArms,
    Name,
    Provenance,
    Tpot,
    Ttft,
    WorkloadType,
)
from ppd.proxy.decision_table.table import KIND, VERSION, DecisionTable
from ppd.proxy.errors import FormatError

from ..experiment.files import UNREADABLE

_COUNTS = ("n_t1", "n_t2")
_ARM_FIGURES = ("t2_ttft_avg", "t2_ttft_p50", "t2_ttft_p99", "t2_tpot_avg", "t2_tpot_p99")
_FIGURES = ("qps", *_COUNTS, *_ARM_FIGURES, "success_pct")  # what a decision table needs
_GZIP_MAGIC = b"\x1f\x8b"


class GridAxes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table's axes without the QPS points, which the rows name themselves."""

    contexts: tuple[ContextClass, ...]
    workloads: tuple[WorkloadType, ...]
    qps_counts: Literal["conversations", "turns"]


class GridDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a grid's rows do not say about themselves."""

    version: Literal[1]
    kind: Literal["ppd-grid"]
    name: Name  # tables are called <name>-<config>
    provenance: Provenance
    axes: GridAxes

    @staticmethod
    def decode(data: bytes) -> GridDescription:
        try:
            return msgspec.toml.decode(data, type=GridDescription)
        except UNREADABLE as exc:
            raise FormatError(f"grid description: {exc}") from exc


@dataclass(frozen=True, slots=True)
class PublishedRow:
    line: int
    config: str
    context: str  # what the first turn is called
    workload: str  # what the follow-up turn is called
    figures: Mapping[str, Decimal]  # by column; times in ms

    @property
    def qps(self) -> float:
        return float(self.figures["qps"])

    @property
    def finished(self) -> int:
        return int(self.figures["n_t1"]) + int(self.figures["n_t2"])

    @property
    def requests(self) -> int:
        """Requests sent, computed from the share that finished; 1 at least, where none finished."""
        success_pct = self.figures["success_pct"]
        return max(round(100 * self.finished / success_pct) if success_pct else 1, self.finished)


def read_rows(data: bytes, also: Sequence[str] = ()) -> list[PublishedRow]:
    """The rows of a CSV file's bytes, gzipped or plain; FormatError names the line and the column.

    also: columns that are needed beside those of a decision table.
    """
    figures = (*_FIGURES, *also)
    reader = csv.DictReader(io.StringIO(_text(data), newline=""))
    try:
        missing = [name for name in ("config", "workload", *figures) if name not in (reader.fieldnames or ())]
        if missing:
            raise FormatError(f"rows: column {missing[0]} is missing")
        return [_row(reader.line_num, fields, figures) for fields in reader]
    except csv.Error as exc:
        raise FormatError(f"line {reader.line_num}: {exc}") from exc


def pair_of(config: str) -> str:
    """The configuration measured as `config` with its follow-up turns local: 2P_2D -> 2P_2pD."""
    pair, count = re.subn(r"(?<=\d)D$", "pD", config)
    if count == 0:
        raise FormatError(f"config: {config!r} does not end in a number of D, so its pair must be given")
    return pair


def build_table(
    rows: list[PublishedRow], description: GridDescription, config: str, pair: str | None = None
) -> DecisionTable:
    """The table of one topology: `config`'s rows are its split arms, `pair`'s its local arms."""
    split = _by_cell(rows, config, description.axes)
    local = _by_cell(rows, pair or pair_of(config), description.axes)
    axes = Axes(
        contexts=description.axes.contexts,
        workloads=description.axes.workloads,
        qps=tuple(sorted({qps for _, _, qps in split | local})),
        qps_counts=description.axes.qps_counts,
    )
    keys = [(c.name, w.name, qps) for c in axes.contexts for w in axes.workloads for qps in axes.qps]
    return DecisionTable(
        version=VERSION,
        kind=KIND,
        name=f"{description.name}-{config}",
        topology=config,
        provenance=description.provenance,
        axes=axes,
        cells=tuple(_cell(key, split.get(key), local.get(key)) for key in keys if key in split or key in local),
    )


def _text(data: bytes) -> str:
    try:
        return (gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as exc:
        raise FormatError(f"rows: neither CSV nor gzipped CSV in UTF-8: {exc}") from exc


def _row(line: int, fields: Mapping[str, str | None], columns: Sequence[str]) -> PublishedRow:
    figures = {name: _number(line, name, fields[name]) for name in columns}
    config, (context, separator, workload) = fields["config"], (fields["workload"] or "").partition("_")
    if not config or not separator:
        raise FormatError(f"line {line}: config must be a name and workload <context>_<workload type>")
    if figures["qps"] == 0 or figures["success_pct"] > 100:
        raise FormatError(f"line {line}: qps must be above 0 and success_pct at most 100")
    return PublishedRow(line, config, context, workload, figures)


def _number(line: int, column: str, text: str | None) -> Decimal:
    try:
        value = Decimal(text or "")
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite() or value < 0 or (column in _COUNTS and value % 1):
        raise FormatError(f"line {line}: {column} must be a number of at least 0, got {text!r}")
    return value


def _by_cell(rows: list[PublishedRow], config: str, axes: GridAxes) -> dict[tuple[str, str, float], PublishedRow]:
    contexts, workloads = {context.name for context in axes.contexts}, {workload.name for workload in axes.workloads}
    found: dict[tuple[str, str, float], PublishedRow] = {}
    for row in rows:
        if row.config != config:
            continue
        if row.context not in contexts or row.workload not in workloads:
            raise FormatError(f"line {row.line}: {row.context}_{row.workload} is not on the description's axes")
        key = (row.context, row.workload, row.qps)
        if key in found:
            raise FormatError(f"line {row.line}: {config} has this cell on line {found[key].line} already")
        found[key] = row
    if not found:
        known = ", ".join(sorted({row.config for row in rows}))
        raise FormatError(f"config: no rows of {config!r}; there are {known or 'none at all'}")
    return found


def _cell(key: tuple[str, str, float], split: PublishedRow | None, local: PublishedRow | None) -> Cell:
    context, workload, qps = key
    (split_arm, why_no_split), (local_arm, why_no_local) = _arm(split), _arm(local)
    failed = FailedArms(split=why_no_split, local=why_no_local)
    return Cell(
        context=context,
        workload=workload,
        qps=qps,
        split=split_arm,
        local=local_arm,
        failed=failed if failed != FailedArms() else None,
    )


def _arm(row: PublishedRow | None) -> tuple[Arm | None, str]:
    if row is None:
        return None, ""
    figures, n = row.figures, int(row.figures["n_t2"])
    if n == 0 or figures["success_pct"] == 0:
        return None, "no follow-up turn finished"
    for column in _ARM_FIGURES:
        if figures[column] == 0:
            return None, f"{column} was not recorded; {row.finished} of {row.requests} requests finished"
    mean, p50, p99, tpot_mean, tpot_p99 = (_seconds(figures[column]) for column in _ARM_FIGURES)
    ttft = Ttft(mean=mean, p50=p50, p99=p99, std=None)
    tpot = Tpot(mean=tpot_mean, p50=None, p99=tpot_p99, std=None)
    return Arm(n=n, failures=row.requests - row.finished, ttft_s=ttft, tpot_s=tpot), ""


def _seconds(milliseconds: Decimal) -> float:
    # Exact: 9.54 ms becomes 0.00954 s and not the nearest float's quotient.
    return float(milliseconds.scaleb(-3))
