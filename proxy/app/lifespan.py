"""The background tasks of one proxy process: started with the app, and closed with it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from functools import partial

from ..assembly import Proxy
from ..connectors import missing_coordinates
from ..encoders.choosing import takes_embeddings
from ..fleet.view import WorkerView
from ..fleet.worker import Role, Source, Worker, WorkerId
from ..laws.accuracy import TURNS, Subject
from ..runtime.loop_watch import STOOD_STILL_S
from ..runtime.tasks import Background
from ..runtime.watched_files import watch

log = logging.getLogger(__name__)

UNHEARD_S = 8.0
"""A worker that got a handoff is probed after this long without a sign of life, or sooner: see `Upstream.unheard`."""

LOOK_EVERY_S = 1.0  # of `FleetWatch`
WARMED_WORKERS = 256  # in a larger fleet only workers that are at work get spare connections


def start(proxy: Proxy) -> Background:
    """Starts the tasks. The heartbeat sockets are open already, so that a taken port ends `ppd serve` with one line."""
    background = Background()
    for socket, encrypted in proxy.listener.sockets:
        background.start("heartbeats", partial(proxy.listener.run, socket, encrypted))
    background.start("KV events", proxy.event_subscriber.run)
    if proxy.event_subscriber.bound is not None:
        background.start("KV events of engines that connect", proxy.event_subscriber.run_bound)
    if proxy.membership.leads:
        background.start("prober", proxy.prober.run)
        background.start("canary", proxy.canary.run)
        background.start("load watch", proxy.load_watch.run)
        background.start("settings", partial(watch, proxy.settings.look, partial(_reloaded, proxy)))
    background.start("membership", proxy.membership.run)
    if proxy.settings.config.spare_connections:
        background.start("spare connections", partial(_keep_warm, proxy))
    background.start("drain", partial(_close_down, proxy))
    if proxy.files.keys is not None:
        background.start("keys", partial(watch, proxy.files.keys.look, proxy.state.metrics.reloaded))
    background.start("certificates", partial(watch, proxy.files.worker_tls.look, proxy.state.metrics.reloaded))
    background.start("expiry", FleetWatch(proxy).run)
    _apply(proxy)
    return background


async def close(proxy: Proxy, background: Background) -> None:
    await background.close()
    await proxy.membership.close()
    await proxy.handoff_release.close(proxy.drain.left_s(proxy.settings.config.shutdown_timeout_s))
    proxy.listener.close()
    await proxy.event_subscriber.close()
    await proxy.upstream.close()
    await proxy.prober.close()
    await proxy.bodies.close()
    if proxy.tokenizer is not None:
        await proxy.tokenizer.close()
    if proxy.receipt_log is not None:
        await proxy.receipt_log.close()
    if proxy.access_log is not None:
        await proxy.access_log.close()


class FleetWatch:
    """Once a second: notes who answers turns, drops silent workers, probes those that leave a handoff unanswered or
    have failed by what they told, and logs what changed.

    With several processes only the leader drops workers, and only it logs at INFO.
    """

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._known = self._snapshot()  # workers known at the start are no change
        self._silent: set[WorkerId] = set()  # dropped since the last look
        self._laws = LawsWatch(proxy)
        self._excused_s = -math.inf  # when this process stood still last, and heard no one
        self._unasked: set[WorkerId] = set()  # E that are known to encode for nobody

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LOOK_EVERY_S
            await asyncio.sleep(LOOK_EVERY_S)
            if loop.time() - due_s > STOOD_STILL_S:
                self._excused_s = self._proxy.state.now()
            for worker in self._proxy.upstream.count_answers():
                self._proxy.state.registry.answered(worker)
            self._drop_silent()
            self._probe_unheard()
            self._ask_again()
            self._note_changes()
            self._proxy.state.handles.expire()
            self._laws.look()
            self._proxy.state.admission.admit_waiting()  # a worker may have come, or come back

    def _snapshot(self) -> dict[WorkerId, tuple[str, str, str, str]]:
        """Name, state and incarnation of each worker, and what its connector misses."""
        return {
            view.id: (view.name, view.state, view.incarnation, ", ".join(missing_coordinates(view.worker)))
            for view in self._proxy.state.registry.views()
        }

    def _drop_silent(self) -> None:
        proxy = self._proxy
        now_s, limit_s = proxy.state.now(), proxy.settings.config.worker_ttl_s
        if proxy.membership.leads and now_s - self._excused_s > limit_s:
            for view in proxy.state.registry.expire(now_s, limit_s):
                proxy.prober.doubt(view)
                self._silent.add(view.id)

    def _probe_unheard(self) -> None:
        for worker in self._proxy.upstream.unheard(UNHEARD_S):
            if (silent := self._proxy.state.registry.view(worker)) is not None:
                self._proxy.prober.doubt(silent)

    def _ask_again(self) -> None:
        """P whose legs have failed: one that has begun anew tells other coordinates, and D fails by the old ones."""
        registry, asked = self._proxy.state.registry, self._proxy.state.health.to_ask_again
        for view in filter(None, map(registry.view, asked)):
            if self._proxy.membership.leads:
                self._proxy.prober.ask_again(view)
        asked.clear()

    def _note_changes(self) -> None:
        leads, state, seen = self._proxy.membership.leads, self._proxy.state, self._snapshot()
        others: dict[WorkerId, str | None] = {}
        for worker in self._known.keys() | seen.keys():
            before, after = self._known.get(worker), seen.get(worker)
            if before == after:
                continue
            is_other = after is None or before is None or before[1] == "down" or before[2] != after[2]
            if is_other:  # a new engine does not inherit the failures of the old one; its own ones stand
                view, health = state.registry.view(worker), state.health
                forget = health.forget if leads else health.forget_turns
                forget(worker, view.since_s if view else math.inf)
                others[worker] = view.incarnation if view else None
            name, status, _, missing = after or before or ("", "", "", "")
            level = logging.INFO if leads else logging.DEBUG
            what = self._named(worker, status) if after else self._gone(worker)
            log.log(level, "worker %s %s: %s", name, worker, what)
            if after and missing and status == "up" and leads:
                log.warning("worker %s %s: takes no part in a SPLIT, as it does not tell its %s", name, worker, missing)
        if others:
            state.handles.left(others)
        self._known = seen
        self._silent.clear()
        self._note_unasked(leads)

    def _note_unasked(self, leads: bool) -> None:
        """E of a fleet whose other engines all take nothing of one."""
        views = self._proxy.state.registry.views()
        others = [view.worker for view in views if view.role is not Role.ENCODE]
        is_needless = bool(others) and not any(map(takes_embeddings, others))
        unasked = {view.id: view for view in views if is_needless and view.role is Role.ENCODE and view.state == "up"}
        for worker in unasked.keys() - self._unasked:
            text = "worker %s %s: is never asked, as the engines of P, D and R take no embeddings of an E"
            log.log(logging.WARNING if leads else logging.DEBUG, text, unasked[worker].name, worker)
        self._unasked = set(unasked)

    def _named(self, worker: WorkerId, state: str) -> str:
        why = self._proxy.prober.failing.get(worker, "")
        return f"down ({why})" if state == "down" and why else state

    def _gone(self, worker: WorkerId) -> str:
        limit_s = self._proxy.settings.config.worker_ttl_s
        return f"gone (silent for {limit_s:g} s)" if worker in self._silent else "gone"


class LawsWatch:
    """Logs once when a profile or a table turns out not to fit this fleet, and when it fits again."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._stale: set[Subject] = set()

    def look(self) -> None:
        laws = self._proxy.state.laws
        laws.advance(self._proxy.state.now())
        judged = {(one.basis, one.name, one.figure): one for one in laws.judged()}
        stale = {subject for subject, one in judged.items() if one.stale}
        if stale == self._stale:
            return
        leads = self._proxy.membership.leads  # the others see the same
        for subject in sorted(stale - self._stale):
            (basis, name, figure), error = subject, judged[subject].median_error
            text = "%s %s is stale: the median error of its %s is %.0f %% over the last %d turns"
            level = logging.WARNING if leads else logging.DEBUG
            log.log(level, text, basis, name, figure.upper(), 100 * error, TURNS)
        for basis, name, figure in sorted(self._stale - stale):
            text = "%s %s: its %s fits again" if (basis, name, figure) in judged else "%s %s: its %s is judged anew"
            log.log(logging.INFO if leads else logging.DEBUG, text, basis, name, figure.upper())
        self._stale = stale


