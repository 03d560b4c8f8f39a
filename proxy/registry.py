"""The live set of workers: who is there, how loaded, what this proxy has in flight on each.

Synchronous and without a clock: callers pass `now_s` from a monotonic clock. Every change makes a new frozen
`WorkerView`, so reading the whole fleet for a decision costs no copying.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace

from .heartbeats import Announcement
from .residency import Residency
from .views import WorkerView
from .workers import Load, Role, Source, Worker, WorkerId

NAMES_KEPT = 10_000
SUSPECT_S = 5.0  # a worker that refused a connection is passed over for this long if there is another


class Registry:
    """Workers by id. Agents' and engines' messages expire; static workers go up and down by probes."""

    def __init__(self) -> None:
        self._views: dict[WorkerId, WorkerView] = {}
        self._names: OrderedDict[tuple[Role, WorkerId], str] = OrderedDict()
        self._numbers: Counter[Role] = Counter()
        self._joined = 0
        self._written_total = 0  # of all workers: where the count of one that joins begins

    def views(self) -> tuple[WorkerView, ...]:
        return tuple(self._views.values())

    def view(self, worker_id: WorkerId) -> WorkerView | None:
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
            if known.worker.source is Source.STATIC:
                worker = known.worker
            elif known.worker.source is Source.AGENT and worker.source is Source.PING:
                return  # the agent beside this engine knows more
        if known is not None and not said.worker.models:  # it could not ask its engine just now
            worker = replace(worker, models=known.worker.models)
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
        worker = replace(
            view.worker,
            models=found.models or view.worker.models,
            engine_version=found.engine_version or view.worker.engine_version,
        )
        heard_s = now_s if view.worker.source is Source.STATIC else view.heard_s
        self._admit(worker, found.incarnation, heard_s)
        self._change(worker_id, load=load or view.load, up=True, suspect_until_s=0.0)

    def probe_failed(self, worker_id: WorkerId) -> None:
        view = self._views.get(worker_id)
        if view is not None and view.worker.source is Source.STATIC:
            self._change(worker_id, up=False)

    def hold_back(self, worker_id: WorkerId, held_back: bool) -> None:
        """The operator's draining, which no message of the worker's ends."""
        self._change(worker_id, held_back=held_back)

    def remove(self, worker_id: WorkerId) -> None:
        self._views.pop(worker_id, None)

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
        view = self._views.get(worker_id)
        self._written_total += max(0, tokens)
        if view is not None:
            self._change(worker_id, written_tokens=view.written_tokens + max(0, tokens))

    def suspect(self, worker_id: WorkerId, now_s: float) -> None:
        self._change(worker_id, suspect_until_s=now_s + SUSPECT_S)

    def residency(self, worker_id: WorkerId, tokens: int) -> Residency | None:
        """A record that this worker holds `tokens` of a prefix as of now."""
        view = self._views.get(worker_id)
        return None if view is None else Residency(worker_id, view.incarnation, tokens, view.written_tokens)

    # -- inside

    def _admit(self, worker: Worker, incarnation: str, now_s: float) -> None:
        old = self._views.get(worker.id)
        if old is not None and (not incarnation or incarnation == old.incarnation) and old.role is worker.role:
            self._views[worker.id] = replace(old, worker=worker, heard_s=now_s)
            return
        self._joined += 1
        fresh = WorkerView(
            worker=worker,
            name=self._name(worker),
            # Engines that do not tell their incarnation get a new one whenever they (re)join.
            incarnation=incarnation or f"join-{self._joined}",
            heard_s=now_s,
            written_tokens=self._written_total,
        )
        if old is not None:  # its cache is gone or its role another; what is asked of it and in flight there is not
            fresh = replace(
                fresh,
                inflight=old.inflight,
                queued_prefill_tokens=old.queued_prefill_tokens,
                up=old.up,
                held_back=old.held_back,
                configured=old.configured,
            )
        self._views[worker.id] = fresh

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

    def _add(self, worker_id: WorkerId, inflight: int, tokens: int) -> None:
        view = self._views.get(worker_id)
        if view is not None:  # it may have left meanwhile, and its counts with it
            self._change(
                worker_id,
                inflight=max(0, view.inflight + inflight),
                queued_prefill_tokens=max(0, view.queued_prefill_tokens + tokens),
            )

    def _change(self, worker_id: WorkerId, **changes: object) -> None:
        view = self._views.get(worker_id)
        if view is not None:
            self._views[worker_id] = replace(view, **changes)  # type: ignore[arg-type]
