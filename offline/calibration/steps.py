"""Engine steps that were measured by themselves, and how far a profile's law of steps is from them.

The file is what `python -m benchmarks.interference --torch` writes: the time of every repeat of each shape of step, of
a network without an engine around it. It tells what whole requests in a narrow range cannot: long contexts and long
prefills. Within that range, and in large batches, an engine adds work of its host to every sequence, which such steps
lack; so only what is larger is compared.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from ppd.proxy.errors import FormatError
from ppd.proxy.laws.profile_file import FittedRange, StepCheck
from ppd.proxy.laws.step_time import EngineProfile, attention_pairs, step_time_s

from ..experiment import files
from ..experiment.files import decode_rows
from ..experiment.statistics import percentile

# As `benchmarks/interference/engine_step/measure.py` writes them, which runs where this package is not installed.
KIND = "ppd-engine-steps"
VERSION = 1
STEPS = ".jsonl.gz"  # how the name of such a file ends

Count = Annotated[int, msgspec.Meta(ge=0)]
Tokens = Annotated[int, msgspec.Meta(ge=1)]
Times = Annotated[tuple[Annotated[float, msgspec.Meta(gt=0)], ...], msgspec.Meta(min_length=1)]


class ShapeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layers: Tokens
    hidden: Tokens
    heads: Tokens
    kv_heads: Tokens
    head_dim: Tokens
    mlp: Tokens
    vocabulary: Tokens


class StepsHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    kind: str
    name: str  # of the shapes
    shape: ShapeRecord
    device: str
    threads: Count  # of a CPU; 0 on a GPU
    memory_bytes: float  # of the GPU
    dtype: str
    value_bytes: Tokens
    torch: str
    cuda: str
    graphs: bool
    attention: str = ""  # whose kernels
    compiled: bool = False
    kv_tokens: Tokens  # of KV that fit beside the weights
    started: str  # ISO 8601, UTC

    @property
    def kv_bytes_per_token(self) -> int:
        shape = self.shape
        return 2 * shape.layers * shape.kv_heads * shape.head_dim * self.value_bytes


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One shape of step: sequences that decode, all with the same context, and a chunk of one prompt."""

    decode: Count  # sequences
    context: Count  # tokens of each one's, with the one that is computed
    prefill: Count  # tokens of the chunk
    cached: Count  # before it
    seconds: Times | None = None
    skipped: str = ""  # why there are no times

    @property
    def median_s(self) -> float | None:
        return None if self.seconds is None else statistics.median(self.seconds)

    @property
    def longest(self) -> int:
        """The most tokens that one sequence has."""
        return max(self.context, self.prefill + self.cached)

    @property
    def load(self) -> tuple[int, int, int, int]:
        """The arguments of `step_time_s` after the profile."""
        pairs = attention_pairs(self.prefill, self.cached) if self.prefill else 0
        return self.decode, self.decode * self.context, self.prefill, pairs


class CopyRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    copy: str
    bytes: Tokens
    seconds: Times

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / statistics.median(self.seconds)


class _Kind(msgspec.Struct):
    copy: str | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    head: StepsHead
    steps: tuple[StepRecord, ...]
    copies: tuple[CopyRecord, ...]


def larger(steps: Steps, seen: FittedRange | None, name: str) -> Steps:
    """Those that were measured and are larger than what a fit saw; all that were measured, where it states no range.

    name: of the file. FormatError if there are none.
    """
    measured = tuple(step for step in steps.steps if step.seconds is not None and _is_larger(step, seen))
    if not measured:
        raise FormatError(f"{name}: holds no measured step that is larger than what the profile was fitted to")
    return replace(steps, steps=measured)


def check(costs: EngineProfile, steps: Steps, seen: FittedRange | None, name: str) -> StepCheck:
    """How far the law is from them, all of which were measured. name: of the file."""
    times = [(step, step.median_s) for step in steps.steps if step.median_s is not None]
    errors = [step_time_s(costs, *step.load) / median_s - 1 for step, median_s in times]
    sizes = [abs(error) for error in errors]
    # A longer prompt takes several steps. Small chunks after a long context tell nothing of it.
    chunk = seen.new_tokens if seen is not None else 0
    return StepCheck(
        source=name,
        gpu=steps.head.device,
        steps=len(errors),
        context_tokens=max(step.longest for step in steps.steps),
        new_tokens=max((step.prefill + step.cached for step in steps.steps if step.prefill > chunk), default=0),
        error_median=round(statistics.median(sizes), 4),
        error_p90=round(percentile(sizes, 0.9), 4),
        bias=round(statistics.median(errors), 4),
    )


def _is_larger(step: StepRecord, seen: FittedRange | None) -> bool:
    return seen is None or step.longest > seen.context_tokens or step.prefill > seen.new_tokens


def decode(data: bytes) -> Steps:
    head, rows = decode_rows(data, StepsHead, _row, kind=KIND, version=VERSION)
    return Steps(
        head,
        tuple(row for row in rows if isinstance(row, StepRecord)),
        tuple(row for row in rows if isinstance(row, CopyRecord)),
    )


def load(path: Path) -> Steps:
    return files.load(path, decode)


def _row(data: bytes) -> StepRecord | CopyRecord:
    if msgspec.json.decode(data, type=_Kind).copy is not None:
        return msgspec.json.decode(data, type=CopyRecord)
    return msgspec.json.decode(data, type=StepRecord)
