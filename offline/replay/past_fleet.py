"""The workers as the log shows them at each moment: who is there, and how busy.

A worker is there from a minute before its first leg in the log to a minute after its last. Its load is that of the
log's turns. What other proxies had it do is not in the log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from ppd.proxy.connectors.nixl import READS_BACK
from ppd.proxy.fleet.view import NO_PROMPTS, Fleet, RecentPrompts, Takers, WorkerView, taking_turns
from ppd.proxy.fleet.worker import Load, Role, Worker, WorkerId
from ppd.proxy.laws.prediction import EngineLaws, Laws, idle_ttft_s, prefill_steps, prefill_time_s

from .past_turns import LegTimes, PastTurn, workers_of

UNUSED_S = 60.0  # for which a worker is believed to be there without a leg, before the first and after the last
USUAL_CAPACITY_TOKENS = 400_000  # of a worker without a profile
CLOCK_S = 0.001  # receipts tell times to the millisecond, so a turn may seem to come before the answer before it ended


@dataclass(slots=True, eq=False)
class PastWorker:
    """One worker of the log while it is played."""

    worker: Worker
    name: str
    first_s: float
    last_s: float
    capacity_tokens: int = USUAL_CAPACITY_TOKENS
    laws: EngineLaws | None = None
    inflight: int = 0
    decoding: int = 0
    context_tokens: int = 0
    prefills: int = 0
    queued_tokens: int = 0
    queued_s: float = 0.0
    since_s: float = 0.0
    recent_prompts: RecentPrompts = NO_PROMPTS
    _view: WorkerView | None = None

    def engine(self) -> WorkerView:
        """With what never changes alone."""
        load = Load(kv_capacity_tokens=self.capacity_tokens)
        return WorkerView(worker=self.worker, name=self.name, incarnation="", load=load)

    def view(self) -> WorkerView:
        if self._view is None:
            self._view = WorkerView(
                worker=self.worker,
                name=self.name,
                incarnation="",
                inflight=self.inflight,
                queued_prefill_tokens=self.queued_tokens,
                decoding=self.decoding,
                context_tokens=self.context_tokens,
                prefills=self.prefills,
                queued_prefill_s=self.queued_s,
                prefills_since_s=self.since_s,
                recent_prompts=self.recent_prompts,
            )
        return self._view

    def computes(self, now_s: float, tokens: int, took_s: float, patience_s: float) -> None:
        steps_s = 0.0 if self.laws is None else prefill_steps(self.laws.costs, tokens) * self.laws.costs.step_s
        self.recent_prompts = self.recent_prompts.plus(max(0.0, took_s - steps_s), patience_s, now_s)
        if not self.prefills:
            self.since_s = now_s
        self.prefills += 1
        self.queued_tokens += tokens
        self.queued_s += took_s
        self._view = None

    def computed(self, now_s: float, tokens: int, took_s: float) -> None:
        self.prefills -= 1
        self.queued_tokens -= tokens
        self.queued_s = self.queued_s - took_s if self.prefills else 0.0
        self.since_s = now_s
        self._view = None

    def legs(self, more: int) -> None:
        self.inflight += more
        self._view = None

    def decodes(self, more: int, context_tokens: int) -> None:
        self.decoding += more
        self.context_tokens += context_tokens
        self._view = None


class PastFleet:
    """Play the turns in the log's order: `at` each, then `begin` it."""

    def __init__(self, turns: Iterable[PastTurn], laws: Laws, capacity_tokens: int = USUAL_CAPACITY_TOKENS) -> None:
        self._workers = _workers(turns, laws, capacity_tokens)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = 0
        self._engines: dict[WorkerId, WorkerView] = {}  # that are there
        self._takers: dict[str, Takers] = {}
        for worker in self._workers.values():
            self.when(worker.first_s, self._come(worker))
            self.when(worker.last_s, self._leave(worker))

    @property
    def workers(self) -> dict[WorkerId, PastWorker]:
        return self._workers

    def at(self, now_s: float, model: str) -> Fleet:
        events, until_s = self._events, now_s + CLOCK_S
        while events and events[0][0] <= until_s:
            time_s, _, happen = heappop(events)
            happen(time_s)
        views = {worker: self._workers[worker].view() for worker in self._engines}
        if (takers := self._takers.get(model)) is None:
            takers = self._takers[model] = taking_turns([views[worker] for worker in sorted(views)], model)
        return Fleet.of(views, takers)

    def engine(self, worker: WorkerId) -> WorkerView | None:
        """With the capacity of its cache; None: it is not there."""
        return self._engines.get(worker)

    def begin(self, turn: PastTurn, new_tokens: int) -> float:
        """The turn goes the way that it went. new_tokens: that it computed. Returns when its prompt was computed."""
        leg = turn.answering if turn.prefill is None else turn.prefill
        computing = self._workers[WorkerId(leg.address)]
        answering = self._workers[WorkerId(turn.answering.address)]
        now_s, context = turn.decided_s, turn.prompt_tokens + turn.output_tokens // 2
        took_s, patience_s = _work(computing.laws, turn, new_tokens)
        first_s = leg.ended_s if turn.prefill is not None else _first_s(leg, computing, now_s, took_s)
        computing.computes(now_s, new_tokens, took_s, patience_s)
        computing.legs(1)
        if turn.prefill is not None:
            answering.legs(1)
            answering.decodes(1, context)

        def computed(time_s: float) -> None:
            computing.computed(time_s, new_tokens, took_s)
            if turn.prefill is not None:
                computing.legs(-1)
            else:
                answering.decodes(1, context)

        def end(_: float) -> None:
            answering.legs(-1)
            answering.decodes(-1, -context)

        self.when(first_s, computed)
        self.when(max(turn.answering.ended_s, first_s), end)
        return first_s

    def _come(self, worker: PastWorker) -> Callable[[float], None]:
        def come(_: float) -> None:
            self._engines[worker.worker.id] = worker.engine()
            self._takers.clear()

        return come

    def _leave(self, worker: PastWorker) -> Callable[[float], None]:
        def leave(_: float) -> None:
            self._engines.pop(worker.worker.id, None)
            self._takers.clear()

        return leave

    def when(self, time_s: float, happen: Callable[[float], None]) -> None:
        """It happens at that time, which it is told, once the turns have been played up to there."""
        self._serial += 1
        heappush(self._events, (time_s, self._serial, happen))


