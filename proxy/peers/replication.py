"""What one process sends the others of its state, and how it applies what they send.

Every event gives a state as it is now. So the same event twice does no harm, and a process that has just started gets a
snapshot from one other while the rest go on sending changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from ..admission.rate_limits import Limit
from ..fleet.registry import WorkerChange
from ..fleet.view import WorkerView
from ..fleet.worker import PairId, WorkerId
from ..health.canary import Canary
from ..health.circuit_breaker import Circuit
from ..health.poisoned_prompts import WORKERS
from ..health.prober import Prober
from ..health.worker_health import Key
from ..routing.state import State
from ..sessions.prefix_chain import PrefixEnd
from ..settings import Settings
from .channels import Channels, Member
from .events import (
    AnyEvent,
    Appliers,
    CircuitChanged,
    ConfigChanged,
    ConfigRead,
    EnginesMet,
    LimitCharged,
    LimitOwed,
    PairsLeft,
    PromptSuspected,
    WorkerGone,
    WorkersAdded,
    WorkerSeen,
    WorkersPresent,
)
from .turn_replication import Copies, TurnReplication


@dataclass(frozen=True, slots=True)
class Operated:
    """What operators may change while the proxy runs."""

    settings: Settings
    change: Callable[[Mapping[str, object]], None]  # sets live keys of the config in this process
    adopt: Callable[[Mapping[str, object], Mapping[str, object]], None]  # see `Settings.adopt`


class Replication:
    """Keeps one process's state in step with the others'."""

    _channels: Channels  # set by `attach`; nothing is sent before

    def __init__(self, member: Member, state: State, canary: Canary, prober: Prober, operated: Operated) -> None:
        self._member = member
        self._state = state
        self._canary = canary
        self._prober = prober
        self._operated = operated
        self.turns = TurnReplication(member, state, lambda: operated.settings.config.max_worker_inflight)
        self.appliers = self._make_appliers()
        # Only where all that has come is applied is it known whether others have left room for waiting turns.
        self.drained = state.admission.admit_waiting

    def attach(self, channels: Channels) -> None:
        """From now on changes are sent, and decisions apply what the others sent before they read the state."""
        self._channels, state, catch_up = channels, self._state, channels.drain
        self.turns.attach(channels)
        state.registry.replicated = Copies(catch_up, self._worker_changed)
        state.health.breakers.replicated = Copies(catch_up, self._circuit_changed)
        state.rate_limits.replicated = Copies(catch_up, self._limit_charged)
        state.poisoned.replicated = Copies(catch_up, self._prompt_suspected)
        self._canary.replicated = Copies(catch_up, self._pairs_left)

    # -- sending

    def _worker_changed(self, worker: WorkerId, change: WorkerChange) -> None:
        if not self._member.leads:
            return
        if change is WorkerChange.GONE:
            self._channels.queue(WorkerGone(worker))
        elif (view := self._state.registry.view(worker)) is not None:
            self._channels.queue(WorkerSeen(view))

    def _circuit_changed(self, key: Key, circuit: Circuit | None) -> None:
        self._channels.queue(CircuitChanged(key, circuit))
        if circuit is not None and circuit.probe_s is not None:
            self._channels.flush()  # or another process would probe too

    def _prompt_suspected(self, prompt: PrefixEnd, losses: Mapping[str, float]) -> None:
        self._channels.queue(PromptSuspected(prompt, dict(losses)))
        if len(losses) >= WORKERS:
            self._channels.flush()  # its client may repeat it at once, to any process

    def _limit_charged(self, name: str, limit: Limit, seconds: float) -> None:
        self._channels.queue(LimitCharged(name, limit, seconds))
        self._channels.flush()  # or a burst would have its allowance in each process

    def _pairs_left(self, left_to_turns: Collection[PairId]) -> None:
        self._channels.queue(PairsLeft(list(left_to_turns), list(self._state.health.strangers.unproven)))

    def snapshot(self) -> Iterator[list[AnyEvent]]:
        """All that this process knows, in batches; what changes between two of them is sent as a change."""
        state = self._state
        views, settings = state.registry.views(), self._operated.settings
        # The config first: where it names other workers than the receiver's, what an operator did to those would end.
        yield [
            ConfigRead(*settings.live()),
            WorkersPresent([view.id for view in views]),
            *map(WorkerSeen, views),
            WorkersAdded(list(settings.added), list(settings.overruled)),
        ]
        yield [LimitOwed(name, limit, full_s) for name, limit, full_s in state.rate_limits.debts()]
        yield [CircuitChanged(key, circuit) for key, circuit in state.health.breakers.circuits.items()]
        strangers = state.health.strangers
        yield [EnginesMet(strangers.met()), PairsLeft(list(self._canary.left_to_turns), list(strangers.unproven))]
        yield [PromptSuspected(prompt, dict(losses)) for prompt, losses in state.poisoned.all_losses()]
        yield from self.turns.snapshot()

    # -- applying

    def _make_appliers(self) -> Appliers:
        state = self._state
        limits, now = state.rate_limits, state.now
        return {
            **self.turns.appliers(),
            WorkerSeen: lambda _, event: self._apply_worker(event.view),
            WorkersPresent: lambda _, event: self._apply_fleet(event.workers),
            WorkersAdded: lambda _, event: self._apply_added(event),
            WorkerGone: lambda _, event: self._lose_worker(event.worker),
            CircuitChanged: lambda _, event: state.health.adopt(event.key, event.circuit),
            PromptSuspected: lambda _, event: state.poisoned.adopt(event.prompt, event.losses),
            EnginesMet: lambda _, event: state.health.strangers.adopt(event.met),
            PairsLeft: lambda _, event: self._canary.adopt(event.left_to_turns, event.unproven),
            LimitCharged: lambda _, event: limits.charge(event.name, Limit(event.limit), event.seconds, now()),
            LimitOwed: lambda _, event: limits.owe(event.name, Limit(event.limit), event.full_s),
            ConfigChanged: lambda _, event: self._operated.change(event.keys),
            ConfigRead: lambda _, event: self._operated.adopt(event.in_force, event.in_file),
        }

    def _apply_added(self, event: WorkersAdded) -> None:
        settings = self._operated.settings
        settings.added, settings.overruled = set(event.workers), set(event.overruled)

    def _apply_fleet(self, workers: list[WorkerId]) -> None:
        left = set(workers)
        for view in self._state.registry.views():
            if view.id not in left:
                self._lose_worker(view.id)

    def _apply_worker(self, view: WorkerView) -> None:
        before = self._state.registry.view(view.id)
        self._state.registry.adopt(view)
        if before is not None and before.up and not view.up:
            self._prober.doubt(view)  # this process's turns there may be lost

    def _lose_worker(self, worker: WorkerId) -> None:
        view = self._state.registry.view(worker)
        self._state.registry.dismiss(worker)
        if view is not None:
            self._prober.doubt(view)
