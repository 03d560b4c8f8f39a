"""Workers in order of their load, so that a decision need not walk all of them.

The registry keeps one `LoadOrder` for each model and role. It hands out its views as `Ranked`, a list that answers from
the order as long as nothing has changed since; of any other list the functions below look at each view. Both give the
same answers.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Literal

import msgspec

from .places import LEAST, UNKNOWN
from .ranking import Rank, Ranking
from .rendezvous import Rendezvous, spread
from .view import Fleet, Takers, WorkerView, taking_turns
from .worker import PairingKind, Worker, WorkerId

SORTED_FROM = 8  # workers of a role; to look at each of fewer costs less
MODELS_KEPT = 256  # bounded, as clients may name any model while a worker has not said which it serves
CHANGES_KEPT = 1000  # of views, for rosters that have not heard them; looked at when one has
MOST_CHANGES = 100_000

_INFLIGHT = attrgetter("inflight")
_NONE: frozenset[int] = frozenset()


class LoadOrder:
    """The workers of one role that take one model's turns. `views` are in the registry's order."""

    def __init__(self, views: list[WorkerView]) -> None:
        self.views = views
        self.position: dict[str, int] = {view.id: at for at, view in enumerate(views)}
        self.requests = sum(view.requests for view in views)
        self.recent_tokens = sum(view.recent_tokens for view in views)
        self.version = 0  # grows with every change
        self._rankings: dict[Callable[[WorkerView], Rank], Ranking] = {}  # those that were asked for
        self._rendezvous: Rendezvous | None = None  # if it was asked for
        self._since_s = sorted((view.since_s, at) for at, view in enumerate(views))
        self._full: dict[float, set[int]] = {}  # by the limit on legs, of those that were asked for
        self._kinds = Counter(view.worker.pairing_kind for view in views)

    def by(self, rank_of: Callable[[WorkerView], Rank]) -> Ranking:
        """rank_of: one of few functions, as what is asked for once is kept from then on."""
        ranking = self._rankings.get(rank_of)
        if ranking is None:
            ranking = self._rankings[rank_of] = Ranking(rank_of, self.views)
        return ranking

    def rendezvous(self) -> Rendezvous:
        if self._rendezvous is None:
            self._rendezvous = Rendezvous([view.id for view in self.views])
        return self._rendezvous

    def update(self, view: WorkerView) -> None:
        at = self.position.get(view.worker.address)
        if at is None:
            return
        old, self.views[at] = self.views[at], view
        self.version += 1
        self.recent_tokens += view.recent_tokens - old.recent_tokens
        legs, others, theirs = view.inflight - old.inflight, view.others, old.others
        if legs or view.places != old.places or others is not theirs:
            self.requests += legs + others.requests - theirs.requests
            for limit, full in self._full.items():
                (full.add if view.is_full(limit) else full.discard)(at)
        if view.since_s != old.since_s:
            self._since_s.remove((old.since_s, at))
            insort(self._since_s, (view.since_s, at))
        if view.worker is not old.worker:
            self._count_kinds(old.worker.pairing_kind, view.worker.pairing_kind)
        for ranking in self._rankings.values():
            ranking.changed.add(at)

    def since(self, now_s: float, age_s: float) -> list[int]:
        """Positions of those that joined or recovered less than `age_s` ago."""
        young: list[int] = []
        if age_s <= 0.0:  # whatever the time: a rule without slow start need not know it
            return young
        for since_s, at in reversed(self._since_s):
            if now_s - since_s >= age_s:
                break
            young.append(at)
        return young

    def full_at(self, limit: float) -> set[int]:
        """Positions of those that have as many legs as they should have, or as `limit` allows.

        limit: one of few, as what is asked for once is kept from then on.
        """
        full = self._full.get(limit)
        if full is None:
            full = self._full[limit] = {at for at, view in enumerate(self.views) if view.is_full(limit)}
        return full

    def kinds(self, left_out: Collection[int]) -> list[PairingKind]:
        """All that are there, without the workers at these positions."""
        if not left_out:
            return list(self._kinds)
        left = self._kinds - Counter(self.views[at].worker.pairing_kind for at in left_out)
        return list(left)

    def _count_kinds(self, before: PairingKind, kind: PairingKind) -> None:
        if kind != before:
            self._kinds[kind] += 1
            self._kinds = self._kinds - Counter((before,))  # which drops what is not there any more


class Ranked(list[WorkerView]):
    """The views of an order, as they are now, without those at the positions `left_out`."""

    __slots__ = ("_order", "_version", "left_out")

    def __init__(self, order: LoadOrder, left_out: frozenset[int] = frozenset()) -> None:
        views = order.views
        super().__init__(views)
        if left_out:
            for at in sorted(left_out, reverse=True):  # few as a rule
                del self[at]
        self._order = order
        self._version = order.version
        self.left_out = left_out

    @property
    def order(self) -> LoadOrder | None:
        """None once a worker has changed since: it tells of other views."""
        return self._order if self._order.version == self._version else None

    def sum_of(self, field: Literal["requests", "recent_tokens"], order: LoadOrder) -> int:
        total: int = getattr(order, field) - sum(getattr(order.views[at], field) for at in self.left_out)
        return total


class Roster:
    """The workers that take one model's turns, by role; valid until other workers do."""

    def __init__(self, views: Mapping[WorkerId, WorkerView], takers: Takers) -> None:
        *by_role, self._down = takers
        orders = [None if len(ids) < SORTED_FROM else LoadOrder(list(map(views.__getitem__, ids))) for ids in by_role]
        self._lists = list(zip(by_role, orders, strict=True))
        self._order_of = {worker: order for order in orders if order is not None for worker in order.position}
        self.heard = 0  # changes

    def hear(self, views: Mapping[WorkerId, WorkerView], changes: Sequence[WorkerId]) -> None:
        """changes: of views, in the order in which they came."""
        if self._order_of:
            for worker in dict.fromkeys(changes[self.heard :]):
                if (order := self._order_of.get(worker)) is not None:
                    order.update(views[worker])
        self.heard = len(changes)

    def fleet(self, views: Mapping[WorkerId, WorkerView], newest_s: float) -> Fleet:
        view_of = views.__getitem__
        prefills, decodes, replicas = [
            list(map(view_of, ids)) if order is None else Ranked(order) for ids, order in self._lists
        ]
        return Fleet(views, prefills, decodes, replicas, list(map(view_of, self._down)), newest_s)


