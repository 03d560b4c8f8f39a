"""Scores a cell: what LOCAL gains and loses against SPLIT, and the verdict under the operator's weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from ..config import ProxyConfig, all_of, refused
from ..errors import ConfigError
from ..laws.targets import plain_numbers
from .format import Cell


@dataclass(frozen=True, slots=True)
class Weights:
    """The operator's weights, of which one is above 0; only their ratio matters."""

    ttft: float = 1.0
    tpot: float = 1.0

    def __post_init__(self) -> None:
        for key, value in (("w_ttft", self.ttft), ("w_tpot", self.tpot)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{key}: must be a finite number of at least 0, got {value}", param=key)
        if not (self.ttft or self.tpot):  # all ways would be equally good
            raise refused("w_ttft", self.ttft, "above 0 where w_tpot is 0")

    def score(self, d_ttft: float, d_tpot: float) -> float:
        """What LOCAL gains over SPLIT: relative TTFT saved minus relative TPOT lost, each with its weight."""
        return self.ttft * d_ttft - self.tpot * d_tpot


LARGEST_WEIGHT = 1e6
MOST_WEIGHTS: Final[Mapping[str, float]] = {"w_ttft": LARGEST_WEIGHT, "w_tpot": LARGEST_WEIGHT}
ALLOWED_WEIGHTS = (
    "MODEL:w_ttft=1,w_tpot=3, with one of the two at least, each from 0 to 1000000 as a plain number, not both 0"
)


class TurnWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Those that somebody has set; None: left to others. They are not both 0."""

    w_ttft: float | None = None
    w_tpot: float | None = None

    def over(self, others: Weights) -> Weights:
        """Who sets one to 0 means that only the other counts, also where that is 0 for others."""
        ttft = others.ttft if self.w_ttft is None else self.w_ttft
        tpot = others.tpot if self.w_tpot is None else self.w_tpot
        if ttft or tpot:
            return Weights(ttft, tpot)
        return Weights(float(self.w_ttft is None), float(self.w_tpot is None))


NO_WEIGHTS = TurnWeights(w_ttft=0.0, w_tpot=0.0)  # no way is better than another: refused where it is set


class WeightRules(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's: the usual weights, and those of models by name. A key's own count before both."""

    usual: Weights = Weights()
    by_model: Mapping[str, Weights] = {}

    def of(self, model: str, key: TurnWeights | None = None) -> Weights | None:
        """None where the usual ones count."""
        if key is None:
            return self.by_model.get(model)
        return key.over(self.by_model.get(model, self.usual))


def weight_rules(config: ProxyConfig) -> WeightRules:
    """ConfigError tells each entry that is misspelt, or named twice."""
    usual = Weights(config.w_ttft, config.w_tpot)
    models, errors = dict[str, Weights](), list[ConfigError]()
    for entry in config.weights_by_model:
        model, _, weights = entry.rpartition(":")
        try:
            given = TurnWeights(**plain_numbers(weights, MOST_WEIGHTS))
        except ValueError:
            given = None
        if not model or given is None or given == NO_WEIGHTS:
            errors.append(refused("weights_by_model", entry, ALLOWED_WEIGHTS))
        elif model in models:
            errors.append(refused("weights_by_model", entry, "of a model that is named once"))
        else:
            models[model] = given.over(usual)
    if errors:
        raise all_of(errors)
    return WeightRules(usual=usual, by_model=models)


class Evidence(StrEnum):
    """How a turn relates to what was measured."""

    INSIDE = "inside"  # one measured cell stands for it
    INTERPOLATED = "interpolated"  # it lies between measured cells, and the verdict is computed from them
    EXTRAPOLATED = "extrapolated"  # beyond an axis, or beside a cell without evidence: the nearest one's verdict
    NONE = "none"  # the cell that would decide lacks an arm


@dataclass(frozen=True, slots=True)
class CellKey:
    context: str
    workload: str
    qps: float

    def __str__(self) -> str:
        return f"{self.context}/{self.workload}/{self.qps:g}"


class Verdict(msgspec.Struct, frozen=True):
    """What is known of a turn under some weights; without evidence `local` and the three numbers are None."""

    local: bool | None
    score: float | None
    d_ttft: float | None  # (split - local) / split, of mean TTFT: the share of it that LOCAL saves
    d_tpot: float | None  # (local - split) / split, of mean TPOT: the share that LOCAL adds
    cell: CellKey  # that decided; of several, the one with the largest share
    evidence: Evidence


def judge(cell: CellKey, d_ttft: float, d_tpot: float, weights: Weights, evidence: Evidence) -> Verdict:
    score = weights.score(d_ttft, d_tpot)
    return Verdict(score > 0, score, d_ttft, d_tpot, cell, evidence)


def no_evidence(cell: CellKey) -> Verdict:
    return Verdict(None, None, None, None, cell, Evidence.NONE)


def differences(cell: Cell | None) -> tuple[float, float] | None:
    if cell is None or cell.split is None or cell.local is None:
        return None
    split, local = cell.split, cell.local
    d_ttft = (split.ttft_s.mean - local.ttft_s.mean) / split.ttft_s.mean
    return d_ttft, (local.tpot_s.mean - split.tpot_s.mean) / split.tpot_s.mean
