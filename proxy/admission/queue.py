"""The order of waiting turns: by priority class, in a class by fair shares of tenants, in a tenant by arrival.

Fair shares are start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queueing", IEEE/ACM Transactions on
Networking 5(5), 1997), where a turn costs its tokens. It needs no knowledge of the service rate, which changes with the
fleet. A tenant's turn starts at the class's virtual time, or at the end of the tenant's turn before it, if that is
later. The turn with the least start is served next, and its start becomes the virtual time. So a new tenant in a queue
that another has flooded is served next, and no tenant saves up credit while it asks for nothing.

Classes are strict: a better class that fills the fleet starves those below it, whose turns get 503 at their deadline.

Turns that wait for a busy model never hold up turns for an idle one. So shares are kept twice: over the whole class,
and in each lane (turns with equal needs), because the class's virtual time may run ahead of a busy lane's tenants.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

import msgspec

PRIORITY_LIMIT = 1000  # classes are -1000 to 1000; the lower is served first
NEW_TENANTS = 64  # added before those that are not ahead of their share are forgotten


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What the queue may know of one turn."""

    tenant: str
    weight: float = 1.0  # the tenant's share against others', above 0
    priority: int = 0  # its class: the lower, the earlier
    cost: int = 1  # estimated tokens
    arrived_s: float
    deadline_s: float = math.inf
    needs: Hashable = None  # turns with equal needs, such as one model, fit together or not at all
    fits: Callable[[], bool]  # whether a worker has room for it now


def effective_priority(key_priority: int, asked: int | None) -> int:
    """The class of a request: its key's, or the less urgent one that it asks for."""
    wanted = key_priority if asked is None else max(key_priority, asked)
    return max(-PRIORITY_LIMIT, min(PRIORITY_LIMIT, wanted))


class Shares:
    """Virtual time of start-time fair queueing. Tenants that are not ahead of it are forgotten."""

    def __init__(self) -> None:
        self._virtual = 0.0
        self._ends: dict[str, float] = {}
        self._limit = NEW_TENANTS

    def start(self, tenant: str) -> float:
        return max(self._virtual, self._ends.get(tenant, 0.0))

    def ahead(self, tenant: str) -> float:
        """By how much the tenant had more than its share; 0 for those that are next."""
        return self.start(tenant) - self._virtual

    def charge(self, tenant: str, share: float) -> None:
        self._virtual = self.start(tenant)
        self._ends[tenant] = self._virtual + share
        if len(self._ends) > self._limit:
            self._ends = {name: end for name, end in self._ends.items() if end > self._virtual}
            self._limit = 2 * len(self._ends) + NEW_TENANTS

    def refund(self, tenant: str, share: float) -> None:
        if tenant in self._ends:
            self._ends[tenant] -= share


@dataclass(eq=False, slots=True)
class Waiter:
    """A ticket in the queue; `number` is its arrival, and stays when the turn comes back."""

    ticket: Ticket
    number: int
    moved_s: float | None = None  # when the worker died that it was on
    charged: tuple[Shares, ...] = ()  # where its tenant was charged for it
    was_inside: bool = False  # its workers failed or were busy: it waits again

    def charge(self, *where: Shares) -> None:
        self.charged = where
        for shares in where:
            shares.charge(self.ticket.tenant, self._share)

    def refund(self) -> None:
        """The turn was taken but not served: its tenant is not charged."""
        for shares in self.charged:
            shares.refund(self.ticket.tenant, self._share)

    @property
    def _share(self) -> float:
        return max(1, self.ticket.cost) / self.ticket.weight


def _arrival(waiter: Waiter) -> int:
    return waiter.number


@dataclass(slots=True)
class _Lane:
    """Turns with equal needs, of one class."""

    shares: Shares = field(default_factory=Shares)
    flows: dict[str, list[Waiter]] = field(default_factory=dict)  # by tenant, none empty, in order of arrival


def _room_of(waiters: Sequence[Waiter]) -> float:
    """Less for a tenant with more turns for its weight."""
    return -len(waiters) / waiters[-1].ticket.weight


