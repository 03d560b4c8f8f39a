"""The workers as the log shows them at each moment: who is there, and how busy.

A worker is there from a minute before its first leg in the log to a minute after its last. What the log's turns do
there is booked as the proxy books it, at the times of their legs. What other proxies had it do is not in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from msgspec.structs import replace

from ppd.proxy.connectors.nixl import READS_BACK
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.ledger import LegEstimates, prefill_left_s
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import Fleet, WorkerView
from ppd.proxy.fleet.worker import Announcement, Load, Role, Source, Worker, WorkerId

from .past_turns import LegTimes, PastTurn, workers_of

UNUSED_S = 60.0  # for which a worker is believed to be there without a leg, before the first and after the last
CLOCK_S = 0.001  # receipts tell times to the millisecond, so a turn may seem to come before the answer before it ended


class PastFleet:
    """Play the turns in the log's order: `at` each, then `begin` it."""

    def __init__(self, turns: Iterable[PastTurn], capacity_tokens: int) -> None:
        """capacity_tokens: of KV, on each worker."""
        self._registry = Registry()
        self._capacity_tokens = capacity_tokens
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = 0
        self._engines: dict[WorkerId, WorkerView] = {}  # that are there
        for worker, first_s, last_s in _workers(turns):
            self.when(first_s - UNUSED_S, self._come(worker))
            self.when(last_s + UNUSED_S, self._leave(worker))

    def at(self, now_s: float, model: str) -> Fleet:
        events, until_s = self._events, now_s + CLOCK_S
        while events and events[0][0] <= until_s:
            time_s, _, happen = heappop(events)
            happen(time_s)
        return self._registry.fleet(model)

    def engine(self, worker: WorkerId) -> WorkerView | None:
        """With the capacity of its cache; None: it is not there."""
        return self._engines.get(worker)

    def begin(self, turn: PastTurn, estimates: LegEstimates) -> float:
        """The turn goes the way that it went. Returns when its prompt was computed."""
        answering, now_s, computed_s = turn.answering, turn.decided_s, self._computed_s(turn, estimates)
        decode = WorkerId(answering.address)
        prefill = None if turn.prefill is None else WorkerId(turn.prefill.address)
        booking = LegBooking(self._registry, decode, prefill, estimates, decode if turn.route == "READBACK" else None)
        booking.reserve(now_s)
        self._report(decode, now_s)
        ended_s = max(answering.ended_s, computed_s)
        answers_s = computed_s
        if prefill is not None:
            self.when(computed_s, booking.free_prefill)
            answers_s = ended_s if answering.first_s is None else min(ended_s, max(computed_s, answering.first_s))

        def end(time_s: float) -> None:
            booking.release(time_s)
            self._report(decode, time_s)

        self.when(answers_s, booking.computed)
        self.when(ended_s, end)
        return computed_s

    def _computed_s(self, turn: PastTurn, estimates: LegEstimates) -> float:
        """Of an answer that came as a whole, by the laws."""
        leg, now_s = turn.answering, turn.decided_s
        if turn.prefill is not None:
            return turn.prefill.ended_s
        if leg.first_s is not None and leg.first_s < leg.ended_s:
            return max(now_s, leg.first_s)
        view = self._registry.view(WorkerId(leg.address))
        before_s = 0.0 if view is None else prefill_left_s(view, now_s)
        return min(max(now_s, leg.ended_s), now_s + before_s + estimates.prefill_s)

    def _report(self, worker: WorkerId, now_s: float) -> None:
        """The KV in use, as its engine would tell it; nothing of a queue, so that no worker is ever full."""
        view = self._registry.view(worker)
        if view is not None:
            self._registry.loaded(worker, Load(kv_usage=min(1.0, view.context_tokens / self._capacity_tokens)), now_s)

    def _come(self, worker: Worker) -> Callable[[float], None]:
        def come(_: float) -> None:
            self._registry.apply(Announcement(worker), 0.0)  # long ago: it is in no slow start
            view = self._registry.view(worker.id)
            assert view is not None, "it has just come"
            self._engines[worker.id] = replace(view, load=Load(kv_capacity_tokens=self._capacity_tokens))

        return come

    def _leave(self, worker: Worker) -> Callable[[float], None]:
        def leave(_: float) -> None:
            self._registry.remove(worker.id)
            del self._engines[worker.id]

        return leave

    def when(self, time_s: float, happen: Callable[[float], None]) -> None:
        """It happens at that time, which it is told, once the turns have been played up to there."""
        self._serial += 1
        heappush(self._events, (time_s, self._serial, happen))


def _workers(turns: Iterable[PastTurn]) -> list[tuple[Worker, float, float]]:
    """With the beginnings of the first and of the last leg of each."""
    legs, models = dict[str, tuple[LegTimes, float]](), dict[str, set[str]]()
    reading = set[str]()
    for turn, leg in workers_of(turns):
        if turn.route == "READBACK":
            reading.add(leg.address)
        first, last_s = legs.get(leg.address, (leg, leg.began_s))
        legs[leg.address] = leg if leg.began_s < first.began_s else first, max(leg.began_s, last_s)
        models.setdefault(leg.address, set()).add(turn.model)
    found = list[tuple[Worker, float, float]]()
    for address, (leg, last_s) in legs.items():
        role = Role(leg.worker[:1]) if leg.worker[:1] in [*Role] else Role.DECODE
        coordinates = {READS_BACK: "true"} if address in reading else {}
        served = tuple(sorted(models[address]))
        worker = Worker(role=role, address=address, models=served, coordinates=coordinates, source=Source.AGENT)
        found.append((worker, leg.began_s, last_s))
    return found