def _workers(turns: Iterable[PastTurn], laws: Laws, capacity_tokens: int) -> dict[WorkerId, PastWorker]:
    models, legs = dict[str, set[str]](), dict[str, tuple[LegTimes, float]]()
    reading = set[str]()
    for turn, leg in workers_of(turns):
        if turn.route == "READBACK":
            reading.add(leg.address)
        known = legs.get(leg.address)
        first = leg if known is None or leg.began_s < known[0].began_s else known[0]
        legs[leg.address] = first, max(leg.began_s, -math.inf if known is None else known[1])
        models.setdefault(leg.address, set()).add(turn.model)
    found = dict[WorkerId, PastWorker]()
    for address, (leg, last_s) in legs.items():
        role = Role(leg.worker[:1]) if leg.worker[:1] in [*Role] else Role.DECODE
        coordinates = {READS_BACK: "true"} if address in reading else {}
        worker = Worker(role=role, address=address, models=tuple(sorted(models[address])), coordinates=coordinates)
        past = PastWorker(worker, leg.worker, leg.began_s - UNUSED_S, last_s + UNUSED_S, capacity_tokens)
        past.laws = laws.of(past.view())
        found[worker.id] = past
    return found


def _work(laws: EngineLaws | None, turn: PastTurn, new_tokens: int) -> tuple[float, float]:
    """Seconds of the engine that its prompt takes, and how long it could have waited, by its targets."""
    if laws is None:
        return 0.0, turn.slo.ttft_s
    took_s = prefill_time_s(laws.costs, new_tokens, turn.prompt_tokens - new_tokens)
    idle_s = idle_ttft_s(laws.costs, turn.prompt_tokens, turn.prompt_tokens - new_tokens)
    patience_s = turn.slo.ttft_limit_s(idle_s) - idle_s
    return took_s, patience_s if patience_s > 0.0 else math.inf  # as in the proxy: late in any case


def _first_s(leg: LegTimes, computing: PastWorker, now_s: float, took_s: float) -> float:
    """When the prompt was computed; of an answer that came as a whole, by the laws."""
    if leg.first_s is not None and leg.first_s < leg.ended_s:
        return max(now_s, leg.first_s)
    return min(max(now_s, leg.ended_s), now_s + computing.queued_s + took_s)