@dataclass(slots=True)
class _Class:
    """Turns of one priority."""

    shares: Shares = field(default_factory=Shares)
    lanes: dict[Hashable, _Lane] = field(default_factory=dict)  # none empty
    members: dict[str, list[Waiter]] = field(default_factory=dict)  # by tenant over all lanes, parked ones included
    size: int = 0

    def next(self, has_room: Callable[[Hashable, Ticket], bool]) -> Waiter | None:
        heads: dict[str, Waiter] = {}
        for needs, lane in self.lanes.items():
            if not has_room(needs, next(iter(lane.flows.values()))[0].ticket):
                continue
            for tenant, flow in lane.flows.items():
                if tenant not in heads or flow[0].number < heads[tenant].number:
                    heads[tenant] = flow[0]
        return min(heads.values(), key=self._rank, default=None)

    def _rank(self, head: Waiter) -> tuple[float, float, int]:
        tenant = head.ticket.tenant
        return self.shares.start(tenant), self.lanes[head.ticket.needs].shares.ahead(tenant), head.number

    def lasts(self, newest: Waiter) -> Iterator[Waiter]:
        """The newest turn of the tenant with the most turns for its weight; of equal tenants, `newest`'s own.

        Then the next such turn, once that one is removed, and so on.
        """
        own, members = newest.ticket.tenant, self.members
        crowds = [
            (_room_of(waiters), tenant != own, place, tenant) for place, (tenant, waiters) in enumerate(members.items())
        ]
        heapify(crowds)
        while crowds:
            _, is_others, place, tenant = crowds[0]
            yield members[tenant][-1]
            if tenant in members:
                heapreplace(crowds, (_room_of(members[tenant]), is_others, place, tenant))
            else:
                heappop(crowds)


class WaitingLine:
    """All turns that wait. Parked ones count, but are passed over until they are due."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}  # none empty
        self._wanted: dict[Hashable, set[Waiter]] = {}  # by needs, those of all classes that are not parked; none empty
        self._waiting: set[Waiter] = set()
        self._parked: set[Waiter] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._waiting)

    def ahead(self, priority: int) -> int:
        return sum(group.size for known, group in self._classes.items() if known <= priority)

    def is_wanted(self, needs: Hashable) -> bool:
        """Whether a turn with equal needs waits that is not parked."""
        return needs in self._wanted

    def add(self, waiter: Waiter, *, parked: bool = False) -> None:
        """parked: not to be served before `unpark`."""
        group = self._classes.setdefault(waiter.ticket.priority, _Class())
        group.size += 1
        _put(group.members, waiter)
        self._waiting.add(waiter)
        if parked:
            self._parked.add(waiter)
        else:
            self._line_up(waiter, group)

    def unpark(self, waiter: Waiter) -> None:
        if waiter in self._parked:
            self._parked.remove(waiter)
            self._line_up(waiter, self._classes[waiter.ticket.priority])

    def remove(self, waiter: Waiter) -> None:
        if waiter not in self._waiting:
            return
        self._waiting.remove(waiter)
        ticket = waiter.ticket
        group = self._classes[ticket.priority]
        _drop(group.members, waiter)
        group.size -= 1
        if waiter in self._parked:
            self._parked.remove(waiter)
        else:
            lane = group.lanes[ticket.needs]
            _drop(lane.flows, waiter)
            if not lane.flows:  # none waits: shares start anew with the next
                del group.lanes[ticket.needs]
            self._wanted[ticket.needs].remove(waiter)
            if not self._wanted[ticket.needs]:
                del self._wanted[ticket.needs]
        if not group.size:
            del self._classes[ticket.priority]

    def take(self, has_room: Callable[[Ticket], bool]) -> Waiter | None:
        """Removes and returns the next turn that has room; `has_room` is called once for equal needs."""
        rooms: dict[Hashable, bool] = {}

        def has_room_once(needs: Hashable, ticket: Ticket) -> bool:
            if needs not in rooms:
                rooms[needs] = has_room(ticket)
            return rooms[needs]

        # Clients choose their classes, and nearly always nobody has room: then no class is looked through.
        if not any(has_room_once(needs, next(iter(waiters)).ticket) for needs, waiters in self._wanted.items()):
            return None
        for priority in sorted(self._classes):
            group = self._classes[priority]
            waiter = group.next(has_room_once)
            if waiter is not None:
                waiter.charge(group.shares, group.lanes[waiter.ticket.needs].shares)
                self.remove(waiter)
                return waiter
        return None

    def last(self, newest: Waiter) -> Waiter:
        """Which turn to refuse when there is one too many, `newest` being the last that came.

        Of the worst class, from the tenant that crowds it most: one tenant's flood must not close the queue to others.
        """
        return next(self.lasts(newest))

    def lasts(self, newest: Waiter) -> Iterator[Waiter]:
        """The same, of several too many: each is to be removed before the next is asked for."""
        for priority in sorted(self._classes, reverse=True):
            yield from self._classes[priority].lasts(newest)

    def _line_up(self, waiter: Waiter, group: _Class) -> None:
        needs = waiter.ticket.needs
        _put(group.lanes.setdefault(needs, _Lane()).flows, waiter)
        self._wanted.setdefault(needs, set()).add(waiter)


def _put(flows: dict[str, list[Waiter]], waiter: Waiter) -> None:
    insort(flows.setdefault(waiter.ticket.tenant, []), waiter, key=_arrival)


def _drop(flows: dict[str, list[Waiter]], waiter: Waiter) -> None:
    flow = flows[waiter.ticket.tenant]
    del flow[bisect_left(flow, waiter.number, key=_arrival)]
    if not flow:
        del flows[waiter.ticket.tenant]
