"""Rows of a published measurement grid -> decision tables.

The rows (CSV, gzipped or not) name configurations, workloads and QPS and hold the figures, in ms; a TOML description
beside them says what the names mean. `xP_yD` sent every turn through P, `xP_ypD` every follow-up turn to its D: such
a pair becomes the two arms of one table. The columns are described in tables/README.md.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Literal

import msgspec

from ..errors import FormatError
from .format import Arm, Axes, Cell, ContextClass, FailedArms, Name, Provenance, Tpot, Ttft, WorkloadType
from .table import KIND, VERSION, DecisionTable

_COUNTS = ("n_t1", "n_t2")
_FIGURES = ("qps", "t2_ttft_avg", "t2_ttft_p50", "t2_ttft_p99", "t2_tpot_avg", "t2_tpot_p99", "success_pct")
_COLUMNS = ("config", "workload", *_COUNTS, *_FIGURES)
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
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise FormatError(f"grid description: {exc}") from exc


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One run: an arm of one cell, or the reason why it is none."""

    line: int
    config: str
    context: str
    workload: str
    qps: float
    arm: Arm | None
    failed: str


def read_rows(data: bytes) -> list[PublishedRow]:
    """The rows of a CSV file's bytes, gzipped or plain; FormatError names the line and the column."""
    reader = csv.DictReader(io.StringIO(_text(data), newline=""))
    try:
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise FormatError(f"rows: column {missing[0]} is missing")
        return [_row(reader.line_num, fields) for fields in reader]
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


def _row(line: int, fields: dict[str, str | None]) -> PublishedRow:
    figures = {name: _number(line, name, fields[name]) for name in (*_COUNTS, *_FIGURES)}
    config, workload = fields["config"], fields["workload"]
    context, separator, name = (workload or "").partition("_")
    if not config or not separator:
        raise FormatError(f"line {line}: config must be a name and workload <context>_<workload type>")
    if figures["qps"] == 0 or figures["success_pct"] > 100:
        raise FormatError(f"line {line}: qps must be above 0 and success_pct at most 100")
    arm, failed = _arm(figures)
    return PublishedRow(line, config, context, name, float(figures["qps"]), arm, failed)


def _number(line: int, column: str, text: str | None) -> Decimal:
    """Decimal, so that 9.54 ms becomes 0.00954 s and not the nearest float's quotient."""
    try:
        value = Decimal(text or "")
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite() or value < 0 or (column in _COUNTS and value % 1):
        raise FormatError(f"line {line}: {column} must be a number of at least 0, got {text!r}")
    return value


def _arm(figures: dict[str, Decimal]) -> tuple[Arm | None, str]:
    """The arm, or None and why; a zero is the harness's mark for a figure that it does not have."""
    n, success_pct = int(figures["n_t2"]), figures["success_pct"]
    if n == 0 or success_pct == 0:
        return None, "no follow-up turn finished"
    finished = int(figures["n_t1"]) + n
    requests = max(round(100 * finished / success_pct), finished)
    for column in ("t2_ttft_avg", "t2_ttft_p50", "t2_ttft_p99", "t2_tpot_avg", "t2_tpot_p99"):
        if figures[column] == 0:
            return None, f"{column} was not recorded; {finished} of {requests} requests finished"
    ttft = Ttft(
        mean=_seconds(figures["t2_ttft_avg"]),
        p50=_seconds(figures["t2_ttft_p50"]),
        p99=_seconds(figures["t2_ttft_p99"]),
        std=None,
    )
    tpot = Tpot(mean=_seconds(figures["t2_tpot_avg"]), p50=None, p99=_seconds(figures["t2_tpot_p99"]), std=None)
    return Arm(n=n, failures=requests - finished, ttft_s=ttft, tpot_s=tpot), ""


def _seconds(milliseconds: Decimal) -> float:
    return float(milliseconds.scaleb(-3))


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
    failed = FailedArms(split=split.failed if split else "", local=local.failed if local else "")
    return Cell(
        context=context,
        workload=workload,
        qps=qps,
        split=split.arm if split else None,
        local=local.arm if local else None,
        failed=failed if failed != FailedArms() else None,
    )
