"""Profiles, and which of them run for a turn: the whole of an `EndpointPickerConfig` as far as it decides."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

import msgspec

from ...config import ZeroMeans
from ...fleet.view import WorkerView
from .deciders import Decider
from .filters import Filter
from .pickers import Picker
from .scene import Memory, Scene
from .scorers import Scorer


class WeightedScorer(msgspec.Struct, frozen=True):
    name: str
    scorer: Scorer
    weight: float

    def weighted(self, scene: Scene, views: Sequence[WorkerView]) -> list[float]:
        """Each score, clamped first."""
        weight, scores = self.weight, self.scorer.scores(scene, views)
        return [weight * (0.0 if score < 0.0 else 1.0 if score > 1.0 else score) for score in scores]


class Picked(msgspec.Struct, frozen=True):
    """What a profile took, and its weighted scores by the scorers' names."""

    view: WorkerView
    terms: dict[str, float]


class SchedulingProfile(msgspec.Struct, frozen=True):
    name: str
    filters: tuple[Filter, ...]
    scorers: tuple[WeightedScorer, ...]
    picker: Picker

    def run(self, scene: Scene, views: Sequence[WorkerView], draw: int) -> Picked | None:
        """draw: which of the turn's draws it takes. None: the filters leave no worker."""
        for one in self.filters:
            views = one.keep(scene, views)
        if not views:
            return None
        sums, columns = [0.0] * len(views), dict[str, list[float]]()
        for each in self.scorers:
            columns[each.name] = column = each.weighted(scene, views)
            sums = column if len(columns) == 1 else list(map(add, sums, column))
        at = self.picker.pick(sums, scene.draw(draw))
        return Picked(views[at], {name: column[at] for name, column in columns.items()})


class EndpointsFile(msgspec.Struct, frozen=True):
    """Where `file-discovery` finds workers."""

    path: str
    is_watched: bool


class Schedule(msgspec.Struct, frozen=True):
    decode: SchedulingProfile
    prefill: SchedulingProfile | None  # None: one worker does all
    decider: Decider | None  # None: no P computes anything, unless it comes first
    is_prefill_first: bool
    memory: Memory
    api_version: str
    zero_means: ZeroMeans
    endpoints: EndpointsFile | None = None
    source: str = ""  # the text that it was read from

    def describe(self) -> str:
        sign = ">" if self.zero_means is ZeroMeans.ALWAYS else ">="
        return f"{self.api_version}; uncached {sign} nonCachedTokens is SPLIT, where 0 means {self.zero_means}"
