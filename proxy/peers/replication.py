"""What one process tells the others of its state, and what it makes of what they tell.

Every event names a state as it is now. So the same one twice does no harm, and a process that has just begun learns all
there is from one other, while the rest go on talking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..admission.rate_limits import Limit
from ..config import LIVE
from ..fleet.registry import Hooks, Use
from ..fleet.view import WorkerView
from ..fleet.worker import WorkerId
from ..health.canary import Canary
from ..health.circuit_breaker import Circuit
from ..health.prober import Prober
from ..health.worker_health import Key
from ..routing.state import State
from ..sessions.session import Session
from ..settings import Settings
from .channels import Mesh
from .events import (
    Added,
    Broke,
    Came,
    Changed,
    Charged,
    Event,
    Flown,
    Forgotten,
    Gone,
    InflightCount,
    Learned,
    Owed,
    Present,
    Seen,
    Used,
)
from .member import Member

AT_ONCE = 200  # sessions in one batch


@dataclass(frozen=True, slots=True)
class Operated:
    """What operators may change while the proxy runs."""

    settings: Settings
    change: Callable[[Mapping[str, object]], None]  # sets live keys of the config, here


class Replica:
    """One process's state, and the others' part in it."""

    def __init__(
        self,
        member: Member,
        state: State,
        canary: Canary,
        prober: Prober,
        operated: Operated,
    ) -> None:
        self._member = member
        self._state = state
        self._canary = canary
        self._prober = prober
        self._operated = operated
        self._mesh: Mesh | None = None
        self._used: set[WorkerId] = set()  # changed since it was told
        self._turns_came = self._conversations_came = 0  # since it was told
        self._inside_told = InflightCount(0, 0)
        self._inside: dict[int, InflightCount] = {}
        self._take = self._deeds()

    def attach(self, mesh: Mesh) -> None:
        """From now on changes are told, and sessions are looked for when all that was said is heard."""
        self._mesh = mesh
        state = self._state
        state.sessions.before_look = mesh.drain
        state.rate_limits.before_look = mesh.drain
        state.sessions.on_learned = self._learned
        state.registry.hooks = Hooks(
            seen=lambda view: mesh.tell(Seen(view)) if self._member.leads else None,
            gone=lambda worker: mesh.tell(Gone(worker)) if self._member.leads else None,
            used=self._use_changed,
        )
        state.health.breakers.on_change = self._circuit_changed
        state.rate_limits.on_charged = self._charged
        state.admission.on_moved = self._moved
        state.admission.before_look = mesh.drain
        state.arrivals.on_counted = self._arrived
        self._canary.on_flown = lambda tried, left: mesh.tell(Flown(list(tried), list(left)))
        mesh.before_flush = self._news
        mesh.after_hearing = state.admission.poke  # not sooner: what one gave back another may have taken

    # -- what is told

    def _learned(self, session: Session, label: int | None, keys: Iterable[int]) -> None:
        # At once: the answer's last bytes are about to go to the client, whose next turn may land on any process.
        assert self._mesh is not None
        self._mesh.say(Learned(session, label, list(keys)))

    def _charged(self, name: str, limit: Limit, seconds: float) -> None:
        self._tell(Charged(name, limit, seconds), at_once=True)  # or a burst would have its allowance in each process

    def _circuit_changed(self, key: Key, circuit: Circuit | None) -> None:
        self._tell(Broke(key, circuit), at_once=circuit is not None and circuit.probe_s is not None)

    def _moved(self) -> None:
        assert self._mesh is not None
        if self._state.admission.is_tight:
            self._mesh.flush()
        else:
            self._mesh.remind()

    def _tell(self, event: Event, *, at_once: bool) -> None:
        assert self._mesh is not None
        self._mesh.tell(event)
        if at_once:
            self._mesh.flush()

    def _use_changed(self, worker: WorkerId, moved: bool) -> None:
        assert self._mesh is not None
        self._used.add(worker)
        limit = self._operated.settings.config.max_worker_inflight
        if moved and 2 * self._state.registry.inflight(worker) >= limit:
            self._mesh.flush()  # so few places are left that all processes should know of each
        else:
            self._mesh.remind()

    def _arrived(self, opens: bool) -> None:
        assert self._mesh is not None
        self._turns_came += 1
        self._conversations_came += opens
        self._mesh.remind()

    def _news(self) -> Iterator[Event]:
        """Of what goes on all the time: how it stands, and not each step to there."""
        if self._turns_came:
            yield Came(self._turns_came, self._conversations_came)
            self._turns_came = self._conversations_came = 0
        while self._used:
            use = self._state.registry.use(worker := self._used.pop())
            if use is not None:
                yield _used(self._member.index, worker, use)
        inside = self._own_inside()
        if inside != self._inside_told:
            self._inside_told = inside
            yield inside

    def _own_inside(self) -> InflightCount:
        return InflightCount(self._state.admission.inside, self._state.admission.waiting)

    def own(self) -> list[Event]:
        """What this process does, for one that has just begun."""
        registry = self._state.registry
        used = [(view.id, registry.use(view.id)) for view in registry.views()]
        return [
            self._own_inside(),
            *(_used(self._member.index, worker, use) for worker, use in used if use is not None),
        ]

    def everything(self) -> Iterator[list[Event]]:
        """All that this process knows, in batches; what changes between two of them is told by itself."""
        state = self._state
        views, settings = state.registry.views(), self._operated.settings
        yield [Present([view.id for view in views]), *map(Seen, views), Added(list(settings.added))]
        yield [Changed({name: getattr(settings.config, name) for name in sorted(LIVE - {"workers"})})]
        yield [Owed(name, limit, full_s) for name, limit, full_s in state.rate_limits.debts()]
        yield [_used(process, worker, use) for process, worker, use in state.registry.others()]
        yield [Broke(key, circuit) for key, circuit in state.health.breakers.circuits().items()]
        yield [Flown(*map(list, self._canary.flown))]
        sessions = iter(state.sessions.all())
        while batch := list(islice(sessions, AT_ONCE)):
            yield [Learned(session, *state.sessions.ways_to(session)) for session in batch]

    # -- what is heard

    def hear(self, sender: int, event: Event) -> bool:
        """Takes what another process says, if it is about the state."""
        take = self._take.get(type(event))
        if take is None:
            return False
        take(sender, event)
        return True

    def begun_anew(self, process: int) -> None:
        """It runs nothing, whatever was said of its predecessor."""
        self._state.registry.ended(process)
        self._take_inside(process, InflightCount(0, 0))

    def _deeds(self) -> dict[type[Event], Callable[[int, Any], object]]:
        state = self._state
        limits, now = state.rate_limits, state.now
        return {
            Used: lambda _, said: self._take_use(said),
            Learned: lambda _, said: state.sessions.adopt(said.session, said.label, said.keys),
            Came: lambda _, said: state.arrivals.adopt(now(), turns=said.turns, conversations=said.conversations),
            InflightCount: self._take_inside,
            Seen: lambda _, said: self._take_worker(said.view),
            Present: lambda _, said: self._take_fleet(said.workers),
            Added: lambda _, said: self._take_added(said.workers),
            Gone: lambda _, said: self._lose_worker(said.worker),
            Broke: lambda _, said: state.health.adopt(said.key, said.circuit),
            Flown: lambda _, said: self._canary.adopt(said.tried, said.left_to_turns),
            Charged: lambda _, said: limits.charge(said.name, Limit(said.limit), said.seconds, now()),
            Owed: lambda _, said: limits.owe(said.name, Limit(said.limit), said.full_s),
            Forgotten: lambda _, said: state.sessions.drop(said.session_id),
            Changed: lambda _, said: self._operated.change(said.keys),
        }

    def _take_use(self, said: Used) -> None:
        registry = self._state.registry
        if said.by == self._member.index:
            registry.inherit(said.worker, said.written_tokens)
        else:
            use = Use(said.inflight, said.queued_prefill_tokens, said.written_tokens)
            registry.used_by(said.by, said.worker, use)

    def _take_inside(self, sender: int, said: InflightCount) -> None:
        self._inside[sender], admission = said, self._state.admission
        admission.inside_elsewhere = sum(inside.turns for inside in self._inside.values())
        admission.waiting_elsewhere = sum(inside.waiting for inside in self._inside.values())

    def _take_added(self, workers: list[WorkerId]) -> None:
        self._operated.settings.added = set(workers)

    def _take_fleet(self, workers: list[WorkerId]) -> None:
        for view in self._state.registry.views():
            if view.id not in workers:
                self._lose_worker(view.id)

    def _take_worker(self, view: WorkerView) -> None:
        before = self._state.registry.view(view.id)
        self._state.registry.adopt(view)
        if before is not None and before.up and not view.up:
            self._prober.doubt(view)  # are this process's turns there lost?

    def _lose_worker(self, worker: WorkerId) -> None:
        view = self._state.registry.view(worker)
        self._state.registry.dismiss(worker)
        if view is not None:
            self._prober.doubt(view)


def _used(process: int, worker: WorkerId, use: Use) -> Used:
    return Used(process, worker, use.inflight, use.queued_prefill_tokens, use.written_tokens)