async def _keep_warm(proxy: Proxy) -> None:
    config, registry = proxy.settings.config, proxy.state.registry
    while True:
        await proxy.upstream.warm(to_warm(registry.views()), config.spare_connections, config.connect_timeout_s)
        await asyncio.sleep(1.0)


def to_warm(views: Iterable[WorkerView]) -> list[Worker]:
    """The workers that get spare connections."""
    up = [view for view in views if view.state == "up"]
    if len(up) > WARMED_WORKERS:
        up = [view for view in up if view.inflight][:WARMED_WORKERS]
    return [view.worker for view in up]


async def _close_down(proxy: Proxy) -> None:
    await proxy.drain.wait()
    proxy.state.admission.close_down()


def _reloaded(proxy: Proxy, taken: bool) -> None:
    proxy.state.metrics.reloaded(taken)
    if taken:
        _apply(proxy)
        proxy.membership.config_read(*proxy.settings.live())


def _apply(proxy: Proxy) -> None:
    """Applies the live keys of the config: routing rules and, in the leader, static workers."""
    proxy.chooser.rules = proxy.settings.rules()
    if not proxy.membership.leads:
        return  # the leader tells the others
    wanted = {worker.id: worker for worker in proxy.settings.static_workers}
    for view in proxy.state.registry.views():
        if view.worker.source is Source.STATIC and view.id not in wanted and view.id not in proxy.settings.added:
            proxy.state.registry.unnamed(view.id, proxy.state.now(), proxy.settings.config.worker_ttl_s)
    for worker in wanted.values():
        if worker.id not in proxy.settings.overruled:
            proxy.state.registry.add_static(worker, proxy.state.now())
    proxy.prober.nudge()
