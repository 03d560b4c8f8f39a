"""The records of a decision table's file: cells with their measured arms, the axes they lie on, and the provenance.

`table` reads, checks and scores them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Annotated, Literal

import msgspec

from ..errors import FormatError

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Tokens = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class Times(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """In seconds; None if the source did not record it. Only `mean` is always there, and decisions use only that."""

    mean: Positive
    p50: Positive | None
    p99: Positive | None
    std: NonNegative | None
    half_width: NonNegative | None = None  # of the mean's 95 % interval


class Ttft(Times, frozen=True):
    """Time to first token."""


class Tpot(Times, frozen=True):
    """Time per output token after the first."""


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to compute a cell's follow-up turns, as measured."""

    n: Tokens | None  # follow-up turns that finished, over which the statistics are; None: not recorded
    failures: Count | None  # requests of the runs, of any turn, that did not finish; not in the statistics
    ttft_s: Ttft
    tpot_s: Tpot


class FailedArms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Why an arm that was tried has no measurement; empty for an arm that has one or was never tried."""

    split: str = ""
    local: str = ""


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One discretised workload; an arm that is None is no evidence."""

    context: Name
    workload: Name
    qps: Positive
    split: Arm | None
    local: Arm | None
    failed: FailedArms | None = None


class ContextClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For cached tokens up to and including `max_tokens` that fit no smaller class; measured at `measured_tokens`."""

    name: Name
    max_tokens: Tokens
    measured_tokens: Tokens


class WorkloadType(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A follow-up turn that was measured."""

    name: Name
    new_tokens: Tokens
    output_tokens: Tokens


class Axes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    contexts: tuple[ContextClass, ...]
    workloads: tuple[WorkloadType, ...]
    qps: tuple[Positive, ...]
    qps_counts: Literal["conversations", "turns"]  # what arrives once per 1/qps seconds

    def check(self) -> None:
        for axis in ("contexts", "workloads", "qps"):
            if not getattr(self, axis):
                raise FormatError(f"axes.{axis}: must not be empty")
        check_distinct("axes.contexts: name", [c.name for c in self.contexts])
        check_distinct("axes.workloads: name", [w.name for w in self.workloads])
        check_distinct("axes.workloads: centre", [(w.new_tokens, w.output_tokens) for w in self.workloads])
        check_rising("axes.qps", self.qps)
        check_rising("axes.contexts: max_tokens", [c.max_tokens for c in self.contexts])
        lower = 0
        for context in self.contexts:
            if not lower < context.measured_tokens <= context.max_tokens:
                raise FormatError(
                    f"axes.contexts: measured_tokens of {context.name!r} must be in {lower + 1}..{context.max_tokens}"
                )
            lower = context.max_tokens


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the measurements come from."""

    model: str
    gpu: str
    gpu_count: Count
    engine: str
    engine_version: str
    connector: str
    date: str  # ISO 8601
    source: str
    seeds: tuple[int, ...]  # empty: not recorded
    note: str
    licence: str


def check_distinct(field: str, values: Sequence[Hashable]) -> None:
    seen: set[Hashable] = set()
    for value in values:
        if value in seen:
            raise FormatError(f"{field}: {value} occurs twice")
        seen.add(value)


def check_rising(field: str, values: Sequence[float]) -> None:
    if any(low >= high for low, high in pairwise(values)):
        raise FormatError(f"{field}: must be in increasing order")
