"""Pickers: the one worker that a profile takes, by the scores of those that are left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import msgspec


class Picker(Protocol):
    def pick(self, scores: Sequence[float], draw: float) -> int:
        """The place of one of the scores, of which there is one at least. draw: at random in [0, 1)."""
        ...


class MaxScorePicker(msgspec.Struct, frozen=True):
    """The highest score; of equals any."""

    def pick(self, scores: Sequence[float], draw: float) -> int:
        best = max(scores)
        equals = [at for at, score in enumerate(scores) if score == best]
        return equals[int(draw * len(equals))]


class WeightedRandomPicker(msgspec.Struct, frozen=True):
    """Any, as likely as its score is high; where none is above 0, all alike."""

    def pick(self, scores: Sequence[float], draw: float) -> int:
        sums = list(accumulate(max(0.0, score) for score in scores))
        if sums[-1] <= 0.0:
            return int(draw * len(scores))
        point = draw * sums[-1]
        return next((at for at, end in enumerate(sums) if point < end), len(sums) - 1)


class RandomPicker(msgspec.Struct, frozen=True):
    def pick(self, scores: Sequence[float], draw: float) -> int:
        return int(draw * len(scores))
