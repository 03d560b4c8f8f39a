"""Decision tables: TTFT and TPOT of follow-up turns, measured through P (`split`) and on D (`local`), and the verdicts.

A file holds measurements. Decisions are computed from them for the operator's weights, so new weights need no new
sweep: `DecisionTable.load(path)` reads a file, `table.scored(weights)` scores every cell once, and
`scored.lookup(query)` finds a turn's verdict. The format is described in tables/README.md.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from ..config import Lookup
from ..errors import UNREADABLE, ConfigError, FormatError
from .format import Arm, Axes, Cell, FailedArms, Name, Provenance, check_distinct
from .interpolation import Mix
from .nearest import Around, Nearest, TableQuery
from .prototype_format import PrototypeTable, axes_of
from .score import CellKey, Evidence, Verdict, Weights, differences, judge, no_evidence

__all__ = [
    "BUNDLED",
    "KIND",
    "VERSION",
    "CellKey",
    "DecisionTable",
    "Evidence",
    "Lookup",
    "ScoredTable",
    "TableQuery",
    "Verdict",
    "Weights",
    "bundled",
    "find",
]

VERSION: Final = 1
KIND: Final = "ppd-decision-table"
BUNDLED = Path(__file__).parents[2] / "tables"


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
        """Reads the project's own format, or the prototype's export.

        FormatError names the field that is missing, unknown or wrong.
        """
        try:
            if msgspec.json.decode(data, type=_Format).is_prototype:
                return _of_prototype(PrototypeTable.decode(data))
            header = msgspec.json.decode(data, type=_Header)
            if header.kind != KIND:
                raise FormatError(f"kind: must be {KIND!r}, got {header.kind!r}")
            if header.version != VERSION:
                raise FormatError(f"version: must be {VERSION}, got {header.version}")
            return msgspec.json.decode(data, type=DecisionTable)
        except UNREADABLE as exc:
            raise FormatError(f"decision table: {exc}") from exc

    def encode(self) -> bytes:
        """One cell and one axis entry a line, so that two tables can be compared with diff."""
        return (_layout(json.loads(msgspec.json.encode(self)), 0) + "\n").encode()

    @staticmethod
    def load(path: Path) -> DecisionTable:
        try:
            return DecisionTable.decode(path.read_bytes())
        except OSError as exc:
            raise FormatError(f"{path}: {exc.strerror}") from exc
        except FormatError as exc:
            raise FormatError(f"{path}: {exc}") from exc

    def scored(self, weights: Weights, rule: Lookup = Lookup.NEAREST) -> ScoredTable:
        return ScoredTable(self, weights, rule)

    def lookup(self, query: TableQuery, weights: Weights, rule: Lookup = Lookup.NEAREST) -> Verdict:
        """Scores the whole table for one verdict; a caller with many turns keeps `scored(weights)`."""
        return self.scored(weights, rule).lookup(query)


class ScoredTable:
    """A table under fixed weights: every cell is scored once; a lookup only finds the cells that stand for a turn.

    By the rule `nearest` that is one cell (`Nearest`). By `interpolated` it is the cells around the turn (`Around`):
    the logarithms of TTFT and TPOT of both arms are averaged with the cells' shares, and the two differences follow
    from the averages. For that it is enough to average log(local / split). On a measured point both rules give that
    cell's own verdict. If a cell with a share lacks evidence, the nearest cell's verdict is used, as an extrapolated
    one.
    """

    __slots__ = ("_around", "_cells", "_inside", "_nearest", "_outside", "_ratios", "rule", "table", "weights")

    def __init__(self, table: DecisionTable, weights: Weights, rule: Lookup = Lookup.NEAREST) -> None:
        axes = table.axes
        self.table = table
        self.weights = weights
        self.rule = rule
        cells = self._cells = {_key(cell): cell for cell in table.cells}
        keys = [CellKey(c.name, w.name, q) for c in axes.contexts for w in axes.workloads for q in axes.qps]
        self._inside = [self._judged(key, cells.get(key), Evidence.INSIDE) for key in keys]
        self._outside = [self._judged(key, cells.get(key), Evidence.EXTRAPOLATED) for key in keys]
        self._ratios = [_log_ratios(cells.get(key)) for key in keys]
        self._nearest = Nearest(axes)
        self._around = Around(axes) if rule is Lookup.INTERPOLATED else None

    def lookup(self, query: TableQuery) -> Verdict:
        if self._around is not None:
            return self._averaged(self._around.mix(query)) or self._outside[self._nearest.cell(query)]
        verdicts = self._inside if self._nearest.covers(query) else self._outside
        return verdicts[self._nearest.cell(query)]

    def arm(self, cell: CellKey, *, local: bool) -> Arm | None:
        """What was measured in a cell, LOCAL or SPLIT."""
        found = self._cells.get(cell)
        return None if found is None else found.local if local else found.split

    def verdicts(self) -> Iterator[Verdict]:
        """Every cell on the axes: by context, then workload, then QPS, as the file orders them."""
        return iter(self._inside)

    def _judged(self, key: CellKey, cell: Cell | None, evidence: Evidence) -> Verdict:
        found = differences(cell)
        return judge(key, *found, self.weights, evidence) if found else no_evidence(key)

    def _averaged(self, mix: Mix) -> Verdict | None:
        log_ttft = log_tpot = most = 0.0
        largest = 0
        for number, share in mix.shares:
            ratios = self._ratios[number]
            if ratios is None:
                return None
            log_ttft += share * ratios[0]
            log_tpot += share * ratios[1]
            if share > most:
                largest, most = number, share
        if len(mix.shares) == 1:
            return (self._inside if mix.is_inside else self._outside)[largest]
        evidence = Evidence.INTERPOLATED if mix.is_inside else Evidence.EXTRAPOLATED
        d_ttft, d_tpot = -math.expm1(log_ttft), math.expm1(log_tpot)
        return judge(self._inside[largest].cell, d_ttft, d_tpot, self.weights, evidence)


def bundled() -> dict[str, Path]:
    return {path.stem: path for path in sorted(BUNDLED.glob("*.json"))}


def find(name: str) -> Path:
    known = bundled()
    if name in known:
        return known[name]
    with contextlib.suppress(OSError, ValueError):  # a name that no file can have
        if (path := Path(name)).is_file():
            return path
    raise ConfigError(f"table = {name!r}: must be {', '.join(known) or 'none'}, or the path of a file", param="table")


class _Header(msgspec.Struct):
    version: int
    kind: str


class _Format(msgspec.Struct):
    """Tells the prototype's files from the project's own, which always say their kind."""

    kind: str = ""
    base_config: str = ""

    @property
    def is_prototype(self) -> bool:
        return not self.kind and bool(self.base_config)


def _of_prototype(exported: PrototypeTable) -> DecisionTable:
    cells = exported.cells()
    return DecisionTable(
        version=VERSION,
        kind=KIND,
        name=f"prototype-{exported.base_config}",
        topology=exported.base_config,
        provenance=exported.provenance(),
        axes=axes_of(cells),
        cells=cells,
    )


def _key(cell: Cell) -> CellKey:
    return CellKey(cell.context, cell.workload, cell.qps)


def _log_ratios(cell: Cell | None) -> tuple[float, float] | None:
    if cell is None or cell.split is None or cell.local is None:
        return None
    split, local = cell.split, cell.local
    ttft = math.log(local.ttft_s.mean) - math.log(split.ttft_s.mean)
    return ttft, math.log(local.tpot_s.mean) - math.log(split.tpot_s.mean)


def _check_reasons(index: int, cell: Cell) -> None:
    failed = cell.failed or FailedArms()
    for arm, reason, measured in (("split", failed.split, cell.split), ("local", failed.local, cell.local)):
        if reason and measured is not None:
            raise FormatError(f"cells[{index}].failed.{arm}: the arm has measurements")


def _layout(value: Any, depth: int) -> str:
    is_rows = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    if not is_rows and not (isinstance(value, dict) and depth < 2):
        return json.dumps(value, ensure_ascii=False)
    pad, end = "  " * (depth + 1), "  " * depth
    if is_rows:
        rows = ",\n".join(pad + json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in value)
        return f"[\n{rows}\n{end}]"
    fields = ",\n".join(f"{pad}{json.dumps(name)}: {_layout(item, depth + 1)}" for name, item in value.items())
    return f"{{\n{fields}\n{end}}}"