class Rosters:
    """The fleets of all models that turns ask for. They hear of changes when a turn asks: a change costs nothing."""

    def __init__(self) -> None:
        self._by_model: dict[str, Roster] = {}
        self.known: dict[str, Fleet] = {}  # by model, until a view changes
        self._changes: list[WorkerId] = []

    def changed(self, workers: Iterable[WorkerId]) -> None:
        """Their views, but not which turns they take."""
        self._changes.extend(workers)
        self.known.clear()
        if len(self._changes) > MOST_CHANGES:
            self._forget()

    def clear(self) -> None:
        """Other workers take turns than until now."""
        self._by_model.clear()
        self.known.clear()
        self._changes.clear()

    def fleet(self, model: str, views: Mapping[WorkerId, WorkerView], newest_s: float) -> Fleet:
        """views: of all workers, as they are now; newest_s: see `Fleet`."""
        roster = self._by_model.get(model)
        if roster is None:
            if len(self._by_model) >= MODELS_KEPT:
                self.clear()
            roster = self._by_model[model] = Roster(views, taking_turns(views.values(), model))
            roster.heard = len(self._changes)
        roster.hear(views, self._changes)
        if len(self._changes) > CHANGES_KEPT:
            self._forget()
        fleet = self.known[model] = roster.fleet(dict(views), newest_s)
        return fleet

    def _forget(self) -> None:
        """What all rosters have heard. One that is behind is made anew when a turn asks for its model."""
        heard = len(self._changes)
        self._by_model = {model: each for model, each in self._by_model.items() if each.heard == heard}
        self._changes.clear()
        for roster in self._by_model.values():
            roster.heard = 0


def _order(views: Sequence[WorkerView]) -> tuple[LoadOrder, Ranked] | None:
    if isinstance(views, Ranked) and (order := views.order) is not None:
        return order, views
    return None


def of_workers(views: Sequence[WorkerView], workers: Collection[WorkerId]) -> list[WorkerView]:
    """Those of the views that are these workers', in the order of the views."""
    if (known := _order(views)) is None:
        return [view for view in views if view.worker.address in workers]  # as `view.id`, without its call
    order, ranked = known
    return [order.views[at] for at in sorted(_positions(order, workers)) if at not in ranked.left_out]


def largest(views: Sequence[WorkerView], sizes: Iterable[tuple[str, int]], count: int) -> list[WorkerView]:
    """Of the workers with these sizes the views of the largest; of equals those that come first."""
    if not sizes:
        return []
    if (known := _order(views)) is None:
        position = {view.worker.address: at for at, view in enumerate(views)}
        among, left_out = views, _NONE
    else:
        position, among, left_out = known[0].position, known[0].views, known[1].left_out
    every = len(among)
    # Size and place as one number: pairs take many times as long to sort.
    found = [
        at - size * every for worker, size in sizes if (at := position.get(worker)) is not None and at not in left_out
    ]
    found.sort()
    return [among[number % every] for number in found[:count]]


def includes(views: Sequence[WorkerView], worker: WorkerId) -> bool:
    if (known := _order(views)) is not None:
        order, ranked = known
        return worker in order.position and order.position[worker] not in ranked.left_out
    return worker in [view.worker.address for view in views]


