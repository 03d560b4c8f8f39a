"""The registry of workers: which there are, how loaded they are, and what this proxy has in flight on each.

Synchronous and without a clock: callers pass `now_s` from a monotonic clock. Every change makes a new frozen
`WorkerView`. Which workers serve a model is cached until a worker changes, so a decision need not look at all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace as replace_worker
from enum import Enum, auto

from msgspec.structs import replace

from ..runtime.replicated import Replicated
from .ledger import REPORT_AGE_S, LegWork, Use, Uses, of_other_proxies, shown
from .order import Rosters
from .places import learned
from .view import NO_OTHERS, Fleet, WorkerView
from .worker import ANSWERING, NO_EVENTS, Announcement, Load, Source, Worker, WorkerId, settled, with_told
from .worker_names import WorkerNames

JOINED = "join-"  # prefix of the incarnations given to engines that do not report one


class WorkerChange(Enum):
    """What of a worker has changed."""

    VIEW = auto()  # it came, or its description, state or load
    GONE = auto()


class Registry:
    """Workers by id. Those that announce themselves expire; static ones go up and down by probes.

    A worker's view counts what all processes of this proxy do there.
    """

    def __init__(self) -> None:
        self._views: dict[WorkerId, WorkerView] = {}
        self.engine: Callable[[WorkerId], WorkerView | None] = self._views.get
        """As `view`, but what it says of the worker's use may be old."""
        self.uses = Uses()
        self._closed: set[WorkerId] = set()  # static workers whose ports were found closed since they were last up
        self._announced: dict[WorkerId, tuple[Announcement, float]] = {}  # of static workers, and when that was heard
        self._changed: set[WorkerId] = set()  # workers whose views do not show their use yet
        self._rosters = Rosters()
        self._aliases: dict[str, str] | None = None  # of all workers, until a worker changes
        self._names = WorkerNames()
        self._joined = 0
        self._newest_s = -math.inf  # when a worker joined or recovered last
        self.replicated: Replicated[WorkerId, WorkerChange] | None = None
        self.on_came: Callable[[WorkerView, bool], None] | None = None
        """A worker is new there or up again (True), or is only told of in other words (False)."""

    def views(self) -> tuple[WorkerView, ...]:
        self._catch_up()
        return tuple(self._views.values())

    def __len__(self) -> int:
        return len(self._views)

    def fleet(self, model: str) -> Fleet:
        """What a decision on a turn of this model reads."""
        if self._changed:
            self._catch_up()
        return self._rosters.known.get(model) or self._rosters.fleet(model, self._views, self._newest_s)

    def family(self, model: str) -> str:
        """The name by which sessions know the model: one for all names under which workers serve the same weights."""
        return self.aliases().get(model, model)

    def aliases(self) -> Mapping[str, str]:
        """`family` of each name that has another one."""
        if self._aliases is None:
            known: dict[str, str] = {}
            for view in self._views.values():
                known |= view.worker.aliases
            self._aliases = settled(known)
        return self._aliases

    def families(self) -> set[str]:
        """The names by which sessions know the models that are served."""
        return {self.family(model) for view in self._views.values() for model in view.worker.models}

    def view(self, worker_id: WorkerId) -> WorkerView | None:
        if worker_id in self._changed:
            self._catch_up()
        return self._views.get(worker_id)

    # -- which workers there are

    def apply(self, announcement: Announcement, now_s: float) -> None:
        """A worker announced itself; of a static one only load and draining count, as the config describes the rest."""
        known = self._views.get(announcement.worker.id)
        if announcement.leaving:
            self._announced.pop(announcement.worker.id, None)
            if known is not None and known.worker.source is not Source.STATIC:
                self.remove(announcement.worker.id)
            return
        worker = announcement.worker
        if known is not None:
            if worker.source is Source.PING and known.worker.source is not Source.PING:
                return  # the config or the agent knows more than a ping
            if known.worker.source is Source.STATIC:
                self._announced[worker.id] = (announcement, now_s)
                worker = known.worker
        if known is not None and not announcement.worker.models:  # the agent could not ask its engine just now
            worker = replace_worker(worker, models=known.worker.models, aliases=known.worker.aliases)
        self._admit(worker, announcement.worker.incarnation, now_s)
        self._change(worker.id, draining=announcement.draining, **self._learned(worker.id, announcement.load, now_s))

    def add_static(self, worker: Worker, now_s: float) -> None:
        """Adds a worker, which is used once a probe has found it healthy."""
        known = self._views.get(worker.id)
        if known is not None and known.configured == worker:
            return
        # A worker that already serves in this role goes on serving. That it drains was said under another config.
        serves = known is not None and known.up and known.role is worker.role
        told = with_told(worker, known.worker, known.configured) if known is not None and serves else worker
        self._admit(told, worker.incarnation, now_s)
        self._change(worker.id, up=serves, configured=worker, draining=False)

    def unnamed(self, worker_id: WorkerId, now_s: float, ttl_s: float) -> None:
        """The config names the worker no more. It stays as its agent has announced it, if within `ttl_s`."""
        view, heard = self._views.get(worker_id), self._announced.pop(worker_id, None)
        if view is None or heard is None or now_s - heard[1] > ttl_s:
            self.remove(worker_id)
            return
        worker = replace_worker(view.worker, source=heard[0].worker.source)
        self._change(worker_id, worker=worker, configured=None, up=True, unanswered=False)
        self._closed.discard(worker_id)
        self.apply(*heard)

    def probed(self, worker_id: WorkerId, found: Worker, load: Load | None, now_s: float) -> None:
        """A healthy answer to a probe; found: with what the engine reports of itself."""
        view = self._views.get(worker_id)
        if view is None:
            return
        configured = view.configured
        is_told = configured is None or configured.kv_events == NO_EVENTS  # else the config says it
        coordinates = view.worker.coordinates
        # One that does not say which process it is has not begun anew as far as is known, unless it was away.
        is_same = found.incarnation == view.incarnation if found.incarnation else view.up
        # What the same process told before still holds where it could not be asked this time.
        if configured is not None and (found.coordinates or not is_same):
            coordinates = {**configured.coordinates, **found.coordinates}
        worker = replace_worker(
            view.worker,
            models=found.models or view.worker.models,
            aliases=found.aliases if found.models else view.worker.aliases,
            engine_version=found.engine_version or view.worker.engine_version,
            kv_events=found.kv_events if is_told else view.worker.kv_events,
            coordinates=coordinates,
        )
        heard_s = now_s if view.worker.source is Source.STATIC else view.heard_s
        self._admit(worker, found.incarnation, heard_s)
        self._change(worker_id, up=True, unanswered=False, **self._learned(worker_id, load, now_s))
        if worker_id in self._closed:  # another process answers there, if this one does not say which it is
            self._closed.remove(worker_id)
            self._change(worker_id, draining=False)
        if not view.up:
            self.recovered(worker_id, now_s)

    def loaded(self, worker_id: WorkerId, load: Load, now_s: float) -> None:
        self._change(worker_id, **self._learned(worker_id, load, now_s))

    def probe_failed(self, worker_id: WorkerId, *, refused: bool = False) -> None:
        """refused: its port is closed, so that no turn could reach it."""
        view = self._views.get(worker_id)
        if view is not None and view.worker.source is Source.STATIC:
            was_up = view.up or view.unanswered  # only who has been found healthy may be asked all the same
            self._change(worker_id, up=False, unanswered=was_up and not refused)
            if refused:
                self._closed.add(worker_id)

    def outranked(self, worker_id: WorkerId, now_s: float) -> None:
        """The worker answers turns, whatever its probes say."""
        view = self._views.get(worker_id)
        if view is not None and view.unanswered:
            self._change(worker_id, up=True, unanswered=False)
            self.recovered(worker_id, now_s)

    def lost_model(self, worker_id: WorkerId, model: str) -> None:
        """The worker says that it has no such model; what it lists next counts again."""
        view = self._views.get(worker_id)
        if view is None or model not in view.worker.models:
            return
        left = tuple(name for name in view.worker.models if name != model)
        if left:  # a worker without any name would be given turns of every model
            self._change(worker_id, worker=replace_worker(view.worker, models=left))

    def hold_back(self, worker_id: WorkerId, held_back: bool) -> None:
        """Drains the worker for the operator; the worker's own messages do not end that. The operator ends either."""
        self._change(worker_id, held_back=held_back, **({} if held_back else {"draining": False}))

    def remove(self, worker_id: WorkerId) -> None:
        self.dismiss(worker_id)
        if self.replicated is not None:
            self.replicated.changed(worker_id, WorkerChange.GONE)

    def expire(self, now_s: float, ttl_s: float) -> tuple[WorkerView, ...]:
        """Drop and return the workers that were silent for longer than `ttl_s`."""
        announced = (view for view in self.views() if view.worker.source is not Source.STATIC)
        silent = tuple(view for view in announced if now_s - view.heard_s > ttl_s)
        for view in silent:
            self.remove(view.id)
        return silent

    # -- what this proxy does there

    def begin(self, worker_id: WorkerId, leg: LegWork, now_s: float) -> Use | None:
        """A leg of a turn; the engine's next report of its load tells of the tokens that it places.

        `use_changed` is to be told of what else becomes of this use. None: the worker has left.
        """
        used = self.uses.own.get(worker_id)
        if used is not None:
            used.begin(leg, now_s)
            if leg.placed_tokens and self.uses.placed(used, leg.placed_tokens):
                self._changed.update(self.uses.own)
            self.use_changed(worker_id, used, legs=True)
        return used

    def use_changed(self, worker_id: WorkerId, used: Use, *, legs: bool = False) -> None:
        # Else the worker has left meanwhile; should it be back, it counts anew.
        if self.uses.own.get(worker_id) is used:
            self._changed.add(worker_id)
            if (replicated := self.uses.replicated) is not None:
                replicated.changed(worker_id, legs)

    def reserve(self, worker_id: WorkerId) -> Use | None:
        """A request that is no turn's. `release` takes what comes of it; None: the worker has left."""
        used = self.uses.own.get(worker_id)
        if used is not None:
            used.inflight += 1
            self.use_changed(worker_id, used, legs=True)
        return used

    def release(self, worker_id: WorkerId, used: Use | None) -> None:
        """Of a worker that has left and is back meanwhile it changes nothing: those there now are others."""
        if used is not None:
            used.inflight = max(0, used.inflight - 1)
            self.use_changed(worker_id, used, legs=True)

    def answered(self, worker_id: WorkerId) -> None:
        """The worker has sent some of an answer; told once a second."""
        used = self.uses.own.get(worker_id)
        if used is not None:
            used.answers += 1
            self.use_changed(worker_id, used)

    def answers(self, worker_id: WorkerId) -> int:
        """Changes while the worker answers any process's turns."""
        return sum(use.answers for use in self.uses.of(worker_id))

    def recovered(self, worker_id: WorkerId, now_s: float) -> None:
        """The worker serves again after it did not: slow start begins."""
        self._change(worker_id, since_s=now_s)

    # -- what other processes send

    def adopt(self, view: WorkerView) -> None:
        """Takes a worker from the process that watches them: all of its view except the use."""
        old = self._views.get(view.id)
        used = self.uses.joined(view.id)
        if old is None or old.reports != view.reports:
            used.placed_tokens = 0
        self._put(view)
        self._keep_name(view)
        self.use_changed(view.id, used)

    def dismiss(self, worker_id: WorkerId) -> None:
        """Drops a worker; unlike `remove`, without telling the other processes."""
        self._views.pop(worker_id, None)
        self._rosters.clear()
        self._closed.discard(worker_id)
        self._announced.pop(worker_id, None)
        self._aliases = None
        self.uses.drop(worker_id)

    def use(self, worker_id: WorkerId) -> Use | None:
        """This process's own."""
        return self.uses.own.get(worker_id)

    def total_use(self, worker_id: WorkerId) -> Use:
        """All processes' use of a worker that is there."""
        return self.uses.total(worker_id)

    def others(self) -> Iterator[tuple[int, WorkerId, Use]]:
        """Each other process's use of each worker: process, worker, use."""
        for worker_id, uses in self.uses.others.items():
            for process, use in uses.items():
                yield process, worker_id, use

    def used_by(self, process: int, worker_id: WorkerId, use: Use) -> None:
        if self.uses.heard(process, worker_id, use):
            self._changed.update(self.uses.own)
        self._changed.add(worker_id)

    def ended(self, process: int) -> None:
        """The process has ended: it has no legs any more."""
        self._changed.update(self.uses.ended(process))

    # -- inside

    def _put(self, view: WorkerView) -> None:
        old = self._views.get(view.id)
        self._views[view.id] = view
        self._newest_s = max(self._newest_s, view.since_s)
        self._rosters.changed((view.id,))
        if old is None or old.worker.aliases != view.worker.aliases:
            self._aliases = None
        if old is None or not view.takes_the_same(old):  # it seldom changes, and with many workers costs milliseconds
            self._rosters.clear()
        if self.on_came is not None:
            if old is None or view.begins_after(old):
                self.on_came(view, True)
            elif not view.is_told_of_as(old):
                self.on_came(view, False)

    def _admit(self, worker: Worker, incarnation: str, now_s: float) -> None:
        old = self._views.get(worker.id)
        if old is not None and (not incarnation or incarnation == old.incarnation) and old.role is worker.role:
            self._take(replace(old, worker=worker, heard_s=now_s))
            return
        self._joined += 1
        fresh = WorkerView(
            worker=worker,
            name=self._names.of(worker),
            # An engine that does not report its incarnation gets a new one whenever it joins.
            incarnation=incarnation or f"{JOINED}{self._joined}",
            heard_s=now_s,
            since_s=now_s,
        )
        used = self.uses.joined(worker.id)
        if old is not None:  # its cache is gone or its role changed; these still hold
            fresh = replace(
                fresh, up=old.up, unanswered=old.unanswered, held_back=old.held_back, configured=old.configured
            )
        self._take(fresh)
        self.use_changed(worker.id, used)

    def _take(self, view: WorkerView) -> None:
        self._put(view)
        if self.replicated is not None:
            self.replicated.changed(view.id, WorkerChange.VIEW)

    def _keep_name(self, view: WorkerView) -> None:
        """Continues the numbering of names and incarnations of the process that gave them."""
        self._names.adopt(view.role, view.id, view.name)
        _, is_ours, joined = view.incarnation.rpartition(JOINED)
        self._joined = max(self._joined, int(joined) if is_ours and joined.isdecimal() else 0)

    def _catch_up(self) -> None:
        if not self._changed:
            return
        views, uses, changed = self._views, self.uses, self._changed
        self._changed = set()
        for worker_id in changed:
            if (view := views.get(worker_id)) is not None:
                views[worker_id] = shown(view, uses.total(worker_id))
        self._rosters.changed(changed)

    def _learned(self, worker_id: WorkerId, load: Load | None, now_s: float) -> dict[str, object]:
        """What changes as the engine reports its load: its places follow from it. What cannot be is no report."""
        view = self.view(worker_id)
        if view is None:
            return {}
        if load is None or not load.is_possible:
            is_old = view.others != NO_OTHERS and now_s - view.reported_s > REPORT_AGE_S
            return {"others": NO_OTHERS} if is_old else {}
        used = self.uses.own[worker_id]
        if used.placed_tokens:
            used.placed_tokens = 0
            self.use_changed(worker_id, used)
        told: dict[str, object] = {
            "load": load,
            "others": of_other_proxies(view, load),
            "reports": view.reports + 1,
            "reported_s": now_s,
        }
        if view.role in ANSWERING:  # what a P queues is prompts to compute, which wait nowhere better
            told["places"] = learned(view.places, view.inflight, view.load, load)
        return told

    def _change(self, worker_id: WorkerId, **changes: object) -> None:
        view = self._views.get(worker_id)
        if view is not None:
            self._take(replace(view, **changes))
