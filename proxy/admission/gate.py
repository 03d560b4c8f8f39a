"""Admission: how many turns are in the fleet, how many wait and for how long; the rest are refused with Retry-After.

The order is that of `queue`. This file has the futures, the deadlines and the counts. The counts are right whatever
happens, because each turn is admitted, refused or cancelled in exactly one synchronous step, and a client that leaves
while it is being admitted gives its permit back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from functools import partial

from ..errors import Overloaded
from ..runtime.loop_watch import STOOD_STILL_S, TimeLimit
from ..runtime.replicated import Replicated
from .arrival_rate import RateMeter
from .overload import Overload
from .queue import Ticket, Waiter, WaitingLine

RETRY_AFTER_S = (1.0, 60.0)  # the least and the most that a client is asked to wait
YIELD_S = 0.005  # for so long a permit that came free here is left to other processes, if turns wait there
DEPARTURES_S = 30.0  # over which the rate of leaving turns is measured

MESSAGES = {
    "queue_full": "the queue is full",
    "queue_timeout": "no worker had room for this request in time",
    "overload": "for some time now more requests have come than the workers can answer",
    "workers_overloaded": "the workers are overloaded for longer than this request can wait",
    "draining": "this proxy is shutting down",
}


class Permit:
    """A turn's right to be in the fleet; its holder calls `release` in a `finally`."""

    __slots__ = ("_admission", "_waiter")

    def __init__(self, admission: Admission, waiter: Waiter) -> None:
        self._admission: Admission | None = admission  # None: the turn is not inside
        self._waiter: Waiter | None = waiter

    def release(self) -> None:
        """A second call does nothing."""
        if self._admission is not None:
            admission, self._admission = self._admission, None
            admission.left()

    def settle(self) -> None:
        """The turn is answered and will not wait again: its ticket is not kept, as the answer may take long."""
        self._waiter = None

    async def wait_again(self, not_before_s: float, *, is_moved: bool = False) -> None:
        """Back into the queue, with the old arrival and deadline: the workers accept no more now.

        is_moved: the turn's worker has died. Then the limit of the queue does not hold for it, as all turns of that
        worker come at once, and `queue_timeout_s` counts from its first return: until then it did not wait.

        The permit is given up meanwhile, and not regained if this raises Overloaded (as `Admission.enter` does).
        """
        admission, self._admission = self._admission, None
        assert admission is not None and self._waiter is not None, "only a turn that is inside can go back"
        await admission.return_to_queue(self._waiter, not_before_s, is_moved=is_moved)
        self._admission = admission


