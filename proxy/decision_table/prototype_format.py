"""Reads decision tables as the PPD paper's prototype exports them: means of both arms in ms, and its decisions.

Only the means are used. Such a file has no counts, spread or provenance, so they stay unrecorded. Its decisions and
scores are compared with the means, and the table's note says which contradict them. The published prototype names
context classes and workload types without defining them: the centres are those of its benchmark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Annotated, Any, Final, Literal

import msgspec

from ..errors import FormatError
from .format import (
    Arm,
    Axes,
    Cell,
    ContextClass,
    FailedArms,
    Name,
    NonNegative,
    Positive,
    Provenance,
    Tpot,
    Ttft,
    WorkloadType,
)
from .score import CellKey, Weights, differences

CONTEXTS: Final = (
    ContextClass(name="small", max_tokens=512, measured_tokens=256),  # after 128 -> 128
    ContextClass(name="large", max_tokens=4096, measured_tokens=2048),  # after 1024 -> 1024
    # Its engines held at most 8192 tokens, and its benchmark measured none of this class: the geometric mean.
    ContextClass(name="huge", max_tokens=8192, measured_tokens=5793),
)
WORKLOADS: Final = tuple(
    WorkloadType(name=name, new_tokens=new_tokens, output_tokens=output_tokens)
    for name, new_tokens, output_tokens in (
        ("tiny", 16, 32),
        ("short_gen", 32, 256),
        ("long_gen", 32, 512),
        ("very_long_gen", 64, 1024),
        ("small_bal", 64, 64),
        ("mid_bal", 128, 128),
        ("mid_paste", 256, 64),
        ("big_paste", 512, 64),
        ("huge_paste", 1024, 32),
    )
)
ROUNDING = 0.01  # the file's figures are rounded: a score nearer to 0 may have the other sign there
FAILED = "a figure of 0: the prototype's mark of a run that failed"


class PrototypeEntry(msgspec.Struct, frozen=True, kw_only=True):
    context_class: Literal["small", "large", "huge"]
    workload_type: Name
    qps: Positive
    use_ppd: bool
    pd_ttft_ms: NonNegative
    ppd_ttft_ms: NonNegative
    pd_tpot_ms: NonNegative
    ppd_tpot_ms: NonNegative

    @property
    def cell(self) -> Cell:
        split, local = _arm(self.pd_ttft_ms, self.pd_tpot_ms), _arm(self.ppd_ttft_ms, self.ppd_tpot_ms)
        failed = FailedArms(split="" if split else FAILED, local="" if local else FAILED)
        return Cell(
            context=self.context_class,
            workload=self.workload_type,
            qps=self.qps,
            split=split,
            local=local,
            failed=failed if failed != FailedArms() else None,
        )


class GivenWeights(msgspec.Struct, frozen=True, kw_only=True):
    w_ttft: NonNegative
    w_tpot: NonNegative


class PrototypeTable(msgspec.Struct, frozen=True, kw_only=True):
    """The file; its other fields are ignored."""

    base_config: Name
    ppd_config: Name
    weights: GivenWeights
    entries: Annotated[tuple[PrototypeEntry, ...], msgspec.Meta(min_length=1)]

    @staticmethod
    def decode(data: bytes) -> PrototypeTable:
        table = msgspec.json.decode(data, type=PrototypeTable)
        known = {workload.name for workload in WORKLOADS}
        for index, entry in enumerate(table.entries):
            if entry.workload_type not in known:
                raise FormatError(f"entries[{index}].workload_type: {entry.workload_type!r} is not the prototype's")
        return table

    def cells(self) -> tuple[Cell, ...]:
        """Without the class `huge` if it equals `large`: the prototype copies what it has not measured."""
        measured = tuple(entry.cell for entry in self.entries)
        large, huge = _figures(measured, "large"), _figures(measured, "huge")
        if large and huge and all(large.get(key) == arms for key, arms in huge.items()):
            return tuple(cell for cell in measured if cell.context != "huge")
        return measured

    def provenance(self) -> Provenance:
        return Provenance(
            model="",
            gpu="",
            gpu_count=0,
            engine="",
            engine_version="",
            connector="",
            date="",
            source="a table exported by the PPD paper's prototype",
            seeds=(),
            note=f"{self.base_config} against {self.ppd_config}; means only, without counts or spread. {self._note()}",
            licence="",
        )

    def _note(self) -> str:
        weights = Weights(self.weights.w_ttft, self.weights.w_tpot)
        wrong = [entry for entry in self.entries if _is_contradicted(entry, weights)]
        at = f"at w_ttft {weights.ttft:g}, w_tpot {weights.tpot:g}"
        if not wrong:
            return f"Its own decisions, {at}, are not used."
        first = CellKey(wrong[0].context_class, wrong[0].workload_type, wrong[0].qps)
        return (
            f"Its own decisions, {at}, are not used; {len(wrong)} of {len(self.entries)} contradict its figures, "
            f"{first} the first."
        )


def axes_of(cells: Sequence[Cell]) -> Axes:
    contexts, types = {cell.context for cell in cells}, {cell.workload for cell in cells}
    return Axes(
        contexts=tuple(context for context in CONTEXTS if context.name in contexts),
        workloads=tuple(workload for workload in WORKLOADS if workload.name in types),
        qps=tuple(sorted({cell.qps for cell in cells})),
        qps_counts="conversations",
    )


def _arm(ttft_ms: float, tpot_ms: float) -> Arm | None:
    if ttft_ms == 0 or tpot_ms == 0:
        return None
    ttft = Ttft(mean=_seconds(ttft_ms), p50=None, p99=None, std=None)
    return Arm(n=None, failures=None, ttft_s=ttft, tpot_s=Tpot(mean=_seconds(tpot_ms), p50=None, p99=None, std=None))


def _seconds(milliseconds: float) -> float:
    return float(Decimal(repr(milliseconds)).scaleb(-3))  # exact: 8.4 ms become 0.0084 s, as no division rounds


def _figures(cells: Iterable[Cell], context: str) -> dict[tuple[str, float], Any]:
    return {(cell.workload, cell.qps): (cell.split, cell.local) for cell in cells if cell.context == context}


def _is_contradicted(entry: PrototypeEntry, weights: Weights) -> bool:
    found = differences(entry.cell)
    score = weights.score(*found) if found else 0.0
    return abs(score) > ROUNDING and (score > 0) is not entry.use_ppd
