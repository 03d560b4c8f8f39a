"""Decision tables: what was measured with follow-up turns through P (`split`) and on D (`local`), and what follows.

A file holds measurements; decisions are computed from them for the operator's weights, so new weights need no new
sweep: `DecisionTable.load(path)` reads a file, `table.scored(weights)` judges every cell once, and
`scored.lookup(workload)` finds a turn's verdict. The format is described in tables/README.md.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from .errors import ConfigError, FormatError
from .measurements import Axes, Cell, Failed, Name, Provenance, check_distinct

VERSION: Final = 1
KIND: Final = "ppd-decision-table"
BUNDLED = Path(__file__).parents[1] / "tables"


@dataclass(frozen=True, slots=True)
class Weights:
    """What the operator cares about; only their ratio matters, and at 0, 0 nothing is LOCAL."""

    ttft: float = 1.0
    tpot: float = 1.0

    def __post_init__(self) -> None:
        for key, value in (("w_ttft", self.ttft), ("w_tpot", self.tpot)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{key}: must be a finite number of at least 0, got {value}", param=key)

    def score(self, d_ttft: float, d_tpot: float) -> float:
        """What LOCAL gains over SPLIT: relative TTFT saved less relative TPOT lost, each with its weight."""
        return self.ttft * d_ttft - self.tpot * d_tpot


@dataclass(frozen=True, slots=True)
class Workload:
    """What a turn is looked up by; `qps` counts what the table's `axes.qps_counts` says."""

    new_tokens: int
    cached_tokens: int
    output_tokens: int
    qps: float


class Evidence(StrEnum):
    """How a turn relates to what was measured; each axis by itself, not their combination."""

    INSIDE = "inside"  # within the measured range of every axis
    EXTRAPOLATED = "extrapolated"  # beyond at least one; the verdict is the nearest cell's
    NONE = "none"  # the nearest cell lacks an arm


@dataclass(frozen=True, slots=True)
class CellKey:
    context: str
    workload: str
    qps: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a cell says under some weights; with no evidence `local` and the three numbers are None."""

    local: bool | None
    score: float | None
    d_ttft: float | None  # (split - local) / split, of mean TTFT: the share of it that LOCAL saves
    d_tpot: float | None  # (local - split) / split, of mean TPOT: the share that LOCAL adds
    cell: CellKey
    evidence: Evidence


class DecisionTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table file, checked."""

    version: Literal[1]
    kind: Literal["ppd-decision-table"]
    name: Name
    topology: Name  # as the source calls it: 1P_3D is one P and three D
    provenance: Provenance
    axes: Axes
    cells: tuple[Cell, ...]

    def __post_init__(self) -> None:
        self.axes.check()
        contexts = {context.name for context in self.axes.contexts}
        workloads = {workload.name for workload in self.axes.workloads}
        for index, cell in enumerate(self.cells):
            for field, value, known in (
                ("context", cell.context, contexts),
                ("workload", cell.workload, workloads),
                ("qps", cell.qps, self.axes.qps),
            ):
                if value not in known:
                    raise FormatError(f"cells[{index}].{field}: {value!r} is not on its axis")
            _check_reasons(index, cell)
        check_distinct("cells", [_key(cell) for cell in self.cells])

    @staticmethod
    def decode(data: bytes) -> DecisionTable:
        """The table in a file's bytes; FormatError names the field that is missing, unknown or wrong."""
        try:
            header = msgspec.json.decode(data, type=_Header)
            if header.kind != KIND:
                raise FormatError(f"kind: must be {KIND!r}, got {header.kind!r}")
            if header.version != VERSION:
                raise FormatError(f"version: must be {VERSION}, got {header.version}")
            return msgspec.json.decode(data, type=DecisionTable)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise FormatError(f"decision table: {exc}") from exc

    def encode(self) -> bytes:
        """The file's bytes: one cell and one axis entry a line, so that two tables can be compared with diff."""
        return (_layout(json.loads(msgspec.json.encode(self)), 0) + "\n").encode()

    @staticmethod
    def load(path: Path) -> DecisionTable:
        try:
            return DecisionTable.decode(path.read_bytes())
        except OSError as exc:
            raise FormatError(f"{path}: {exc.strerror}") from exc
        except FormatError as exc:
            raise FormatError(f"{path}: {exc}") from exc

    def scored(self, weights: Weights) -> ScoredTable:
        return ScoredTable(self, weights)

    def lookup(self, workload: Workload, weights: Weights) -> Verdict:
        """One verdict, scoring the whole table for it; a caller with many turns keeps `scored(weights)`."""
        return self.scored(weights).lookup(workload)


