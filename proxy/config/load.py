"""Values from outside made into a config: a TOML file, flags, the environment, the admin API."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .keys import KEYS, LIVE, SECRET, ProxyConfig, all_of, broken_constraints, error_of, not_allowed


@dataclass(frozen=True, slots=True)
class Draft:
    """What a file and flags say."""

    config: ProxyConfig  # keys with an error have their default
    errors: tuple[ConfigError, ...]
    is_empty: bool  # the file, or there is none

    @classmethod
    def read(cls, path: Path | None, flags: Mapping[str, object]) -> Draft:
        """Flags win over the file, but what is wrong in the file is an error all the same."""
        errors: list[ConfigError] = []
        try:
            raw = _toml(path) if path else {}
        except ConfigError as exc:
            errors, raw = [exc], {}
        values = _taken(raw, errors) | _taken(flags, errors, is_text=True)
        values = {name: value for name, value in values.items() if name not in {exc.param for exc in errors}}
        wrong = {exc.param for exc in errors}
        broken = [constraint for constraint in broken_constraints(values) if wrong.isdisjoint(constraint.keys)]
        errors += [error_of(constraint, values) for constraint in broken]
        while broken := broken_constraints(values):
            values = {name: values[name] for name in values.keys() - {key for one in broken for key in one.keys}}
        return cls(ProxyConfig(**values), tuple(errors), not raw)

    def checked(self) -> ProxyConfig:
        """ConfigError tells all that is wrong."""
        if self.errors:
            raise all_of(self.errors)
        return self.config


def build(path: Path | None, flags: Mapping[str, object]) -> ProxyConfig:
    """flags: values, or the text of a command line. ConfigError tells all that is wrong."""
    return Draft.read(path, flags).checked()


def convert(raw: Mapping[str, object]) -> dict[str, Any]:
    """The values in their keys' own types; ConfigError tells all that is wrong."""
    errors: list[ConfigError] = []
    values = _taken(raw, errors)
    if errors:
        raise all_of(errors)
    return values


def _toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except (OSError, ValueError, RecursionError) as exc:  # ValueError: of the path, of UTF-8, of TOML
        what = f"a readable file ({exc.strerror})" if isinstance(exc, OSError) else f"TOML ({exc})"
        raise ConfigError(f"config = {str(path)!r}: must be {what}", param="config") from exc


def _taken(raw: Mapping[str, object], errors: list[ConfigError], *, is_text: bool = False) -> dict[str, Any]:
    """Appends to `errors` what can't be taken."""
    values = {}
    for name, value in raw.items():
        if (key := KEYS.get(name)) is None:
            errors.append(_unknown(name))
            continue
        try:
            values[name] = key.take(value, is_text=is_text)
        except ValueError:
            errors.append(not_allowed(key, value))
    return values


def _unknown(name: str) -> ConfigError:
    # The value is not shown: it may be a secret under a misspelt name.
    near = get_close_matches(name[:64], KEYS, 1)
    meant = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(KEYS)}"
    return ConfigError(f"{name[:64]}: no such key; {meant}", param=name[:64])


def secrets_in(environ: Mapping[str, str]) -> dict[str, object]:
    """Secrets from PPD_* variables, as flags; on a command line all users could read them."""
    names = {name: KEYS[name].variable for name in SECRET}
    return {name: environ[variable] for name, variable in names.items() if environ.get(variable)}


def with_changes(running: ProxyConfig, before: ProxyConfig, wanted: ProxyConfig) -> tuple[ProxyConfig, tuple[str, ...]]:
    """The running config with the live keys that `wanted` changes, and the changed keys that need a restart."""
    changed = [name for name in KEYS if getattr(wanted, name) != getattr(before, name)]
    live = {name: getattr(wanted, name) for name in changed if name in LIVE}
    return replace(running, **live), tuple(name for name in changed if name not in LIVE)
