"""How fast a turn is to be: its targets, and who may set which of them.

What is said of one turn counts in this order, each target by itself: the request, its key, its class, the config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import erfc, log, sqrt
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ..config import ProxyConfig, all_of, refused
from ..errors import ConfigError

MOST: Final[Mapping[str, float]] = {"ttft": 3600.0, "ttft_factor": 1000.0, "tpot": 60.0}
TEXT_LIMIT = 200  # characters
ALLOWED_TARGETS = (
    "like ttft=0.5,tpot=0.03: one or more of ttft (in seconds, above 0 to 3600), ttft_factor (above 0 to 1000) and "
    "tpot (in seconds, above 0 to 60), each once, as plain decimal numbers"
)
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_PRIORITY = re.compile(r"-?[0-9]{1,4}")
_LARGEST_PRIORITY = 1000
_ROOT_2 = sqrt(2.0)


def miss(value: float, limit: float, spread: float) -> float:
    """Chance that a figure predicted as `value` is above the limit. spread: of the error's logarithm."""
    if limit <= 0.0:
        return 1.0
    return 0.5 * erfc(log(limit / value if value > 1e-9 else limit / 1e-9) / (spread * _ROOT_2))


class SloTargets(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT may be `ttft_s`, or `ttft_factor` times what it takes on an idle engine, whichever is more."""

    ttft_s: Annotated[float, Meta(gt=0, le=MOST["ttft"])] = 0.25
    ttft_factor: Annotated[float, Meta(gt=0, le=MOST["ttft_factor"])] = 3.0
    tpot_s: Annotated[float, Meta(gt=0, le=MOST["tpot"])] = 0.025  # the mean of the turn

    def ttft_limit_s(self, idle_s: float) -> float:
        """idle_s: the turn's TTFT on an idle engine."""
        scaled_s = self.ttft_factor * idle_s
        return self.ttft_s if self.ttft_s > scaled_s else scaled_s  # not `max`, as each decision asks for several


USUAL = SloTargets()


class GivenTargets(msgspec.Struct, frozen=True, kw_only=True):
    """Those that somebody has set; None: left to others."""

    ttft: float | None = None
    ttft_factor: float | None = None
    tpot: float | None = None

    def over(self, others: SloTargets) -> SloTargets:
        return SloTargets(
            ttft_s=others.ttft_s if self.ttft is None else self.ttft,
            ttft_factor=others.ttft_factor if self.ttft_factor is None else self.ttft_factor,
            tpot_s=others.tpot_s if self.tpot is None else self.tpot,
        )

    def __str__(self) -> str:
        values = msgspec.structs.asdict(self).items()
        return ",".join(f"{name}={_plain(value)}" for name, value in values if value is not None)


class TargetRules(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's: the usual ones, and those of classes."""

    usual: SloTargets = USUAL
    by_priority: tuple[tuple[int, SloTargets], ...] = ()  # from each priority on; the largest first

    def of(self, priority: int, key: GivenTargets | None = None, request: GivenTargets | None = None) -> SloTargets:
        targets = self.usual
        for least, theirs in self.by_priority:
            if priority >= least:
                targets = theirs
                break
        for given in (key, request):
            if given is not None:
                targets = given.over(targets)
        return targets


def given_targets(text: str) -> GivenTargets:
    """From "ttft=0.5,tpot=0.03"; ValueError for anything but ALLOWED_TARGETS."""
    values = plain_numbers(text, MOST)
    if not all(values.values()):
        raise ValueError(text)
    return GivenTargets(**values)


def plain_numbers(text: str, most: Mapping[str, float]) -> dict[str, float]:
    """From "name=0.5,other=3", at least one of those in `most`, each from 0 to what it says; else ValueError."""
    values = dict[str, float]()
    for part in text[: TEXT_LIMIT + 1].split(","):
        name, _, number = part.strip(" \t").partition("=")
        if name not in most or name in values or not _NUMBER.fullmatch(number) or len(text) > TEXT_LIMIT:
            raise ValueError(name)
        values[name] = float(number)
        if values[name] > most[name]:
            raise ValueError(name)
    return values


def target_rules(config: ProxyConfig) -> TargetRules:
    """ConfigError tells each entry that is misspelt, or named twice."""
    usual = SloTargets(ttft_s=config.slo_ttft_s, ttft_factor=config.slo_ttft_factor, tpot_s=config.slo_tpot_s)
    classes, errors = dict[int, SloTargets](), list[ConfigError]()
    for entry in config.slo_by_priority:
        try:
            least, given = _class_targets(entry)
        except ValueError:
            errors.append(refused("slo_by_priority", entry, f"PRIORITY:TARGETS, with TARGETS {ALLOWED_TARGETS}"))
            continue
        if least in classes:
            errors.append(refused("slo_by_priority", entry, "of a priority that is named once"))
        classes[least] = given.over(usual)
    if errors:
        raise all_of(errors)
    return TargetRules(usual=usual, by_priority=tuple(sorted(classes.items(), reverse=True)))


def _class_targets(entry: str) -> tuple[int, GivenTargets]:
    priority, _, targets = entry.partition(":")
    if not _PRIORITY.fullmatch(priority) or abs(int(priority)) > _LARGEST_PRIORITY:
        raise ValueError(entry)
    return int(priority), given_targets(targets)


def _plain(number: float) -> str:
    """As `given_targets` reads it: never with an exponent."""
    return f"{number:.9f}".rstrip("0").rstrip(".")