class ScoredTable:
    """A table under fixed weights: every verdict is made here once, a lookup only finds the nearest (Algorithm 1).

    The nearest cell is found axis by axis. Context: the class that takes the cached tokens, the last class above its
    bound. QPS: the nearest point, the higher one in a tie. Workload type: the measured (new, output) pair nearest in
    log space, the first in a tie; so a pair's own centre always finds itself, which the published prototype's rules on
    new/output ratios do not grant (16 -> 32 can never be `tiny` there). Logs because costs are compared by ratio: 16
    against 32 new tokens is as far as 512 against 1024.
    """

    __slots__ = ("_bounds", "_centres", "_inside", "_last", "_midpoints", "_outside", "_ranges", "table", "weights")

    def __init__(self, table: DecisionTable, weights: Weights) -> None:
        axes = table.axes
        self.table = table
        self.weights = weights
        self._bounds = [context.max_tokens for context in axes.contexts]
        self._last = len(self._bounds) - 1
        self._centres = [(math.log2(w.new_tokens), math.log2(w.output_tokens)) for w in axes.workloads]
        self._midpoints = [(low + high) / 2 for low, high in pairwise(axes.qps)]
        new, output = [w.new_tokens for w in axes.workloads], [w.output_tokens for w in axes.workloads]
        self._ranges = (min(new), max(new), min(output), max(output), self._bounds[-1], axes.qps[0], axes.qps[-1])
        cells = {_key(cell): cell for cell in table.cells}
        keys = [CellKey(c.name, w.name, q) for c in axes.contexts for w in axes.workloads for q in axes.qps]
        self._inside = [_verdict(key, cells.get(key), weights, Evidence.INSIDE) for key in keys]
        self._outside = [_verdict(key, cells.get(key), weights, Evidence.EXTRAPOLATED) for key in keys]

    def lookup(self, workload: Workload) -> Verdict:
        """The nearest cell's verdict; total: any numbers find a cell."""
        new, cached, output, qps = workload.new_tokens, workload.cached_tokens, workload.output_tokens, workload.qps
        context = min(bisect_left(self._bounds, cached), self._last)
        row = context * len(self._centres) + self._nearest_workload(new, output)
        index = row * (len(self._midpoints) + 1) + bisect_right(self._midpoints, qps)
        min_new, max_new, min_output, max_output, max_cached, min_qps, max_qps = self._ranges
        is_inside = (
            min_new <= new <= max_new
            and min_output <= output <= max_output
            and 0 < cached <= max_cached
            and min_qps <= qps <= max_qps
        )
        return (self._inside if is_inside else self._outside)[index]

    def verdicts(self) -> Iterator[Verdict]:
        """Every cell on the axes: by context, then workload, then QPS, as the file orders them."""
        return iter(self._inside)

    def _nearest_workload(self, new_tokens: int, output_tokens: int) -> int:
        new_log, output_log = math.log2(max(new_tokens, 1)), math.log2(max(output_tokens, 1))
        nearest, least = 0, math.inf
        for index, (new, output) in enumerate(self._centres):
            distance = (new - new_log) ** 2 + (output - output_log) ** 2
            if distance < least:
                nearest, least = index, distance
        return nearest


def bundled() -> dict[str, Path]:
    """The tables that ship with the project, by name."""
    return {path.stem: path for path in sorted(BUNDLED.glob("*.json"))}


def find(name: str) -> Path:
    """A shipped table by its name, or a file by its path; ConfigError lists the names."""
    known = bundled()
    if name in known:
        return known[name]
    if (path := Path(name)).is_file():
        return path
    raise ConfigError(f"table = {name!r}: must be {', '.join(known) or 'none'}, or the path of a file", param="table")


class _Header(msgspec.Struct):
    version: int
    kind: str


def _key(cell: Cell) -> CellKey:
    return CellKey(cell.context, cell.workload, cell.qps)


def _verdict(key: CellKey, cell: Cell | None, weights: Weights, evidence: Evidence) -> Verdict:
    if cell is None or cell.split is None or cell.local is None:
        return Verdict(None, None, None, None, key, Evidence.NONE)
    split, local = cell.split, cell.local
    d_ttft = (split.ttft_s.mean - local.ttft_s.mean) / split.ttft_s.mean
    d_tpot = (local.tpot_s.mean - split.tpot_s.mean) / split.tpot_s.mean
    score = weights.score(d_ttft, d_tpot)
    return Verdict(score > 0, score, d_ttft, d_tpot, key, evidence)


def _check_reasons(index: int, cell: Cell) -> None:
    failed = cell.failed or Failed()
    for arm, reason, measured in (("split", failed.split, cell.split), ("local", failed.local, cell.local)):
        if reason and measured is not None:
            raise FormatError(f"cells[{index}].failed.{arm}: the arm has measurements")


def _layout(value: Any, depth: int) -> str:
    """JSON with line breaks between the fields of the two outer levels and between the objects of a list."""
    is_rows = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    if not is_rows and not (isinstance(value, dict) and depth < 2):
        return json.dumps(value, ensure_ascii=False)
    pad, end = "  " * (depth + 1), "  " * depth
    if is_rows:
        rows = ",\n".join(pad + json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in value)
        return f"[\n{rows}\n{end}]"
    fields = ",\n".join(f"{pad}{json.dumps(name)}: {_layout(item, depth + 1)}" for name, item in value.items())
    return f"{{\n{fields}\n{end}}}"