class Admission:
    """Limits the turns inside and the turns that wait.

    on_refused(reason) and on_waited(seconds of a turn that waited and was admitted) are for metrics.
    """

    def __init__(
        self,
        *,
        max_inflight: int,
        queue_limit: int,
        queue_timeout_s: float,
        queue_wait_s: float,
        now: Callable[[], float],
        on_refused: Callable[[str], None],
        on_waited: Callable[[float], None],
    ) -> None:
        self.inside = 0
        # In the other processes of this proxy.
        self.inside_elsewhere = 0
        self.waiting_elsewhere = 0
        self.replicated: Replicated[[]] | None = None  # `changed`: a turn entered, waits, or left
        self._yielding: asyncio.TimerHandle | None = None  # until then free permits are left to other processes
        self._max_inflight = max_inflight
        self._queue_limit = queue_limit
        self._queue_timeout_s = queue_timeout_s
        self._now = now
        self._on_refused = on_refused
        self._on_waited = on_waited
        self._departures = RateMeter(DEPARTURES_S, now())
        self._overload = Overload(queue_wait_s, now())
        self._line = WaitingLine()
        self._futures: dict[Waiter, asyncio.Future[Overloaded | None]] = {}  # of all that wait; empty nearly always
        # By needs, turns that were admitted and have not run since: their load does not show in the fleet yet.
        self._admitted: dict[Hashable, Waiter] = {}
        self._arrivals = 0
        self._draining = False

    @property
    def waiting(self) -> int:
        return len(self._line) if self._futures else 0  # nearly always none

    @property
    def is_closed_down(self) -> bool:
        return self._draining

    def try_enter(self, ticket: Ticket) -> Permit | None:
        """A permit if one is free and no turn with equal needs waits; Overloaded when draining."""
        if self._draining:
            raise self._refusal("draining", ticket)
        if self.inside + self.inside_elsewhere >= self._max_inflight or self._yielding:
            return None
        if self._admitted and ticket.needs in self._admitted:
            return None
        if (self._futures and self._line.is_wanted(ticket.needs)) or not ticket.fits():
            return None
        self.inside += 1
        if self.replicated is not None:
            self.replicated.changed()
        return Permit(self, self._arrived(ticket))

    async def enter(self, ticket: Ticket) -> Permit:
        """A permit, at once or after a wait; Overloaded: queue_full, queue_timeout, overload or draining.

        The caller takes its room on a worker before its next await: only then the next turn with equal needs is
        admitted.
        """
        return self.try_enter(ticket) or await self.wait(ticket)

    async def wait(self, ticket: Ticket) -> Permit:
        """As `enter`, of a turn for which there was none at once."""
        waiter = self._arrived(ticket)
        await self._wait(waiter)
        return Permit(self, waiter)

    def admit_waiting(self) -> None:
        if not self._futures or self._yielding is not None or not self._line:
            return
        self._catch_up()  # another process may have taken the free permit by now
        while self._line and self.inside + self.inside_elsewhere < self._max_inflight:
            waiter = self._line.take(self._has_room)
            if waiter is None:
                return
            future = self._futures[waiter]
            if future.done():  # its client left in this iteration of the event loop
                waiter.refund()
                continue
            self.inside += 1
            self._changed()
            self._admitted[waiter.ticket.needs] = waiter
            future.set_result(None)

    def close_down(self) -> None:
        self._draining = True  # the turns inside go on
        for waiter in list(self._line):
            self._turn_away(waiter, "draining")

    def left(self) -> None:
        self.inside -= 1
        if self.replicated is not None:
            self.replicated.changed()
        now_s = self._now()
        self._departures.count(now_s)
        if not self._futures:  # none waits
            return
        self._overload.departed(now_s)
        if self.waiting_elsewhere and self._line:  # else our own turns would take every permit that comes free here
            self._yielding = self._yielding or asyncio.get_running_loop().call_later(YIELD_S, self._end_yield)
        else:
            self.admit_waiting()

    async def return_to_queue(self, waiter: Waiter, not_before_s: float, *, is_moved: bool) -> None:
        if is_moved and waiter.moved_s is None:
            waiter.moved_s = self._now()
        self.inside -= 1
        self._changed()
        waiter.refund()
        waiter.was_inside = True
        self.admit_waiting()
        if self._draining:
            raise self._refusal("draining", waiter.ticket)
        deadline_s = self._deadline_s(waiter)
        if self._now() < deadline_s <= not_before_s:  # no worker accepts it before its deadline
            raise self._refusal("workers_overloaded", waiter.ticket, not_before_s - self._now())
        await self._wait(waiter, not_before_s)

    async def _wait(self, waiter: Waiter, not_before_s: float = 0.0) -> None:
        loop, started_s = asyncio.get_running_loop(), self._now()
        left_s = self._deadline_s(waiter) - started_s
        if left_s <= 0:
            raise self._refusal("queue_timeout", waiter.ticket)
        # Once the process has stood still it takes a moment until it knows whose places have become free.
        over = partial(self._turn_away, waiter, "queue_timeout")
        timers: list[asyncio.TimerHandle | TimeLimit] = [TimeLimit(left_s, over, again_s=STOOD_STILL_S)]
        pause_s = not_before_s - started_s
        if pause_s > 0:
            timers.append(loop.call_later(pause_s, self._due, waiter))
        future = self._futures[waiter] = loop.create_future()
        self._line.add(waiter, parked=pause_s > 0)
        self._changed()
        try:
            self.admit_waiting()
            self._overload.queue_is(self.waiting, started_s)
            self._shed(waiter)
            refusal = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.result() is None:
                self.inside -= 1  # admitted, but its client left first
                waiter.refund()
            raise
        finally:
            for timer in timers:
                timer.cancel()
            self._line.remove(waiter)
            self._overload.queue_is(self.waiting, self._now())
            del self._futures[waiter]
            self._changed()
            if self._admitted.get(waiter.ticket.needs) is waiter:
                del self._admitted[waiter.ticket.needs]
                loop.call_soon(self.admit_waiting)  # after this turn has taken its room on a worker
        if refusal is not None:
            raise refusal
        self._catch_up()
        self._on_waited(self._now() - started_s)

    def _shed(self, newest: Waiter) -> None:
        """Turns away those that are one too many and, under overload, those that wait or would wait too long."""
        now_s = self._now()
        limit_s = self._overload.wait_limit_s(self.inside, now_s)
        if limit_s < math.inf:
            oldest_s, most = now_s - limit_s, max(1.0, limit_s * self._overload.rate_rps(now_s))
            for waiter in [one for one in self._line if one.ticket.arrived_s < oldest_s and not one.was_inside]:
                self._turn_away(waiter, "overload")
            lasts = self._line.lasts(newest)
            while len(self._line) > most and not (last := next(lasts)).was_inside:
                self._turn_away(last, "overload")
        if len(self._line) > self._queue_limit and newest.moved_s is None:
            self._turn_away(self._line.last(newest), "queue_full")

    def _end_yield(self) -> None:
        self._yielding = None
        self.admit_waiting()

    @property
    def is_tight(self) -> bool:
        """Whether so few permits are left that all processes should hear of each change."""
        return 2 * (self.inside + self.inside_elsewhere) >= self._max_inflight

    def _catch_up(self) -> None:
        if self.replicated is not None:
            self.replicated.catch_up()

    def _changed(self) -> None:
        if self.replicated is not None:
            self.replicated.changed()

    def _arrived(self, ticket: Ticket) -> Waiter:
        self._arrivals += 1
        if self._futures:
            self._overload.arrived(self._now())
        return Waiter(ticket, self._arrivals)

    def _deadline_s(self, waiter: Waiter) -> float:
        since_s = waiter.ticket.arrived_s if waiter.moved_s is None else waiter.moved_s
        return min(waiter.ticket.deadline_s, since_s + self._queue_timeout_s)

    def _has_room(self, ticket: Ticket) -> bool:
        return ticket.needs not in self._admitted and ticket.fits()

    def _due(self, waiter: Waiter) -> None:
        self._line.unpark(waiter)
        self.admit_waiting()

    def _turn_away(self, waiter: Waiter, reason: str) -> None:
        self._line.remove(waiter)
        future = self._futures[waiter]
        if not future.done():
            future.set_result(self._refusal(reason, waiter.ticket))

    def _refusal(self, reason: str, ticket: Ticket, retry_after_s: float | None = None) -> Overloaded:
        self._on_refused(reason)
        least_s, most_s = RETRY_AFTER_S
        if reason == "draining":
            retry_after_s = least_s  # another proxy takes the turn, or this one when it is back
        elif retry_after_s is None:
            rate_rps = self._departures.rate_rps(self._now())
            # Without a measured rate: by then all that wait now are served, or have timed out.
            unknown_s = self._queue_timeout_s
            retry_after_s = (self._line.ahead(ticket.priority) + 1) / rate_rps if rate_rps > 0 else unknown_s
        return Overloaded(MESSAGES[reason], reason=reason, retry_after_s=max(least_s, min(most_s, retry_after_s)))
