"""The routing of the paper's prototype: one hash of the conversation picks its workers, whatever their load.

Source: `comprehensive_proxy.py` of freelulul/vllm-ppd. Where there are replicas and others, each R and each D is one
slot, and the hash's remainder by the number of slots is the slot: R first, then the D whose later turns are local, then
the other D. The same hash picks P, so 2P_2D only ever pairs P1 with D1, and 1R_2P_1D uses one P alone.

It knows a conversation by the text from the first "User:" on, or else by its first 200 characters. A later turn that it
does not know passes for the first turn of another conversation, which gets workers of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ppd.proxy.fleet.worker import Role
from ppd.proxy.policy import Route

from ..experiment.run import Run
from .attempt import Routed
from .sessions import Asked
from .workers.fleet import SimulatedFleet, SimulatedWorker


class PublishedRouting:
    def __init__(self, fleet: SimulatedFleet, run: Run, *, unrecognised: float) -> None:
        self._prefills = fleet.of(Role.PREFILL)
        self._slots = [*fleet.of(Role.REPLICA), *fleet.of(Role.DECODE)]
        self._x = run.x or 0.0
        self._unrecognised = unrecognised
        self._random = np.random.default_rng([run.seed, 0x9D])
        self._hashes: dict[int, int] = {}

    def route(self, session: int, asked: Asked, go: Callable[[Routed], None]) -> None:
        go(self._routed(session, asked.forced))

    def _routed(self, session: int, planned: Route | None) -> Routed:
        number = self._hashes.get(session)
        known = number is not None and self._random.random() >= self._unrecognised
        if number is None or not known:
            number = self._hashes[session] = int(self._random.integers(1 << 60))
        worker = _pick(self._slots, number)
        if worker.role is Role.REPLICA:
            return Routed(Route.REPLICA, worker)
        if known and self._is_local(planned, worker):
            return Routed(Route.LOCAL, worker)
        return Routed(Route.SPLIT, worker, _pick(self._prefills, number))

    def _is_local(self, planned: Route | None, worker: SimulatedWorker) -> bool:
        if worker.x is not None:
            return worker.x == 1.0
        # The plan may have meant this conversation for an R.
        return planned is Route.LOCAL or (planned is Route.REPLICA and bool(self._random.random() < self._x))


def _pick(workers: list[SimulatedWorker], number: int) -> SimulatedWorker:
    return workers[number % len(workers)]
