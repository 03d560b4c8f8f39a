"""The routings by name: the proxy's, two to compare it with, and other routers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle

from ppd.proxy.fleet.worker import Role
from ppd.proxy.policy import Route

from ..overhead.peers import PEERS
from .engines.workers import TimedWorker, VirtualTime
from .peers import PeerRouting
from .requests import Asked
from .routing import Placed, ProxyRouting, Routing


class Clairvoyant:
    """Knows every cache, and takes the worker that will have computed the prompt first.

    A follow-up is LOCAL where half of it or more is on a D; what that D has queued counts as if it were new.
    """

    def __init__(self, workers: Sequence[TimedWorker]) -> None:
        self._prefills = [worker for worker in workers if worker.role is Role.PREFILL]
        self._others = [worker for worker in workers if worker.role is not Role.PREFILL]

    def place(self, asked: Asked, keys: Sequence[int], prompt_tokens: int) -> Placed:
        def until_done(worker: TimedWorker) -> tuple[int, int]:
            new_tokens = prompt_tokens - worker.held(keys, prompt_tokens)
            return worker.queued_tokens + new_tokens, worker.load.running

        best = min(self._others, key=until_done)
        if best.role is Role.REPLICA:
            return Placed(route=Route.REPLICA, decode=best)
        if best.held(keys, prompt_tokens) * 2 >= prompt_tokens:
            return Placed(route=Route.LOCAL, decode=best)
        least = min(self._others, key=lambda worker: worker.load.running + worker.load.waiting)
        return Placed(route=Route.SPLIT, decode=least, prefill=min(self._prefills, key=until_done))


class RoundRobin:
    """Knows nothing: what caches are worth without any routing for them."""

    def __init__(self, workers: Sequence[TimedWorker]) -> None:
        self._prefills = _turns(workers, Role.PREFILL)
        self._decodes = _turns(workers, Role.DECODE)
        self._replicas = _turns(workers, Role.REPLICA)

    def place(self, asked: Asked, keys: Sequence[int], prompt_tokens: int) -> Placed:
        replica = next(self._replicas, None)
        if replica is not None:
            return Placed(route=Route.REPLICA, decode=replica)
        return Placed(route=Route.SPLIT, decode=next(self._decodes), prefill=next(self._prefills))


def _turns(workers: Sequence[TimedWorker], role: Role) -> Iterator[TimedWorker]:
    return cycle([worker for worker in workers if worker.role is role])


def _peer(name: str, time: VirtualTime, workers: Sequence[TimedWorker], stack: ExitStack) -> Routing:
    return PeerRouting(name, workers, stack)


ROUTINGS: Mapping[str, Callable[[VirtualTime, Sequence[TimedWorker], ExitStack], Routing]] = {
    "ppd": lambda time, workers, stack: ProxyRouting(time, workers),
    "clairvoyant": lambda time, workers, stack: Clairvoyant(workers),
    "round robin": lambda time, workers, stack: RoundRobin(workers),
    **{name: partial(_peer, name) for name in PEERS},
}
