"""The background tasks of one proxy process: started with the app, and closed with it."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from ..assembly import Proxy
from ..fleet.worker import Source, WorkerId
from ..runtime.tasks import Background

log = logging.getLogger(__name__)

UNHEARD_S = 8.0
"""A worker that got a handoff is probed after this long without a sign of life.

With 5 s to connect before, and three probes of 5 s after, its leg is given up within the handoff's lease of 30 s.
"""


def start(proxy: Proxy) -> Background:
    """Starts the tasks. The heartbeat sockets are open already, so that a taken port ends `ppd serve` with one line."""
    background = Background()
    for socket, encrypted in proxy.listener.sockets:
        background.start("heartbeats", partial(proxy.listener.run, socket, encrypted))
    if proxy.membership.leads:
        background.start("prober", proxy.prober.run)
        background.start("canary", proxy.canary.run)
    background.start("membership", proxy.membership.run)
    if proxy.settings.config.spare_connections:
        background.start("spare connections", partial(_keep_warm, proxy))
    background.start("drain", partial(_close_down, proxy))
    if proxy.keys is not None:
        background.start("keys", partial(proxy.keys.watch, partial(_count_reload, proxy)))
    background.start("certificates", proxy.tls.watch)
    background.start("expiry", FleetWatch(proxy).run)
    background.start("settings", partial(proxy.settings.watch, partial(_reloaded, proxy)))
    if proxy.receipt_log is not None:
        background.start("receipt log", proxy.receipt_log.run)
    _apply(proxy)
    return background


async def close(proxy: Proxy, background: Background) -> None:
    await background.close()
    await proxy.membership.close()
    await proxy.handoff_release.close()
    proxy.listener.close()
    await proxy.upstream.close()
    await proxy.prober.close()
    await proxy.bodies.close()


class FleetWatch:
    """Once a second: drops silent workers, probes those that leave a handoff unanswered, and logs what changed.

    With several processes only the leader drops workers, and only it logs at INFO.
    """

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._known = self._snapshot()  # workers known at the start are no change

    async def run(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._drop_silent()
            self._probe_unheard()
            self._note_changes()
            self._proxy.state.admission.admit_waiting()  # a worker may have come, or come back

    def _snapshot(self) -> dict[WorkerId, tuple[str, str, str]]:
        """Name, state and incarnation of each worker."""
        return {view.id: (view.name, view.state, view.incarnation) for view in self._proxy.state.registry.views()}

    def _drop_silent(self) -> None:
        proxy = self._proxy
        if proxy.membership.leads:
            for view in proxy.state.registry.expire(proxy.state.now(), proxy.settings.config.worker_ttl_s):
                proxy.prober.doubt(view)

    def _probe_unheard(self) -> None:
        for worker in self._proxy.upstream.unheard(UNHEARD_S):
            if (silent := self._proxy.state.registry.view(worker)) is not None:
                self._proxy.prober.doubt(silent)

    def _note_changes(self) -> None:
        leads, seen = self._proxy.membership.leads, self._snapshot()
        for worker in self._known.keys() | seen.keys():
            before, after = self._known.get(worker), seen.get(worker)
            if before == after:
                continue
            is_other = after is None or before is None or before[1] == "down" or before[2] != after[2]
            if is_other and leads:
                self._proxy.state.health.forget(worker)  # a new engine does not inherit the failures of the old one
            name, state, _ = after or before or ("", "", "")
            log.log(
                logging.INFO if leads else logging.DEBUG, "worker %s %s: %s", name, worker, state if after else "gone"
            )
        self._known = seen


async def _keep_warm(proxy: Proxy) -> None:
    config, registry = proxy.settings.config, proxy.state.registry
    while True:
        workers = [view.worker for view in registry.views() if view.state == "up"]
        await proxy.upstream.warm(workers, config.spare_connections, config.connect_timeout_s)
        await asyncio.sleep(1.0)


async def _close_down(proxy: Proxy) -> None:
    await proxy.drain.wait()
    proxy.state.admission.close_down()


def _count_reload(proxy: Proxy, taken: bool) -> None:
    proxy.state.metrics.config_reloads.labels("taken" if taken else "refused").inc()


def _reloaded(proxy: Proxy, taken: bool) -> None:
    _count_reload(proxy, taken)
    if taken:
        _apply(proxy)


def _apply(proxy: Proxy) -> None:
    """Applies the live keys of the config: routing rules and, in the leader, static workers."""
    proxy.router.rules = proxy.settings.rules()
    if not proxy.membership.leads:
        return  # the leader tells the others
    wanted = {worker.id: worker for worker in proxy.settings.static_workers}
    for view in proxy.state.registry.views():
        if view.worker.source is Source.STATIC and view.id not in wanted and view.id not in proxy.settings.added:
            proxy.state.registry.remove(view.id)
    for worker in wanted.values():
        proxy.state.registry.add_static(worker, proxy.state.now())
    proxy.prober.nudge()
