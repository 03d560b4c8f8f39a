"""Grids as TOML files, read strictly: a mistake is an error of one line that names the file and the key."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from ppd.proxy.errors import ConfigError
from ppd.servers.fleet.topology import Topology

from ..experiment.run import POISSON, Count, Name, Positive, Profile, Seconds, Share, Tokens
from .grid import Arms, AtLeastOne, Grid, shown

GRIDS: Final = Path(__file__).parent / "grids"

T = TypeVar("T")


def bundled() -> dict[str, Path]:
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


_LISTS: Final[dict[str, Any]] = {
    "qps": Positive,
    "turns": AtLeastOne,
    "think_s": Seconds,
    "shared_prefix_tokens": Count,
    "image_every": Count,
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
    """`folder`: relative paths of arrivals start there."""
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
    named: dict[tuple[int, int], str] = {}
    for later in grid.later:
        if (other := named.setdefault((later.new_tokens, later.output_tokens), later.name)) != later.name:
            raise ConfigError(
                f"later.{later.name}: has the tokens of later.{other}, and a table has one place for both"
            )
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
            has_choice = Topology.parse(name).has_choice
        except ConfigError as exc:
            raise ConfigError(f"topologies: {exc.message}") from exc
        listed = _value(key, shares, tuple[float | str, ...])
        if has_choice != bool(listed):
            allowed = "a list of shares from 0 to 1" if has_choice else "[]: a fleet without D, or with pD, has no x"
            raise ConfigError(f"{key} = {shown(listed)}: must be {allowed}")
        arms.append(
            Arms(topology=name, x=_axis(key, [_share(key, share) for share in listed], Share) if listed else ())
        )
    return tuple(arms)


def _share(key: str, value: float | str) -> float:
    # TOML can write 1/3 exactly only as text.
    try:
        return float(Fraction(value))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise ConfigError(f'{key} = {value!r}: must be a share from 0 to 1, or a fraction such as "1/3"') from None


def _value(key: str, value: Any, kind: type[T]) -> T:
    try:
        converted: T = msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        what, _, place = str(exc).partition(" - at `$")
        raise ConfigError(f"{key}{place.rstrip('`')}: {what[0].lower()}{what[1:]}, got {shown(value)}") from exc
    for number in converted if isinstance(converted, tuple) else (converted,):
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"{key}: must be finite, got {number}")
    return converted