def _positions(order: LoadOrder, workers: Iterable[WorkerId]) -> set[int]:
    position = order.position
    return {position[worker] for worker in workers if worker in position}


def mean_requests(views: Sequence[WorkerView]) -> float:
    if (known := _order(views)) is None:
        return sum(view.requests for view in views) / len(views)
    order, ranked = known
    return ranked.sum_of("requests", order) / len(views)


def mean_recent_tokens(views: Sequence[WorkerView]) -> float:
    if (known := _order(views)) is None:
        return sum(view.recent_tokens for view in views) / len(views)
    order, ranked = known
    return ranked.sum_of("recent_tokens", order) / len(views)


def full_workers(views: Sequence[WorkerView], limit: float) -> list[WorkerView]:
    """Those that have as many legs as they should have, or as `limit` allows."""
    if not views:
        return []
    if (known := _order(views)) is None:
        # While the busiest has fewer legs than any worker may have, none need be looked at.
        if max(map(_INFLIGHT, views)) < (limit if limit < LEAST else LEAST):
            return []
        # As `view.is_full(limit)`, without its call.
        return [view for view in views if (legs := view.inflight) >= limit or legs >= view.places > UNKNOWN]
    order, ranked = known
    return [order.views[at] for at in sorted(order.full_at(limit) - ranked.left_out)]


def without(views: Sequence[WorkerView], workers: Collection[WorkerId]) -> Sequence[WorkerView]:
    """The views of the others."""
    if not workers:
        return views
    if (known := _order(views)) is None:
        return [view for view in views if view.id not in workers]
    order, ranked = known
    return Ranked(order, ranked.left_out.union(_positions(order, workers)))


class RankRule(msgspec.Struct, frozen=True, gc=False):
    """A rank that a decision goes by: that of `sorts_as`, but for those `apart` and those in slow start."""

    rank_of: Callable[[WorkerView], Rank]
    sorts_as: Callable[[WorkerView], Rank]  # as of `LoadOrder.by`
    now_s: float = 0.0
    slow_start_s: float = 0.0
    apart: Collection[WorkerId] = ()

    def set_apart(self, order: LoadOrder, ranked: Ranked) -> set[int]:
        """Positions of the candidates whose ranks the order does not tell."""
        if not self.apart and self.slow_start_s <= 0.0:
            return set()
        return _positions(order, self.apart).union(order.since(self.now_s, self.slow_start_s)) - ranked.left_out


def least_ranked(views: Sequence[WorkerView], rule: RankRule) -> list[WorkerView]:
    """All of the least rank, in the order of the views."""
    rank_of = rule.rank_of
    if (known := _order(views)) is None:
        return _least(views, rank_of)
    order, ranked = known
    apart, views_at = rule.set_apart(order, ranked), order.views
    found = order.by(rule.sorts_as).least(apart | ranked.left_out)
    least = rank_of(views_at[found[0]]) if found else ()
    for at in apart:
        rank = rank_of(views_at[at])
        if not found or rank < least:
            found, least = [at], rank
        elif rank == least:
            found.append(at)
    return list(map(views_at.__getitem__, sorted(found)))


def _least(views: Sequence[WorkerView], rank_of: Callable[[WorkerView], Rank]) -> list[WorkerView]:
    found: list[WorkerView] = []
    least: Rank = ()
    for view in views:
        rank = rank_of(view)
        if not found or rank < least:
            found, least = [view], rank
        elif rank == least:
            found.append(view)
    return found


def first_ranked(views: Sequence[WorkerView], rule: RankRule, count: int) -> list[WorkerView]:
    """The first by rank; of equals those that come first."""
    if (known := _order(views)) is None:
        return sorted(views, key=rule.rank_of)[:count]
    order, ranked = known
    apart = rule.set_apart(order, ranked)
    found = order.by(rule.sorts_as).first(count, apart | ranked.left_out)
    if not apart:
        return list(map(order.views.__getitem__, found))
    found += apart
    found.sort()
    return sorted((order.views[at] for at in found), key=rule.rank_of)[:count]


def first_by_hash(views: Sequence[WorkerView], session_id: str) -> WorkerView | None:
    """The session's own by rendezvous hashing, whatever these workers do."""
    if (known := _order(views)) is None:
        return min(views, key=lambda view: spread(view.id, session_id), default=None)
    order, ranked = known
    at = order.rendezvous().first(session_id, ranked.left_out)
    return None if at is None else order.views[at]


def pairing_kinds(views: Sequence[WorkerView]) -> Sequence[PairingKind | Worker] | None:
    """What `can_pair` needs to know of all of them; None: look at each."""
    known = _order(views)
    return None if known is None else known[0].kinds(known[1].left_out)
