"""The routings by name: the proxy's, two to compare it with, and other routers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count as numbered_from
from itertools import cycle
from random import Random

import msgspec

from ppd.proxy.fleet.worker import Role
from ppd.proxy.peers.events import AnyEvent
from ppd.proxy.policy import Route

from ..overhead.peers import PEERS
from .engines.workers import TimedWorker, VirtualTime
from .peers import PeerRouting
from .requests import Asked
from .routing import Placed, ProxyRouting, Routing, member

PEERS_DELAY_S = 0.005  # a process of the proxy sends, and reads, once in 2 ms
MOST_PROCESSES = 8
_DECODER = msgspec.msgpack.Decoder(list[AnyEvent])


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


class Processes:
    """Several processes of one proxy. Each request reaches any of them, and each answer the one that asked."""

    def __init__(
        self, count: int, time: VirtualTime, workers: Sequence[TimedWorker], key: int = 0, *, same_ties: bool = False
    ) -> None:
        """same_ties: sessions have the numbers that one process gives them, so that ties are broken as it does."""
        numbers = numbered_from(1) if same_ties else None
        self.processes = [ProxyRouting(time, workers, member=member(key, index, numbers)) for index in range(count)]
        self._random = Random(f"{count} {key}")
        channels = [VirtualChannels(time, index, one) for index, one in enumerate(self.processes)]
        for one, own in zip(self.processes, channels, strict=True):
            own.others = [other for other in channels if other is not own]
            one.attach(own)
        self._channels = channels

    def place(self, asked: Asked, keys: Sequence[int], prompt_tokens: int) -> Placed:
        if self.processes[0].hear():  # no turn came in that very moment
            for _ in range(2):  # the others' answer is that they count anew what they place
                for one in self._channels:
                    one.flush()
                for one in self._channels:
                    one.drain()
        return self._random.choice(self.processes).place(asked, keys, prompt_tokens)


class VirtualChannels:
    """One process's `Channels`. What may wait is sent `PEERS_DELAY_S` later, and what nobody needs is read so late."""

    def __init__(self, time: VirtualTime, index: int, process: ProxyRouting) -> None:
        self.others: Sequence[VirtualChannels] = ()
        self._time = time
        self._index = index
        self._turns = process.turns
        self._appliers = process.appliers()
        self._came: list[tuple[int, bytes]] = []
        self._outbox: list[AnyEvent] = []
        self._is_flushing = False

    def queue(self, event: AnyEvent) -> None:
        self._outbox.append(event)
        self.schedule_flush()

    def schedule_flush(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self._time.after(PEERS_DELAY_S, self._round)

    def flush(self) -> None:
        self._outbox.extend(self._turns.pending())
        if self._outbox:
            self._send_outbox()

    async def flushed(self) -> None:
        self.flush()

    def drain(self) -> None:
        came, self._came = self._came, []
        for sender, batch in came:
            for event in _DECODER.decode(batch):
                self._appliers[type(event)](sender, event)

    def _round(self) -> None:
        self._is_flushing = False
        self.flush()

    def _send_outbox(self) -> None:
        batch = msgspec.msgpack.encode(self._outbox)
        self._outbox.clear()
        for other in self.others:
            other._came.append((self._index, batch))
            self._time.after(PEERS_DELAY_S, other.drain)


def _processes(
    count: int, same_ties: bool, time: VirtualTime, workers: Sequence[TimedWorker], stack: ExitStack, key: int
) -> Routing:
    return Processes(count, time, workers, key, same_ties=same_ties)


def _peer(name: str, time: VirtualTime, workers: Sequence[TimedWorker], stack: ExitStack, key: int) -> Routing:
    return PeerRouting(name, workers, stack)


ROUTINGS: Mapping[str, Callable[[VirtualTime, Sequence[TimedWorker], ExitStack, int], Routing]] = {
    "ppd": lambda time, workers, stack, key: ProxyRouting(time, workers, member=member(key)),
    **{f"ppd x {count}": partial(_processes, count, False) for count in range(2, MOST_PROCESSES + 1)},
    **{f"ppd x {count}, same ties": partial(_processes, count, True) for count in range(2, MOST_PROCESSES + 1)},
    "clairvoyant": lambda time, workers, stack, key: Clairvoyant(workers),
    "round robin": lambda time, workers, stack, key: RoundRobin(workers),
    **{name: partial(_peer, name) for name in PEERS},
}
