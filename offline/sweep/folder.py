"""A sweep on disk: what is swept, its runs, and what was made of them.

    DIR/sweep.json               the grid, and where it is measured
    DIR/runs/<run.id>.jsonl.gz   one run each, see `records`
    DIR/tables/  DIR/report/     made from the runs, and can be made again at any time

One folder holds one grid, measured in one way: figures of two engines must not end up in one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Final, Self

import msgspec

from ppd.proxy.errors import ConfigError, FormatError

from ..experiment import records
from ..experiment.files import UNREADABLE, write_whole
from ..experiment.records import Origin, RunResult
from ..experiment.run import Run
from .grid import HOW_OFTEN, Grid

VERSION: Final = 1
KIND: Final = "ppd-sweep"
SUFFIX: Final = ".jsonl.gz"
MAY_DIFFER: Final = ("gpu_count", "note")  # between the runs of one sweep: a larger topology has more GPUs


class How(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What figures depend on beside the grid and the origin; empty where it does not apply."""

    gpus_per_worker: str = ""
    engine_args: str = ""
    api: str = ""
    tokenizer_sha256: str = ""
    profile_sha256: str = ""  # of a simulated engine's profile
    arrivals_sha256: str = ""  # of a trace's arrival times


class Sweep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of sweep.json."""

    version: int
    kind: str
    ppd: str  # the version that began it
    started: str  # ISO 8601, UTC
    grid: Grid
    origin: Origin  # what is unknown at the start is filled in by the first runs
    how: How = How()


_PLAIN: Final = How()


class _Header(msgspec.Struct):
    version: int
    kind: str


class SweepFolder:
    """An existing sweep; FormatError where there is none. `create` begins one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sweep = _read(path)

    @classmethod
    def create(cls, path: Path, grid: Grid, origin: Origin, started: str, how: How = _PLAIN) -> Self:
        """ConfigError if there is a sweep already; FormatError if nothing can be written there."""
        if _document(path).exists():
            raise ConfigError(f"{path}: holds a sweep already; --resume goes on with it")
        begun = Sweep(
            version=VERSION, kind=KIND, ppd=version("ppd-router"), started=started, grid=grid, origin=origin, how=how
        )
        _write(path, begun)
        return cls(path)

    @property
    def tables(self) -> Path:
        return self.path / "tables"

    @property
    def report(self) -> Path:
        return self.path / "report"

    def take_up(self, grid: Grid, origin: Origin, how: How = _PLAIN) -> None:
        """Goes on with the sweep. ConfigError, in one line, where grid, origin or how differ from the folder's.

        How often cells are measured may change; the folder then keeps the new numbers.
        """
        self.check(grid, how)
        self._check(origin)
        if any(getattr(self.sweep.grid, name) != getattr(grid, name) for name in HOW_OFTEN):
            self._change(grid=grid)

    def check(self, grid: Grid, how: How) -> None:
        """ConfigError, in one line, where the folder holds another grid or was measured in another way."""
        if difference := self.sweep.grid.difference(grid):
            raise ConfigError(f"{self.path}: holds another grid: {difference}")
        for name in How.__struct_fields__:
            here, there = getattr(how, name), getattr(self.sweep.how, name)
            if here != there:
                file, is_digest, _ = name.partition("_sha256")
                what = f"another {file} now" if is_digest else f"{name} {there!r} there, {here!r} now"
                raise ConfigError(f"{self.path}: its runs were measured in another way: {what}")

    def path_of(self, run: Run) -> Path:
        return self.path / "runs" / f"{run.id}{SUFFIX}"

    def save(self, result: RunResult) -> None:
        """On disk when this returns. ConfigError if it was measured elsewhere than the other runs."""
        self._check(result.origin)
        if any(not getattr(self.sweep.origin, name) and getattr(result.origin, name) for name in _IDENTITY):
            self._change(origin=result.origin)
        records.save(self.path_of(result.run), result)

    def results(self) -> Iterator[RunResult]:
        """By path. FormatError names a file that is damaged or of another version."""
        for path in self._files():
            yield self._load(path)

    def readable(self, unreadable: Callable[[Path, str], None]) -> Iterator[RunResult]:
        for path in self._files():
            try:
                yield self._load(path)
            except FormatError as exc:
                unreadable(path, exc.message)

    def set_aside(self, path: Path) -> Path:
        return path.replace(path.with_name(f"{path.name}.damaged"))

    def _files(self) -> list[Path]:
        return sorted((self.path / "runs").rglob(f"*{SUFFIX}"))

    def _load(self, path: Path) -> RunResult:
        result = records.load(path)
        if self.path_of(result.run) != path:
            raise FormatError(f"{path}: holds another run, {result.run.id}")
        return result

    def _check(self, origin: Origin) -> None:
        for name in _IDENTITY:
            here, there = getattr(origin, name), getattr(self.sweep.origin, name)
            if here and there and here != there:
                raise ConfigError(
                    f"{self.path}: its runs were measured elsewhere: {name} {there!r} there, {here!r} now"
                )

    def _change(self, **changes: Grid | Origin) -> None:
        sweep = msgspec.structs.replace(self.sweep, **changes)
        _write(self.path, sweep)
        self.sweep = sweep


_IDENTITY: Final = tuple(name for name in Origin.__struct_fields__ if name not in MAY_DIFFER)


def _document(path: Path) -> Path:
    return path / "sweep.json"


def _write(path: Path, sweep: Sweep) -> None:
    write_whole(_document(path), msgspec.json.format(msgspec.json.encode(sweep), indent=2) + b"\n")


def _read(path: Path) -> Sweep:
    document = _document(path)
    try:
        data = document.read_bytes()
        header = msgspec.json.decode(data, type=_Header)
        if header.kind != KIND:
            raise FormatError(f"{document}: kind: must be {KIND!r}, got {header.kind!r}")
        if header.version != VERSION:
            raise FormatError(f"{document}: version: must be {VERSION}, got {header.version}")
        return msgspec.json.decode(data, type=Sweep)
    except FileNotFoundError as exc:
        raise FormatError(f"{path}: must be a sweep's folder: it has no sweep.json") from exc
    except OSError as exc:
        raise FormatError(f"{document}: {exc.strerror}") from exc
    except UNREADABLE as exc:
        raise FormatError(f"{document}: {exc}") from exc
