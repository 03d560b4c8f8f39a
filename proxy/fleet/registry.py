"""The live set of workers: who is there, how loaded, what this proxy has in flight on each.

Synchronous and without a clock: callers pass `now_s` from a monotonic clock. Every change makes a new frozen
`WorkerView`; who of them serves a model is kept until a worker changes, so a decision looks at no worker by itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace as replace_worker
from enum import Enum, auto

from msgspec.structs import replace

from ..runtime.replicated import Replicated
from .residency import Residency
from .view import Fleet, Takers, WorkerView, taking_turns
from .worker import Announcement, Load, Role, Source, Worker, WorkerId

NAMES_KEPT = 10_000
MODELS_KEPT = 256  # clients may name any model, as long as a worker has not said which it serves
JOINED = "join-"  # begins the incarnation of an engine that does not tell its own


@dataclass(slots=True)
class Use:
    """What one process does on one worker. Its view shows it when somebody looks: once for all steps of a turn."""

    inflight: int = 0
    queued_prefill_tokens: int = 0
    written_tokens: int = 0


class WorkerChange(Enum):
    """What of a worker has changed."""

    VIEW = auto()  # it came, or what it is and how it does
    GONE = auto()
    LEGS = auto()  # this process's legs there have become more or fewer
    TOKENS = auto()  # other numbers of its use


class Registry:
    """Workers by id. Agents' and engines' messages expire; static workers go up and down by probes.

    What other processes of this proxy do on a worker counts in its view as if this one did it.
    """

    def __init__(self) -> None:
        self._views: dict[WorkerId, WorkerView] = {}
        self._used: dict[WorkerId, Use] = {}
        self._others: dict[WorkerId, dict[int, Use]] = {}  # by process
        self._changed: set[WorkerId] = set()  # whose views are behind their use
        self._fleets: dict[str, Fleet] = {}  # by model, until a view changes
        self._takers: dict[str, Takers] = {}  # by model, until a worker changes
        self._names: OrderedDict[tuple[Role, WorkerId], str] = OrderedDict()
        self._numbers: Counter[Role] = Counter()
        self._joined = 0
        self._written_total = 0  # of all workers: where the count of one that joins begins
        self.replicated: Replicated[WorkerId, WorkerChange] | None = None

    def views(self) -> tuple[WorkerView, ...]:
        self._catch_up()
        return tuple(self._views.values())

    def fleet(self, model: str) -> Fleet:
        """What a decision on a turn of this model sees."""
        if self._changed:
            self._catch_up()
        return self._fleets.get(model) or self._new_fleet(model)

    def view(self, worker_id: WorkerId) -> WorkerView | None:
        self._catch_up()
        return self._views.get(worker_id)

    # -- who is there

    def hear(self, said: Announcement, now_s: float) -> None:
        """A message arrived. The config's word on a static worker stands; the message adds load and draining."""
        known = self._views.get(said.worker.id)
        if said.leaving:
            if known is not None and known.worker.source is not Source.STATIC:
                self.remove(said.worker.id)
            return
        worker = said.worker
        if known is not None:
            if worker.source is Source.PING and known.worker.source is not Source.PING:
                return  # the config, or the agent beside this engine, knows more
            if known.worker.source is Source.STATIC:
                worker = known.worker
        if known is not None and not said.worker.models:  # it could not ask its engine just now
            worker = replace_worker(worker, models=known.worker.models)
        self._admit(worker, said.worker.incarnation, now_s)
        changes: dict[str, object] = {"draining": said.draining}
        if said.load is not None:
            changes["load"] = said.load
        self._change(worker.id, **changes)

    def add_static(self, worker: Worker, now_s: float) -> None:
        """Known from now on, used once a probe has found it healthy."""
        known = self._views.get(worker.id)
        if known is not None and known.configured == worker:
            return
        self._admit(worker, worker.incarnation, now_s)
        # One that serves in this role already goes on serving.
        serves = known is not None and known.up and known.role is worker.role
        self._change(worker.id, up=serves, configured=worker)

    def probed(self, worker_id: WorkerId, found: Worker, load: Load | None, now_s: float) -> None:
        """A healthy answer to a probe: models, version and incarnation as far as the engine told them."""
        view = self._views.get(worker_id)
        if view is None:
            return
        worker = replace_worker(
            view.worker,
            models=found.models or view.worker.models,
            engine_version=found.engine_version or view.worker.engine_version,
        )
        heard_s = now_s if view.worker.source is Source.STATIC else view.heard_s
        self._admit(worker, found.incarnation, heard_s)
        self._change(worker_id, load=load or view.load, up=True)
        if not view.up:
            self.recovered(worker_id, now_s)

    def probe_failed(self, worker_id: WorkerId) -> None:
        view = self._views.get(worker_id)
        if view is not None and view.worker.source is Source.STATIC:
            self._change(worker_id, up=False)

    def hold_back(self, worker_id: WorkerId, held_back: bool) -> None:
        """The operator's draining, which no message of the worker's ends."""
        self._change(worker_id, held_back=held_back)

    def remove(self, worker_id: WorkerId) -> None:
        self.dismiss(worker_id)
        if self.replicated is not None:
            self.replicated.changed(worker_id, WorkerChange.GONE)

    def expire(self, now_s: float, ttl_s: float) -> tuple[WorkerView, ...]:
        """Drop and return the workers that were silent for longer than `ttl_s`."""
        silent = tuple(
            view
            for view in self._views.values()
            if view.worker.source is not Source.STATIC and now_s - view.heard_s > ttl_s
        )
        for view in silent:
            self.remove(view.id)
        return silent

    # -- what this proxy does there

    def reserve(self, worker_id: WorkerId, prefill_tokens: int) -> None:
        self._add(worker_id, 1, prefill_tokens)

    def prefilled(self, worker_id: WorkerId, prefill_tokens: int) -> None:
        """The leg's prompt is computed: its tokens no longer queue."""
        self._add(worker_id, 0, -prefill_tokens)

    def release(self, worker_id: WorkerId) -> None:
        self._add(worker_id, -1, 0)

    def wrote(self, worker_id: WorkerId, tokens: int) -> None:
        used = self._used.get(worker_id)
        self._written_total += max(0, tokens)
        if used is not None:
            used.written_tokens += max(0, tokens)
            self._use_changed(worker_id)

    def recovered(self, worker_id: WorkerId, now_s: float) -> None:
        """It serves again after it did not: its share of traffic starts small."""
        self._change(worker_id, since_s=now_s)

    def residency(self, worker_id: WorkerId, tokens: int) -> Residency | None:
        """A record that this worker holds `tokens` of a prefix as of now."""
        view, used = self._views.get(worker_id), self._used.get(worker_id)
        if view is None or used is None:
            return None
        written = used.written_tokens
        for use in self._others.get(worker_id, {}).values():
            written += use.written_tokens
        return Residency(worker_id, view.incarnation, tokens, written)

    # -- what other processes say

    def adopt(self, view: WorkerView) -> None:
        """A worker as another process sees it: that it is there, and how; not what is done on it."""
        old = self._views.get(view.id)
        used = self._used.setdefault(view.id, Use())
        if old is None or old.incarnation != view.incarnation:
            used.written_tokens = max(used.written_tokens, self._written_total)
        self._put(view)
        self._keep_name(view)
        self._use_changed(view.id)

    def dismiss(self, worker_id: WorkerId) -> None:
        """Another process knows it no more."""
        self._views.pop(worker_id, None)
        self._fleets.clear()
        self._takers.clear()
        self._used.pop(worker_id, None)
        self._others.pop(worker_id, None)

    def use(self, worker_id: WorkerId) -> Use | None:
        """What this process does there."""
        return self._used.get(worker_id)

    def inflight(self, worker_id: WorkerId) -> int:
        """Legs of all processes there."""
        used = self._used.get(worker_id)
        others = self._others.get(worker_id, {}).values()
        return (used.inflight if used is not None else 0) + sum(use.inflight for use in others)

    def others(self) -> Iterator[tuple[int, WorkerId, Use]]:
        """What the others do, by the number of their process."""
        for worker_id, uses in self._others.items():
            for process, use in uses.items():
                yield process, worker_id, use

    def used_by(self, process: int, worker_id: WorkerId, use: Use) -> None:
        uses = self._others.setdefault(worker_id, {})
        if process in uses:  # a successor may speak before it knows what was written
            use.written_tokens = max(use.written_tokens, uses[process].written_tokens)
        uses[process] = use
        self._changed.add(worker_id)

    def inherit(self, worker_id: WorkerId, written_tokens: int) -> None:
        """What a predecessor of this process has written: counts never start over."""
        used = self._used.get(worker_id)
        if used is not None:
            used.written_tokens = max(used.written_tokens, written_tokens)
            self._written_total = max(self._written_total, used.written_tokens)
            self._use_changed(worker_id)

    def ended(self, process: int) -> None:
        """It runs nothing any more."""
        for worker_id, uses in self._others.items():
            if process in uses:
                uses[process] = Use(written_tokens=uses[process].written_tokens)
                self._changed.add(worker_id)

    # -- inside

    def _new_fleet(self, model: str) -> Fleet:
        takers = self._takers.get(model)
        if takers is None:
            if len(self._takers) >= MODELS_KEPT:
                self._takers.clear()
                self._fleets.clear()
            takers = self._takers[model] = taking_turns(self._views.values(), model)
        fleet = self._fleets[model] = Fleet.of(dict(self._views), takers)
        return fleet

    def _put(self, view: WorkerView) -> None:
        """Whom it serves, or whether, may be another now."""
        self._views[view.id] = view
        self._fleets.clear()
        self._takers.clear()

    def _admit(self, worker: Worker, incarnation: str, now_s: float) -> None:
        old = self._views.get(worker.id)
        if old is not None and (not incarnation or incarnation == old.incarnation) and old.role is worker.role:
            self._take(replace(old, worker=worker, heard_s=now_s))
            return
        self._joined += 1
        fresh = WorkerView(
            worker=worker,
            name=self._name(worker),
            # Engines that do not tell their incarnation get a new one whenever they (re)join.
            incarnation=incarnation or f"{JOINED}{self._joined}",
            heard_s=now_s,
            since_s=now_s,
        )
        used = self._used.setdefault(worker.id, Use())
        used.written_tokens = self._written_total
        if old is not None:  # its cache is gone or its role another; what is asked of it and in flight there is not
            fresh = replace(fresh, up=old.up, held_back=old.held_back, configured=old.configured)
        self._take(fresh)
        self._use_changed(worker.id)

    def _take(self, view: WorkerView) -> None:
        self._put(view)
        if self.replicated is not None:
            self.replicated.changed(view.id, WorkerChange.VIEW)

    def _name(self, worker: Worker) -> str:
        """The same name whenever a worker returns; strangers that come once do not pile up."""
        key = (worker.role, worker.id)
        if key not in self._names:
            self._numbers[worker.role] += 1
            self._names[key] = f"{worker.role}{self._numbers[worker.role]}"
            if len(self._names) > NAMES_KEPT:
                self._names.popitem(last=False)
        self._names.move_to_end(key)
        return self._names[key]

    def _keep_name(self, view: WorkerView) -> None:
        """So that names and incarnations go on where another process left off."""
        self._names[view.role, view.id] = view.name
        if len(self._names) > NAMES_KEPT:
            self._names.popitem(last=False)
        number = view.name.removeprefix(view.role)
        self._numbers[view.role] = max(self._numbers[view.role], int(number) if number.isdecimal() else 0)
        _, is_ours, joined = view.incarnation.rpartition(JOINED)
        self._joined = max(self._joined, int(joined) if is_ours and joined.isdecimal() else 0)

    def _add(self, worker_id: WorkerId, inflight: int, tokens: int) -> None:
        used = self._used.get(worker_id)
        if used is not None:  # it may have left meanwhile, and its counts with it
            used.inflight = max(0, used.inflight + inflight)
            used.queued_prefill_tokens = max(0, used.queued_prefill_tokens + tokens)
            self._use_changed(worker_id, WorkerChange.LEGS if inflight else WorkerChange.TOKENS)

    def _use_changed(self, worker_id: WorkerId, change: WorkerChange = WorkerChange.TOKENS) -> None:
        self._changed.add(worker_id)
        if self.replicated is not None:
            self.replicated.changed(worker_id, change)

    def _catch_up(self) -> None:
        if self._changed:
            self._fleets.clear()
        while self._changed:
            worker_id = self._changed.pop()
            view = self._views.get(worker_id)
            if view is None:
                continue
            used = self._used[worker_id]
            inflight, queued, written = used.inflight, used.queued_prefill_tokens, used.written_tokens
            for use in self._others.get(worker_id, {}).values():
                inflight += use.inflight
                queued += use.queued_prefill_tokens
                written += use.written_tokens
            self._views[worker_id] = replace(
                view, inflight=inflight, queued_prefill_tokens=queued, written_tokens=written
            )

    def _change(self, worker_id: WorkerId, **changes: object) -> None:
        view = self._views.get(worker_id)
        if view is not None:
            self._take(replace(view, **changes))
