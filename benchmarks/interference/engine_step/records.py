"""The file that `measure` writes: the time of every repeat of each shape of step."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from ppd.offline.experiment import files
from ppd.offline.experiment.files import decode_rows

from .measure import KIND, VERSION
from .network import Attention

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
    attention: Attention = Attention.CUDNN
    compiled: bool = False
    kv_tokens: Tokens  # of KV that fit beside the weights
    started: str  # ISO 8601, UTC

    @property
    def kv_bytes_per_token(self) -> int:
        shape = self.shape
        return 2 * shape.layers * shape.kv_heads * shape.head_dim * self.value_bytes


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One shape of step; see `network.StepPoint`."""

    decode: Count
    context: Count
    prefill: Count
    cached: Count
    seconds: Times | None = None
    skipped: str = ""  # why there are no times

    @property
    def median_s(self) -> float | None:
        return None if self.seconds is None else statistics.median(self.seconds)


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
