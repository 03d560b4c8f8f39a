"""Engine profiles as files: what work costs on one engine, how much KV it holds, and where these figures come from.

A profile is a JSON file of one engine. It is read strictly: a missing or unknown field, or one out of range, is a
FormatError that names it. `find` takes a bundled profile's name or a path. The format is described in
tables/profiles/README.md.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from ..errors import UNREADABLE, ConfigError, FormatError
from .accuracy import STALE
from .step_time import EngineProfile

VERSION: Final = 1
# 0 in files that do not name them
LATER_COSTS: Final = {"first_sequence_s", "mean_context_token_s", "connector_s", "long_prefill_tokens"}
KIND: Final = "ppd-engine-profile"
BUNDLED = Path(__file__).parents[2] / "tables" / "profiles"

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]+\Z", max_length=100)]
Tokens = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
RelativeError = Annotated[float, msgspec.Meta(ge=0)]


class Status(StrEnum):
    """How far a profile's figures can be trusted."""

    MEASURED = "measured"  # each cost separately, on the hardware that it names
    FITTED = "fitted"  # all costs together, to measurements on that hardware, by a search or by hand
    MODELLED = "modelled"  # computed from data sheets; nothing was run


class Transfers(StrEnum):
    """What a handoff transfers."""

    MISSING = "missing"  # only the blocks that D lacks, as NIXL does
    WHOLE = "whole"  # the whole prompt each turn, as P2pNccl does


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A fitted profile against one configuration's measurements: absolute relative errors of the means."""

    config: str
    cells: Tokens
    ttft_error_median: RelativeError
    tpot_error_median: RelativeError
    ttft_error_p90: RelativeError | None = None
    tpot_error_p90: RelativeError | None = None
    note: str = ""


class FittedRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest that the fit saw."""

    context_tokens: Tokens  # prompt and answer
    new_tokens: Tokens  # of a turn
    qps: Annotated[float, msgspec.Meta(gt=0)]  # conversations a second


class SlowWorker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker of a measured fleet that was slower than its likes: what it pays on top of each of these costs."""

    topology: str
    worker: str
    request_s: float
    prefill_token_s: float
    context_token_s: float
    mean_context_token_s: float

    def costs(self, usual: EngineProfile) -> EngineProfile:
        return replace(
            usual,
            request_s=usual.request_s + self.request_s,
            prefill_token_s=usual.prefill_token_s + self.prefill_token_s,
            context_token_s=usual.context_token_s + self.context_token_s,
            mean_context_token_s=usual.mean_context_token_s + self.mean_context_token_s,
        )


class RankCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a fitted profile ranks all configurations of its source, by one figure."""

    figure: str
    points: Tokens
    farthest_share: RelativeError  # largest difference between the measured and the simulated share of points won
    pairs: Count  # measured more than 5 % apart
    pairs_right: RelativeError  # share of them in the measured order


class StepCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fitted profile's law of steps against steps that were measured by themselves, larger than what the fit saw."""

    source: str  # file
    gpu: str
    steps: Tokens  # that were compared
    context_tokens: Tokens  # the longest
    new_tokens: Count  # of a prompt, which takes several steps; 0: none was measured
    error_median: RelativeError  # of their sizes
    error_p90: RelativeError
    bias: float  # median, with its sign: above 0 if the law is slower

    @property
    def holds(self) -> bool:
        """Whether the law is near most of them: as near as one that is not stale is to turns."""
        return self.error_p90 <= STALE


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a fitted profile was made from, and how good it is. A configuration in both lists tests nothing new."""

    fitted_on: tuple[str, ...]
    checked_on: tuple[Check, ...]
    command: str  # makes the profile again
    range: FittedRange | None = None
    steps: StepCheck | None = None
    ranking: tuple[RankCheck, ...] = ()
    slow_worker: SlowWorker | None = None  # a fact about the measurements, which no simulation of other fleets uses

    @property
    def reach(self) -> FittedRange | None:
        """What the fit saw, or its law of steps was found right up to; beyond that, the profile is a guess."""
        if self.range is None or self.steps is None or not self.steps.holds:
            return self.range
        return FittedRange(
            context_tokens=max(self.range.context_tokens, self.steps.context_tokens),
            new_tokens=max(self.range.new_tokens, self.steps.new_tokens),
            qps=self.range.qps,
        )


class ProfileFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one engine: one model on `gpu_count` tensor-parallel GPUs."""

    version: Literal[1] = VERSION
    kind: Literal["ppd-engine-profile"] = KIND
    name: Name
    status: Status
    model: str
    gpu: str
    gpu_count: Tokens  # that share one engine, tensor parallel
    engine: str
    source: str  # of the measurements, or of the figures for a modelled profile
    note: str
    licence: str
    costs: EngineProfile
    kv_capacity_tokens: Tokens
    block_size: Tokens = 16  # tokens per KV block
    max_num_seqs: Tokens = 256
    transfers: Transfers
    network: str  # between engines
    fit: Fit | None = None

    def __post_init__(self) -> None:
        if self.kv_capacity_tokens < self.block_size:
            raise ValueError(f"kv_capacity_tokens must hold a block of {self.block_size} tokens")

    @property
    def num_blocks(self) -> int:
        return self.kv_capacity_tokens // self.block_size

    @property
    def reach(self) -> FittedRange | None:
        """None: it states none."""
        return self.fit.reach if self.fit is not None else None

    def beyond(self, context_tokens: int) -> str:
        """Why results with contexts of so many tokens are a guess; empty where they are not."""
        reach = self.reach
        if reach is None or context_tokens <= reach.context_tokens:
            return ""
        how = "checked" if self.fit is not None and reach != self.fit.range else "fitted"
        return (
            f"contexts of {context_tokens:,} tokens are a guess: {self.name} was {how} up to {reach.context_tokens:,}"
        )


