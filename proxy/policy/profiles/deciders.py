"""Deciders: once a D is chosen, whether a P computes the prompt."""

from __future__ import annotations

from typing import Final

import msgspec

from ...config import Mode, ZeroMeans
from ...fleet.view import WorkerView
from .scene import Scene


class PrefixBased(msgspec.Struct, frozen=True):
    """By the tokens of the prompt that the D is not taken to hold."""

    tokens: int
    zero_means: ZeroMeans  # `always` or `never`
    prompt_tokens: int = 0  # a shorter prompt stays on D

    def splits(self, scene: Scene, decode: WorkerView) -> bool:
        """`always`: above the limit, or wherever it is 0. `never`: from the limit on, but not where it is 0."""
        prompt = scene.turn.prompt_tokens
        if prompt < self.prompt_tokens:
            return False
        if not self.tokens:
            return self.zero_means is ZeroMeans.ALWAYS
        uncached = prompt - scene.matched_tokens(decode)
        return uncached > self.tokens if self.zero_means is ZeroMeans.ALWAYS else uncached >= self.tokens


class AlwaysSplit(msgspec.Struct, frozen=True):
    """A P computes every prompt."""


class OwnRule(msgspec.Struct, frozen=True):
    """By the decision table, or by what a mode that predicts says of this D."""

    mode: Mode = Mode.TABLE


Decider = PrefixBased | AlwaysSplit | OwnRule

OWN_RULES: Final = (Mode.TABLE, Mode.SLO, Mode.WEIGHTS, Mode.LEAST_TTFT, Mode.LMETRIC, Mode.SLACK)
