"""Workers in order of their load, so that a decision need not walk all of them.

The registry keeps one `LoadOrder` for each model and role. It hands out its views as `Ranked`, a list that answers from
the order as long as nothing has changed since; of any other list the functions below look at each view. Both give the
same answers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from .view import Fleet, Takers, WorkerView, taking_turns
from .worker import PairingKind, Role, Worker, WorkerId

KV_FULL = 0.95  # at this share of KV blocks in use, a new session would evict or preempt others

SORTED_FROM = 8  # workers of a role; to look at each of fewer costs less
MODELS_KEPT = 256  # bounded, as clients may name any model while a worker has not said which it serves
CHANGES_KEPT = 1000  # of views, for rosters that have not heard them; looked at when one has
MOST_CHANGES = 100_000

Rank = tuple[float, ...]
"""The least is the best."""


def load_rank(view: WorkerView, factor: float = 1.0) -> Rank:
    """For a leg that answers. KV in use is as the engine last reported it; what was placed there since counts at once.

    factor: by which the worker counts as less loaded; below 1 during its slow start.
    """
    load, requests, queued = view.load, (view.requests + 1) / factor, view.queued_prefill_tokens / factor
    placed = view.placed_tokens / load.kv_capacity_tokens if load.kv_capacity_tokens else 0.0
    return (load.kv_usage >= KV_FULL, requests, queued, round(load.kv_usage + placed, 2), view.placed_tokens / factor)


def prefill_rank(view: WorkerView) -> Rank:
    """For a P's leg, of prompts of which it holds nothing."""
    return (view.queued_prefill_tokens, view.requests)


RANKS = (prefill_rank, load_rank, load_rank)
"""As `Takers`: of P, D and R."""


class LoadOrder:
    """The workers of one role that take one model's turns. `views` are in the registry's order."""

    def __init__(self, rank_of: Callable[[WorkerView], Rank], views: list[WorkerView]) -> None:
        self.rank_of = rank_of
        self.views = views
        self.position = {view.id: at for at, view in enumerate(views)}
        self.requests = sum(view.requests for view in views)
        self.recent_tokens = sum(view.recent_tokens for view in views)
        self.version = 0  # grows with every change
        self._ranks = list(map(rank_of, views))
        self._equals: dict[Rank, set[int]] = {}
        for at, rank in enumerate(self._ranks):
            self._equals.setdefault(rank, set()).add(at)
        self._sorted = sorted(self._equals)
        self._since_s = sorted((view.since_s, at) for at, view in enumerate(views))
        self._kinds = Counter(view.worker.pairing_kind for view in views)
        self.kinds = list(self._kinds)

    def update(self, view: WorkerView) -> None:
        at = self.position.get(view.id)
        if at is None:
            return
        old, self.views[at] = self.views[at], view
        self.version += 1
        self.requests += view.requests - old.requests
        self.recent_tokens += view.recent_tokens - old.recent_tokens
        if view.since_s != old.since_s:
            self._since_s.remove((old.since_s, at))
            insort(self._since_s, (view.since_s, at))
        if view.worker is not old.worker:
            self._count_kinds(old.worker.pairing_kind, view.worker.pairing_kind)
        rank, before = self.rank_of(view), self._ranks[at]
        if rank == before:
            return
        self._ranks[at] = rank
        equals = self._equals[before]
        equals.remove(at)
        if not equals:
            del self._equals[before]
            del self._sorted[bisect_left(self._sorted, before)]
        if rank in self._equals:
            self._equals[rank].add(at)
        else:
            self._equals[rank] = {at}
            insort(self._sorted, rank)

    def least(self, apart: Collection[int]) -> list[WorkerView]:
        """All of the least rank, of those that do not stand at the positions `apart`."""
        for rank in self._sorted:
            found = [self.views[at] for at in self._equals[rank] if at not in apart]
            if found:
                return found
        return []

    def first(self, count: int) -> list[WorkerView]:
        """The least of all; of equals those that come first."""
        found: list[WorkerView] = []
        for rank in self._sorted:
            found += [self.views[at] for at in sorted(self._equals[rank])]
            if len(found) >= count:
                break
        return found[:count]

    def since(self, now_s: float, age_s: float) -> list[int]:
        """Positions of those that joined or recovered less than `age_s` ago."""
        young = []
        for since_s, at in reversed(self._since_s):
            if now_s - since_s >= age_s:
                break
            young.append(at)
        return young

    def _count_kinds(self, before: PairingKind, kind: PairingKind) -> None:
        if kind != before:
            self._kinds[before] -= 1
            self._kinds[kind] += 1
            self.kinds = [each for each, count in self._kinds.items() if count]
            self._kinds = Counter({each: self._kinds[each] for each in self.kinds})


class Ranked(list[WorkerView]):
    """The views of an order, as they are now."""

    __slots__ = ("_order", "_version")

    def __init__(self, order: LoadOrder) -> None:
        super().__init__(order.views)
        self._order = order
        self._version = order.version

    @property
    def order(self) -> LoadOrder | None:
        """None once a worker has changed since: it tells of other views."""
        return self._order if self._order.version == self._version else None


