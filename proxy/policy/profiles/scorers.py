"""Scorers: how good each of the workers that are left is, as a number that is clamped to [0, 1] and then weighted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ...fleet.ranking import kv_usage
from ...fleet.view import WorkerView
from .scene import Scene

NEUTRAL = 0.5


class Scorer(Protocol):
    def scores(self, scene: Scene, views: Sequence[WorkerView]) -> list[float]:
        """One for each view; there is one at least."""
        ...


def waiting(view: WorkerView) -> int:
    """Requests that queue: as the engine said last, or the prompts that this proxy knows there, if they are more."""
    return max(view.load.waiting, view.prefills)


class PrefixCacheScorer(msgspec.Struct, frozen=True):
    length_weight: float = 0.0  # of how long the match is; the rest is of its share of the prompt
    length_scale: int = 8192  # tokens from which on a match counts as long

    def scores(self, scene: Scene, views: Sequence[WorkerView]) -> list[float]:
        weight, shares = self.length_weight, scene.matched_shares(views)
        if not weight:
            return shares
        return [
            weight * min(1.0, scene.matched_tokens(view) / self.length_scale) ** 2 + (1.0 - weight) * share
            for view, share in zip(views, shares, strict=True)
        ]


class QueueScorer(msgspec.Struct, frozen=True):
    """1 for the shortest queue, 0 for the longest."""

    def scores(self, scene: Scene, views: Sequence[WorkerView]) -> list[float]:
        queues = [waiting(view) for view in views]
        least, most = min(queues), max(queues)
        return [1.0 if most == least else (most - queue) / (most - least) for queue in queues]


class KvUsageScorer(msgspec.Struct, frozen=True):
    """The share of KV that is free; what was placed there since the engine last reported is not."""

    def scores(self, scene: Scene, views: Sequence[WorkerView]) -> list[float]:
        return [1.0 - kv_usage(view) for view in views]


class LoadAwareScorer(msgspec.Struct, frozen=True):
    """Half for an empty queue, less for a longer one, nothing from `threshold` on."""

    threshold: int = 128

    def scores(self, scene: Scene, views: Sequence[WorkerView]) -> list[float]:
        return [NEUTRAL * (1.0 - min(1.0, waiting(view) / self.threshold)) for view in views]


class ActiveRequestScorer(msgspec.Struct, frozen=True):
    """1 for the idle; the busy between `busy_score` and 0, which the busiest gets."""

    idle_requests: int = 0
    busy_score: float = 1.0

    def scores(self, scene: Scene, views: Sequence[WorkerView]) -> list[float]:
        counts = [view.requests for view in views]
        most = max(counts)
        return [
            1.0 if count <= self.idle_requests else (most - count) / most * self.busy_score if most else 1.0
            for count in counts
        ]


class SessionScorer(msgspec.Struct, frozen=True):
    """1 for the session's worker, 0 for all others."""

    def scores(self, scene: Scene, views: Sequence[WorkerView]) -> list[float]:
        pinned = scene.pinned(views)
        return [1.0 if view is pinned else 0.0 for view in views]


class NoHitLruScorer(msgspec.Struct, frozen=True):
    """Of a turn that nobody holds anything of: the longer a worker had no such turn the better. All others: neutral."""

    def scores(self, scene: Scene, views: Sequence[WorkerView]) -> list[float]:
        if not scene.memory.is_cold(scene.turn):
            return [NEUTRAL] * len(views)
        used = {worker: at for at, worker in enumerate(scene.memory.cold)}
        order = sorted(range(len(views)), key=lambda at: used.get(views[at].id, -1))
        scores = [1.0] * len(views)
        for rank, at in enumerate(order):
            scores[at] = 1.0 - rank / max(1, len(views) - 1)
        return scores
