"""A sweep's axes, read from a TOML file: which runs there are, and how often each cell is measured.

Every combination of topology, x, workload and QPS is a cell. A cell gets `seeds` runs, then one more at a time, up to
`max_seeds`, until the mean TTFT of its later turns is known to `precision`. tables/README.md explains what comes of it.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from ppd.proxy.errors import ConfigError

from .runs import POISSON, Count, Name, Positive, Profile, Run, Seconds, Share, Tokens, Topology, Workload

GRIDS: Final = Path(__file__).parent / "grids"
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
HOW_OFTEN: Final = ("seeds", "max_seeds", "precision")  # may change while a sweep goes on: no run differs by them

T = TypeVar("T")


class Arms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A topology and the shares of LOCAL turns measured on it; none where it has no choice."""

    topology: Name
    x: tuple[Share, ...]


class Grid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The axes, checked; see `read` for what is not allowed."""

    arms: tuple[Arms, ...]
    first: tuple[Profile, ...]
    later: tuple[Profile, ...]
    qps: tuple[Positive, ...]  # conversations a second
    turns: tuple[AtLeastOne, ...] = (2,)
    think_s: tuple[Seconds, ...] = (0.0,)
    shared_prefix_tokens: tuple[Count, ...] = (0,)
    arrivals: str = POISSON  # or the path of a trace in one of the formats of `traces`
    seconds: Positive = 10.0
    conversations: AtLeastOne = 1  # measured in a run, at least
    warm_up_s: Seconds = 0.0
    seeds: AtLeastOne = 1  # runs a cell, at least
    max_seeds: AtLeastOne = 1
    precision: Share = 0.05  # half the 95 % interval over the mean; 0: every cell gets `max_seeds`

    def runs(self, seed: int) -> Iterator[Run]:
        """One run a cell. The arms of a decision come one after the other, so that an unfinished sweep has pairs."""
        for arms, workload, qps in product(self.arms, self.workloads(), self.qps):
            for x in arms.x or (None,):
                yield Run(
                    topology=arms.topology,
                    workload=workload,
                    qps=qps,
                    x=x,
                    seed=seed,
                    seconds=self.seconds,
                    conversations=self.conversations,
                    warm_up_s=self.warm_up_s,
                    arrivals=self.arrivals,
                )

    def workloads(self) -> Iterator[Workload]:
        for first, later, turns, think_s, shared in product(
            self.first, self.later, self.turns, self.think_s, self.shared_prefix_tokens
        ):
            yield Workload(first=first, later=later, turns=turns, think_s=think_s, shared_prefix_tokens=shared)

    def difference(self, other: Grid) -> str:
        """The first axis on which the two measure different things, and both its values; empty if there is none."""
        for name in self.__struct_fields__:
            mine, others = getattr(self, name), getattr(other, name)
            if name not in HOW_OFTEN and mine != others:
                return f"{_KEYS.get(name, name)}: {_shown(mine)} there, {_shown(others)} asked for"
        return ""


def bundled() -> dict[str, Path]:
    """The grids that ship with the project, by name."""
    return {path.stem: path for path in sorted(GRIDS.glob("*.toml"))}


def read(name: str) -> Grid:
    """A shipped grid by its name, or a file by its path. ConfigError: file, key, and what is allowed there."""
    path = bundled().get(name, Path(name))
    try:
        with path.open("rb") as file:
            return _grid(tomllib.load(file), path.absolute().parent)
    except OSError as exc:
        names = ", ".join(bundled())
        raise ConfigError(f"grid = {name!r}: must be {names}, or a readable TOML file ({exc.strerror})") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"{path}: must be TOML ({exc})") from exc
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc.message}") from exc


_KEYS: Final = {"arms": "topologies"}  # what a file calls a field
_LISTS: Final[dict[str, Any]] = {
    "qps": Positive,
    "turns": AtLeastOne,
    "think_s": Seconds,
    "shared_prefix_tokens": Count,
}
_VALUES: Final[dict[str, Any]] = {
    "arrivals": str,
    "seconds": Positive,
    "conversations": AtLeastOne,
    "warm_up_s": Seconds,
    "seeds": AtLeastOne,
    "max_seeds": AtLeastOne,
    "precision": Share,
}
_TABLES: Final = ("topologies", "first", "later")


class _Tokens(msgspec.Struct, forbid_unknown_fields=True):
    new_tokens: Tokens
    output_tokens: Tokens


def _grid(raw: dict[str, Any], folder: Path) -> Grid:
    """`folder`: where a relative path of arrivals begins."""
    known = (*_TABLES, *_LISTS, *_VALUES)
    for key in raw:
        if key not in known:
            raise ConfigError(f"{key}: no such key; known keys are {', '.join(known)}")
    for key in (*_TABLES, "qps"):
        if key not in raw:
            raise ConfigError(f"{key}: is missing")
    fields: dict[str, Any] = {key: _axis(key, raw[key], kind) for key, kind in _LISTS.items() if key in raw}
    fields |= {key: _value(key, raw[key], kind) for key, kind in _VALUES.items() if key in raw}
    fields["arms"] = _arms(_table("topologies", raw))
    fields |= {key: _profiles(key, _table(key, raw)) for key in ("first", "later")}
    fields.setdefault("max_seeds", fields.get("seeds", 1))
    if fields.get("arrivals", POISSON) != POISSON:
        fields["arrivals"] = str(folder / fields["arrivals"])
    grid = Grid(**fields)
    _check(grid)
    return grid


def _check(grid: Grid) -> None:
    if grid.max_seeds < grid.seeds:
        raise ConfigError(f"max_seeds = {grid.max_seeds}: must be at least seeds, {grid.seeds}")
    shortest, most = min(grid.first, key=lambda profile: profile.new_tokens), max(grid.shared_prefix_tokens)
    if most >= shortest.new_tokens:
        allowed = f"must be below the {shortest.new_tokens} new tokens of first.{shortest.name}"
        raise ConfigError(f"shared_prefix_tokens = {most}: {allowed}")
    for name, count in Counter(run.id for run in grid.runs(0)).items():
        if count > 1:
            raise ConfigError(f"two cells have the name {name.rpartition('-')[0]}: values too close, or names alike")


def _table(key: str, raw: dict[str, Any]) -> dict[str, Any]:
    entries = _value(key, raw[key], dict[str, Any])
    if not entries:
        raise ConfigError(f"{key}: must have at least one entry")
    return entries


def _axis(key: str, value: Any, kind: Any) -> tuple[Any, ...]:
    values = _value(key, value, tuple[kind, ...])
    if not values:
        raise ConfigError(f"{key}: must have at least one value")
    for index, item in enumerate(values):
        if item in values[:index]:
            raise ConfigError(f"{key}[{index}] = {item:g}: must be named once")
    return values


def _profiles(key: str, entries: dict[str, Any]) -> tuple[Profile, ...]:
    profiles = []
    for name, entry in entries.items():
        _value(f"{key}.{name}", name, Name)
        tokens = _value(f"{key}.{name}", entry, _Tokens)
        profiles.append(Profile(name=name, new_tokens=tokens.new_tokens, output_tokens=tokens.output_tokens))
    return tuple(profiles)


def _arms(entries: dict[str, Any]) -> tuple[Arms, ...]:
    arms = []
    for name, shares in entries.items():
        key = f"topologies.{name}"
        try:
            has_choice = Topology.parse(name).decodes > 0
        except ConfigError as exc:
            raise ConfigError(f"topologies: {exc.message}") from exc
        listed = _value(key, shares, tuple[float | str, ...])
        if has_choice != bool(listed):
            allowed = "a list of shares from 0 to 1" if has_choice else "[]: a fleet without D has no x"
            raise ConfigError(f"{key} = {_shown(listed)}: must be {allowed}")
        arms.append(
            Arms(topology=name, x=_axis(key, [_share(key, share) for share in listed], Share) if listed else ())
        )
    return tuple(arms)


def _share(key: str, value: float | str) -> float:
    """A number, or a fraction as text, which TOML has no other way to write exactly."""
    try:
        return float(Fraction(value))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise ConfigError(f'{key} = {value!r}: must be a share from 0 to 1, or a fraction such as "1/3"') from None


def _value(key: str, value: Any, kind: type[T]) -> T:
    try:
        converted: T = msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        what, _, place = str(exc).partition(" - at `$")
        raise ConfigError(f"{key}{place.rstrip('`')}: {what[0].lower()}{what[1:]}, got {_shown(value)}") from exc
    for number in converted if isinstance(converted, tuple) else (converted,):
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"{key}: must be finite, got {number}")
    return converted


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 100 else f"{text[:100]}..."
