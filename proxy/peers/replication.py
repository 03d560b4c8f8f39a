"""What one process sends the others of its state, and how it applies what they send.

Every event gives a state as it is now. So the same event twice does no harm, and a process that has just started gets a
snapshot from one other while the rest go on sending changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, Generic, ParamSpec

from ..admission.rate_limits import Limit
from ..fleet.registry import Use, WorkerChange
from ..fleet.view import WorkerView
from ..fleet.worker import PairId, WorkerId
from ..health.canary import Canary
from ..health.circuit_breaker import Circuit
from ..health.poisoned_prompts import WORKERS
from ..health.prober import Prober
from ..health.worker_health import Key
from ..routing.state import State
from ..sessions.prefix_chain import PrefixEnd
from ..sessions.rendered_replies import Case
from ..sessions.session import Session
from ..settings import Settings
from .channels import Channels, Member
from .events import (
    CircuitChanged,
    ConfigChanged,
    ConfigRead,
    Event,
    InflightCount,
    LimitCharged,
    LimitOwed,
    PairsLeft,
    PromptSuspected,
    RepliesLearned,
    SessionDropped,
    SessionLearned,
    TemplateLearned,
    TurnsArrived,
    UseChanged,
    WorkerGone,
    WorkersAdded,
    WorkerSeen,
    WorkersPresent,
)

BATCH_SESSIONS = 200  # of a snapshot
FIRST_SESSIONS = 5_000  # of a larger snapshot
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Operated:
    """What operators may change while the proxy runs."""

    settings: Settings
    change: Callable[[Mapping[str, object]], None]  # sets live keys of the config in this process
    adopt: Callable[[Mapping[str, object], Mapping[str, object]], None]  # see `Settings.adopt`


@dataclass(frozen=True, slots=True)
class _Copies(Generic[P]):
    """A `Replicated`: `catch_up` drains the channels, `changed` sends."""

    catch_up: Callable[[], None]
    changed: Callable[P, None]


class Replication:
    """Keeps one process's state in step with the others'."""

    _channels: Channels  # set by `attach`; nothing is sent before

    def __init__(self, member: Member, state: State, canary: Canary, prober: Prober, operated: Operated) -> None:
        self._member = member
        self._state = state
        self._canary = canary
        self._prober = prober
        self._operated = operated
        self._used: set[WorkerId] = set()  # workers whose use has changed since it was sent
        self._turns_arrived = self._conversations_arrived = 0  # since it was sent
        self._inside_sent = InflightCount(0, 0)
        self._inside: dict[int, InflightCount] = {}  # by process
        self._appliers = self._make_appliers()

    def attach(self, channels: Channels) -> None:
        """From now on changes are sent, and decisions apply what the others sent before they read the state."""
        self._channels, state, catch_up = channels, self._state, channels.drain
        state.sessions.replicated = _Copies(catch_up, self._session_learned)
        state.templates.replicated = _Copies(catch_up, self._template_learned)
        state.sessions.rendered.replicated = _Copies(catch_up, self._replies_learned)
        state.registry.replicated = _Copies(catch_up, self._worker_changed)
        state.health.breakers.replicated = _Copies(catch_up, self._circuit_changed)
        state.rate_limits.replicated = _Copies(catch_up, self._limit_charged)
        state.admission.replicated = _Copies(catch_up, self._admission_changed)
        state.arrivals.replicated = _Copies(catch_up, self._turn_arrived)
        state.poisoned.replicated = _Copies(catch_up, self._prompt_suspected)
        self._canary.replicated = _Copies(catch_up, self._pairs_left)

    # -- sending

    def _session_learned(self, session: Session, label: int | None, keys: Iterable[int]) -> None:
        # At once: the answer's last bytes are about to go to the client, whose next turn may reach any process.
        self._channels.broadcast(SessionLearned(session, label, list(keys)))

    def _template_learned(self, model: str, score: int) -> None:
        self._channels.queue(TemplateLearned(model, score))

    def _replies_learned(self, case: Case, score: int) -> None:
        self._channels.queue(RepliesLearned(case, score))

    def _worker_changed(self, worker: WorkerId, change: WorkerChange) -> None:
        if change is WorkerChange.LEGS or change is WorkerChange.TOKENS:
            self._use_changed(worker, change)
        elif not self._member.leads:
            return
        elif change is WorkerChange.GONE:
            self._channels.queue(WorkerGone(worker))
        elif (view := self._state.registry.view(worker)) is not None:
            self._channels.queue(WorkerSeen(view))

    def _use_changed(self, worker: WorkerId, change: WorkerChange) -> None:
        self._used.add(worker)
        limit = self._operated.settings.config.max_worker_inflight
        if change is WorkerChange.LEGS and 2 * self._state.registry.inflight(worker) >= limit:
            self._channels.flush()  # so little room is left that all processes should know of each leg
        else:
            self._channels.schedule_flush()

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

    def _admission_changed(self) -> None:
        if self._state.admission.is_tight:
            self._channels.flush()
        else:
            self._channels.schedule_flush()

    def _turn_arrived(self, opens: bool) -> None:
        self._turns_arrived += 1
        self._conversations_arrived += opens
        self._channels.schedule_flush()

    def _pairs_left(self, left_to_turns: Collection[PairId]) -> None:
        self._channels.queue(PairsLeft(list(left_to_turns)))

    def pending(self) -> Iterator[Event]:
        """What changes at every turn: sent as it is at a flush, not step by step."""
        if self._turns_arrived:
            yield TurnsArrived(self._turns_arrived, self._conversations_arrived)
            self._turns_arrived = self._conversations_arrived = 0
        while self._used:
            use = self._state.registry.use(worker := self._used.pop())
            if use is not None:
                yield _use_event(self._member.index, worker, use)
        inside = self._own_inside()
        if inside != self._inside_sent:
            self._inside_sent = inside
            yield inside

    def _own_inside(self) -> InflightCount:
        return InflightCount(self._state.admission.inside, self._state.admission.waiting)

    def own(self) -> list[Event]:
        """What this process runs, for one that has just started."""
        registry = self._state.registry
        uses = [(view.id, registry.use(view.id)) for view in registry.views()]
        return [
            self._own_inside(),
            *(_use_event(self._member.index, worker, use) for worker, use in uses if use is not None),
        ]

    def snapshot(self) -> Iterator[list[Event]]:
        """All that this process knows, in batches; what changes between two of them is sent as a change."""
        state = self._state
        views, settings = state.registry.views(), self._operated.settings
        yield [
            WorkersPresent([view.id for view in views]),
            *map(WorkerSeen, views),
            WorkersAdded(list(settings.added)),
        ]
        yield [ConfigRead(*settings.live())]
        yield [TemplateLearned(model, score) for model, score in state.templates.scores()]
        yield [RepliesLearned(case, score) for case, score in state.sessions.rendered.scores()]
        yield [LimitOwed(name, limit, full_s) for name, limit, full_s in state.rate_limits.debts()]
        yield [_use_event(process, worker, use) for process, worker, use in state.registry.others()]
        yield [CircuitChanged(key, circuit) for key, circuit in state.health.breakers.circuits().items()]
        yield [PairsLeft(list(self._canary.left_to_turns))]
        yield [PromptSuspected(prompt, dict(losses)) for prompt, losses in state.poisoned.suspects()]
        sessions = self._sessions_to_send()
        while batch := list(islice(sessions, BATCH_SESSIONS)):
            yield [SessionLearned(session, *state.sessions.lookup_keys(session)) for session in batch]

    def _sessions_to_send(self) -> Iterator[Session]:
        """The newest first, as the next turns are likely theirs; then all, in the order in which they expire."""
        every = self._state.sessions.all()
        if len(every) > FIRST_SESSIONS:
            yield from every[-FIRST_SESSIONS:]
        yield from every
        sent_s = every[-1].seen_s if every else 0.0
        used = takewhile(lambda session: session.seen_s > sent_s, reversed(self._state.sessions.all()))
        yield from reversed(list(used))  # meanwhile: the older ones that were sent after them stand behind them

    # -- applying

    def apply(self, sender: int, event: Event) -> bool:
        """Whether the event is about the state, and so was applied."""
        apply = self._appliers.get(type(event))
        if apply is None:
            return False
        apply(sender, event)
        return True

    def drained(self) -> None:
        """All that has come is applied: only now is it known whether others have left room for waiting turns."""
        self._state.admission.admit_waiting()

    def restarted(self, process: int) -> None:
        """Its predecessor's turns are gone."""
        self._state.registry.ended(process)
        self._apply_inside(process, InflightCount(0, 0))

    def _make_appliers(self) -> dict[type[Event], Callable[[int, Any], object]]:
        state = self._state
        limits, now = state.rate_limits, state.now
        return {
            UseChanged: lambda _, event: self._apply_use(event),
            SessionLearned: lambda _, event: state.sessions.adopt(event.session, event.label, event.keys),
            TemplateLearned: lambda _, event: state.templates.adopt(event.model, event.score),
            RepliesLearned: lambda _, event: state.sessions.rendered.adopt(event.case, event.score),
            TurnsArrived: lambda _, event: state.arrivals.adopt(
                now(), turns=event.turns, conversations=event.conversations
            ),
            InflightCount: self._apply_inside,
            WorkerSeen: lambda _, event: self._apply_worker(event.view),
            WorkersPresent: lambda _, event: self._apply_fleet(event.workers),
            WorkersAdded: lambda _, event: self._apply_added(event.workers),
            WorkerGone: lambda _, event: self._lose_worker(event.worker),
            CircuitChanged: lambda _, event: state.health.adopt(event.key, event.circuit),
            PromptSuspected: lambda _, event: state.poisoned.adopt(event.prompt, event.losses),
            PairsLeft: lambda _, event: self._canary.adopt(event.left_to_turns),
            LimitCharged: lambda _, event: limits.charge(event.name, Limit(event.limit), event.seconds, now()),
            LimitOwed: lambda _, event: limits.owe(event.name, Limit(event.limit), event.full_s),
            SessionDropped: lambda _, event: state.sessions.drop(event.session_id),
            ConfigChanged: lambda _, event: self._operated.change(event.keys),
            ConfigRead: lambda _, event: self._operated.adopt(event.in_force, event.in_file),
        }

    def _apply_use(self, event: UseChanged) -> None:
        if event.by != self._member.index:  # a snapshot holds what a predecessor of this process did
            use = Use(event.inflight, event.queued_prefill_tokens, event.placed_tokens, event.answers)
            self._state.registry.used_by(event.by, event.worker, use)

    def _apply_inside(self, sender: int, event: InflightCount) -> None:
        self._inside[sender], admission = event, self._state.admission
        admission.inside_elsewhere = sum(inside.turns for inside in self._inside.values())
        admission.waiting_elsewhere = sum(inside.waiting for inside in self._inside.values())

    def _apply_added(self, workers: list[WorkerId]) -> None:
        self._operated.settings.added = set(workers)

    def _apply_fleet(self, workers: list[WorkerId]) -> None:
        for view in self._state.registry.views():
            if view.id not in workers:
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


def _use_event(process: int, worker: WorkerId, use: Use) -> UseChanged:
    return UseChanged(process, worker, use.inflight, use.queued_prefill_tokens, use.placed_tokens, use.answers)