class Roster:
    """The workers that take one model's turns, by role; valid until other workers do."""

    def __init__(self, views: Mapping[WorkerId, WorkerView], takers: Takers) -> None:
        *by_role, self._down = takers
        orders = [self._sorted(views, ids, rank) for ids, rank in zip(by_role, RANKS, strict=True)]
        self._lists = list(zip(by_role, orders, strict=True))
        self._order_of = {worker: order for order in orders if order is not None for worker in order.position}
        self.heard = 0  # changes

    @staticmethod
    def _sorted(
        views: Mapping[WorkerId, WorkerView], ids: Sequence[WorkerId], rank_of: Callable[[WorkerView], Rank]
    ) -> LoadOrder | None:
        return None if len(ids) < SORTED_FROM else LoadOrder(rank_of, [views[worker] for worker in ids])

    def hear(self, views: Mapping[WorkerId, WorkerView], changes: Sequence[WorkerId]) -> None:
        """changes: of views, in the order in which they came."""
        if self._order_of:
            for worker in dict.fromkeys(changes[self.heard :]):
                if (order := self._order_of.get(worker)) is not None:
                    order.update(views[worker])
        self.heard = len(changes)

    def fleet(self, views: Mapping[WorkerId, WorkerView]) -> Fleet:
        view_of = views.__getitem__
        prefills, decodes, replicas = (
            list(map(view_of, ids)) if order is None else Ranked(order) for ids, order in self._lists
        )
        return Fleet(views, prefills, decodes, replicas, list(map(view_of, self._down)))


class Rosters:
    """The fleets of all models that turns ask for. They hear of changes when a turn asks: a change costs nothing."""

    def __init__(self) -> None:
        self._by_model: dict[str, Roster] = {}
        self._fleets: dict[str, Fleet] = {}  # by model, until a view changes
        self._changes: list[WorkerId] = []

    def changed(self, worker_id: WorkerId) -> None:
        """The worker's view, but not which turns it takes."""
        self._changes.append(worker_id)
        if self._fleets:
            self._fleets.clear()
        if len(self._changes) > MOST_CHANGES:
            self._forget()

    def clear(self) -> None:
        """Other workers take turns than until now."""
        self._by_model.clear()
        self._fleets.clear()
        self._changes.clear()

    def fleet(self, model: str, views: Mapping[WorkerId, WorkerView]) -> Fleet:
        """views: of all workers, as they are now."""
        known = self._fleets.get(model)
        if known is not None:
            return known
        roster = self._by_model.get(model)
        if roster is None:
            if len(self._by_model) >= MODELS_KEPT:
                self.clear()
            roster = self._by_model[model] = Roster(views, taking_turns(views.values(), model))
            roster.heard = len(self._changes)
        roster.hear(views, self._changes)
        if len(self._changes) > CHANGES_KEPT:
            self._forget()
        fleet = self._fleets[model] = roster.fleet(dict(views))
        return fleet

    def _forget(self) -> None:
        """What all rosters have heard. One that is behind is made anew when a turn asks for its model."""
        heard = len(self._changes)
        self._by_model = {model: each for model, each in self._by_model.items() if each.heard == heard}
        self._changes.clear()
        for roster in self._by_model.values():
            roster.heard = 0


def _order(views: Iterable[WorkerView]) -> LoadOrder | None:
    return views.order if isinstance(views, Ranked) else None


def of_workers(views: Sequence[WorkerView], workers: Collection[WorkerId]) -> list[WorkerView]:
    """Those of the views that are these workers', in the order of the views."""
    order = _order(views)
    if order is None:
        return [view for view in views if view.id in workers]
    positions = [at for worker in workers if (at := order.position.get(worker)) is not None]
    return [order.views[at] for at in sorted(positions)]


def mean_requests(views: Sequence[WorkerView]) -> float:
    order = _order(views)
    return (sum(view.requests for view in views) if order is None else order.requests) / len(views)


def mean_recent_tokens(views: Sequence[WorkerView]) -> float:
    order = _order(views)
    return (sum(view.recent_tokens for view in views) if order is None else order.recent_tokens) / len(views)


class RankRule(msgspec.Struct, frozen=True, gc=False):
    """A rank that a decision goes by: that of `sorts_as`, but for those `apart` and those in slow start."""

    rank_of: Callable[[WorkerView], Rank]
    sorts_as: Callable[[WorkerView], Rank]  # one of `RANKS`
    now_s: float
    slow_start_s: float
    apart: Collection[WorkerId] = ()


def least_ranked(views: Sequence[WorkerView], rule: RankRule) -> list[WorkerView]:
    """All of the least rank."""
    order, rank_of = _order(views), rule.rank_of
    if order is None or order.rank_of is not rule.sorts_as:
        ranks = [rank_of(view) for view in views]
        least = min(ranks, default=())
        return [view for view, rank in zip(views, ranks, strict=True) if rank == least]
    positions = set(order.since(rule.now_s, rule.slow_start_s))
    positions.update(at for worker in rule.apart if (at := order.position.get(worker)) is not None)
    found = order.least(positions)
    least = rank_of(found[0]) if found else ()
    for view in map(order.views.__getitem__, sorted(positions)):
        rank = rank_of(view)
        if not found or rank < least:
            found, least = [view], rank
        elif rank == least:
            found.append(view)
    return found


def least_loaded(views: Sequence[WorkerView], count: int) -> list[WorkerView]:
    """The first by load, slow start aside: P as `prefill_rank` says, D and R as `load_rank` does."""
    order = _order(views)
    if order is not None:
        return order.first(count)
    rank_of = prefill_rank if views and views[0].role is Role.PREFILL else load_rank
    return sorted(views, key=rank_of)[:count]


def pairing_kinds(views: Sequence[WorkerView]) -> Sequence[PairingKind | Worker] | None:
    """What `can_pair` needs to know of all of them; None: look at each."""
    order = _order(views)
    return None if order is None else order.kinds