class _Head(msgspec.Struct):
    """Read first, so that another version is not reported as a wrong field."""

    version: int
    kind: str


class _Costs(msgspec.Struct):
    costs: dict[str, msgspec.Raw]


def encode(profile: ProfileFile) -> bytes:
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"


def decode(data: bytes) -> ProfileFile:
    """FormatError names the field that is missing, unknown, out of range or of another version."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.kind != KIND:
            raise FormatError(f"kind: must be {KIND!r}, got {head.kind!r}")
        if head.version != VERSION:
            raise FormatError(f"version: must be {VERSION}, got {head.version}")
        _check_names(msgspec.json.decode(data, type=_Costs).costs)
        return msgspec.json.decode(data, type=ProfileFile)
    except UNREADABLE as exc:
        raise FormatError(f"engine profile: {exc}") from exc
    except ConfigError as exc:
        raise FormatError(f"engine profile: costs: {exc.message}") from exc


def load(path: Path) -> ProfileFile:
    try:
        return decode(path.read_bytes())
    except OSError as exc:
        raise FormatError(f"{path}: {exc.strerror}") from exc
    except FormatError as exc:
        raise FormatError(f"{path}: {exc.message}") from exc


def bundled(folder: Path = BUNDLED) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def find(name: str, folder: Path = BUNDLED) -> ProfileFile:
    """`name`: of a bundled profile, or a file's path; ConfigError lists the names."""
    known = bundled(folder)
    if path := known.get(name):
        return load(path)
    if os.path.isfile(name):  # noqa: PTH113, as Path's raises for a name that no file can have
        return load(Path(name))
    raise ConfigError(
        f"profile = {name!r}: must be {', '.join(known) or 'none'}, or the path of a profile file", param="profile"
    )


def with_cap(profile: ProfileFile, long_prefill_tokens: int) -> ProfileFile:
    """Of engines that are started with `--long-prefill-token-threshold`, unless the profile says so itself."""
    if profile.costs.long_prefill_tokens or not long_prefill_tokens:
        return profile
    return msgspec.structs.replace(profile, costs=replace(profile.costs, long_prefill_tokens=long_prefill_tokens))


def _check_names(costs: dict[str, msgspec.Raw]) -> None:
    # Without this check a missing cost would take the default engine's value, and an unknown one be ignored.
    expected = {field.name for field in fields(EngineProfile)}
    for name in sorted(expected - set(costs) - LATER_COSTS):
        raise FormatError(f"costs.{name}: is missing")
    for name in sorted(set(costs) - expected):
        raise FormatError(f"costs.{name}: is unknown; the costs are {', '.join(sorted(expected))}")
