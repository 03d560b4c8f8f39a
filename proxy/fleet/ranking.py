"""By how much workers have to do: ranks, and views sorted by one of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence, Set
from typing import Protocol

from .view import WorkerView

KV_FULL = 0.95  # at this share of KV blocks in use, a new session would evict or preempt others

Rank = tuple[float, ...]
"""The least is the best."""


class FactorRank(Protocol):
    def __call__(self, view: WorkerView, factor: float = 1.0, /) -> Rank:
        """factor: by which the worker counts as less loaded; below 1 during its slow start."""


def kv_usage(view: WorkerView) -> float:
    """The share of KV in use: as the engine last reported it, and what was placed there since."""
    capacity = view.load.kv_capacity_tokens
    return view.load.kv_usage + (view.placed_tokens / capacity if capacity else 0.0)


def kv_rank(view: WorkerView) -> Rank:
    return (kv_usage(view),)


def load_rank(view: WorkerView, factor: float = 1.0) -> Rank:
    """For a leg that answers. What was placed there since the engine's last report counts at once."""
    requests, queued = (view.requests + 1) / factor, view.queued_prefill_tokens / factor
    is_full = view.load.kv_usage >= KV_FULL
    return (is_full, requests, queued, round(kv_usage(view), 2), view.placed_tokens / factor)


def prefill_rank(view: WorkerView) -> Rank:
    """For a P's leg, of prompts of which it holds nothing."""
    return (view.queued_prefill_tokens, view.requests)


def work_rank(view: WorkerView, factor: float = 1.0) -> Rank:
    """For a leg that answers: by what it slows down and waits for, and by how much of the cache turns have filled."""
    return (view.requests + 1) / factor, (view.queued_prefill_tokens + view.recent_tokens) / factor


def prefill_work_rank(view: WorkerView) -> Rank:
    """For a P's leg, where the laws say how long the prompts there take."""
    return (view.queued_prefill_s, view.queued_prefill_tokens, view.requests)


class Ranking:
    """Views by one rank, as positions in a list of them, which others change: they note where in `changed`.

    It looks there when it is asked, as many a mode asks for a ranking once in many turns.
    """

    def __init__(self, rank_of: Callable[[WorkerView], Rank], views: Sequence[WorkerView]) -> None:
        self.changed: set[int] = set()
        self._rank_of = rank_of
        self._views = views
        self._ranks = list(map(rank_of, views))
        self._equals: dict[Rank, set[int]] = {}
        for at, rank in enumerate(self._ranks):
            self._equals.setdefault(rank, set()).add(at)
        self._sorted = sorted(self._equals)

    def _catch_up(self) -> None:
        views, ranks, all_equals, in_order = self._views, self._ranks, self._equals, self._sorted
        for at in self.changed:
            rank, before = self._rank_of(views[at]), ranks[at]
            if rank == before:
                continue
            ranks[at] = rank
            equals = all_equals[before]
            equals.remove(at)
            if not equals:
                del all_equals[before]
                del in_order[bisect_left(in_order, before)]
            if rank in all_equals:
                all_equals[rank].add(at)
            else:
                all_equals[rank] = {at}
                insort(in_order, rank)
        self.changed.clear()

    def least(self, left_out: Set[int]) -> list[int]:
        """All of the least rank, of the others."""
        if self.changed:
            self._catch_up()
        for rank in self._sorted:
            found = self._equals[rank].difference(left_out)  # often of most workers
            if found:
                return list(found)
        return []

    def first(self, count: int, left_out: Set[int]) -> list[int]:
        """The least of all others, by rank; of equals those that come first."""
        if self.changed:
            self._catch_up()
        found: list[int] = []
        for rank in self._sorted:
            equals = self._equals[rank]
            found += sorted(equals - left_out if left_out else equals)
            if len(found) >= count:
                break
        return found[:count]
