"""Engine profiles as files: what work costs on one engine, how much KV it holds, and how those figures were come by.

A profile is JSON, one engine a file, read strictly: a field that is missing, unknown or out of range is a FormatError
that names it. `find` takes a shipped profile's name or a path. The format is described in tables/profiles/README.md.
"""

from __future__ import annotations

from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from ppd.proxy.errors import ConfigError, FormatError

from .step_time import EngineProfile

VERSION: Final = 1
KIND: Final = "ppd-engine-profile"
BUNDLED = Path(__file__).parents[2] / "tables" / "profiles"

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]+\Z", max_length=100)]
Tokens = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
RelativeError = Annotated[float, msgspec.Meta(ge=0)]


class Status(StrEnum):
    """How far a profile's figures can be trusted."""

    MEASURED = "measured"  # each cost by itself, on the hardware it names
    FITTED = "fitted"  # all costs together, to whole requests measured on that hardware
    MODELLED = "modelled"  # computed from data sheets; nothing was run


class Transfers(StrEnum):
    """What a handoff moves."""

    MISSING = "missing"  # only the blocks that D lacks, as NIXL does
    WHOLE = "whole"  # the whole prompt each turn, as P2pNccl does


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How far the fitted profile is from one configuration's measurements: absolute errors of means, as shares."""

    config: str
    cells: Tokens
    ttft_error_median: RelativeError
    tpot_error_median: RelativeError
    ttft_error_p90: RelativeError | None = None
    tpot_error_p90: RelativeError | None = None
    note: str = ""


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a fitted profile was made from, and how good it is; a configuration in both lists tests nothing new."""

    fitted_on: tuple[str, ...]
    checked_on: tuple[Check, ...]
    command: str  # that makes the profile again


class ProfileFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: tensor-parallel GPUs that serve one model."""

    version: Literal[1] = VERSION
    kind: Literal["ppd-engine-profile"] = KIND
    name: Name
    status: Status
    model: str
    gpu: str
    gpu_count: Tokens  # that share one engine, tensor parallel
    engine: str
    source: str  # of the measurements, or of the figures that it was computed from
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

    def to_engine(self) -> EngineProfile:
        return self.costs


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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
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
    """The profiles that ship with the project, by name."""
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def find(name: str, folder: Path = BUNDLED) -> ProfileFile:
    """A shipped profile by its name, or one by its file's path; ConfigError lists the names."""
    known = bundled(folder)
    if path := known.get(name):
        return load(path)
    if Path(name).is_file():
        return load(Path(name))
    raise ConfigError(
        f"profile = {name!r}: must be {', '.join(known) or 'none'}, or the path of a profile file", param="profile"
    )


def _check_names(costs: dict[str, msgspec.Raw]) -> None:
    """A cost that is left out would silently be the default engine's, and an unknown one ignored."""
    expected = {field.name for field in fields(EngineProfile)}
    for name in sorted(expected - set(costs)):
        raise FormatError(f"costs.{name}: is missing")
    for name in sorted(set(costs) - expected):
        raise FormatError(f"costs.{name}: is unknown; the costs are {', '.join(sorted(expected))}")
