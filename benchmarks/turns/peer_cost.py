"""How long it takes to tell another process of a turn, and there to take it in.

    python -m benchmarks.turns.peer_cost

The two processes of `benchmarks.turns.peer_calls`, beside a proxy of one process that is given the same turns, before
and after it by turns. As in a busy proxy, the news of a turn goes out with its end, and a round comes seldom. What the
kernel and the event loop do for a process that sleeps is left out.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

import click

from ..small.proxy_here import bench
from .calls import bodies
from .peer_calls import TwoProcesses

ROUND_EVERY = 5  # turns
WARM_UP = 200  # conversations


@dataclass(frozen=True, slots=True)
class PeerTimes:
    """Of one turn, in microseconds."""

    telling: float
    told: float
    alone: float  # the same turn in a proxy of one process


class TimedProcesses(TwoProcesses):
    """`told_ns`: what the second process has taken since it was set to 0, and what that is part of."""

    told_ns = 0
    _rounds = 0

    def _round(self) -> None:
        self._rounds += 1
        if self._rounds % ROUND_EVERY == 0:
            self.flush()
        began_ns = perf_counter_ns()
        self.drain()
        self.told_ns += perf_counter_ns() - began_ns

    async def timed_turn(self, body: bytes) -> tuple[str, int, int]:
        """Its route, and nanoseconds of the first process and of the second."""
        self.told_ns = 0
        began_ns = perf_counter_ns()
        name = await self.first.turn(body, 99)
        self._round()
        return name.split()[-1], perf_counter_ns() - began_ns - self.told_ns, self.told_ns


async def measure(conversations: int) -> dict[str, PeerTimes]:
    """By route: medians."""
    both, alone = TimedProcesses(), bench(0)
    await both.join()
    gc.collect()
    gc.freeze()
    found: dict[str, list[tuple[int, int, int]]] = {}
    try:
        for number in range(WARM_UP + conversations):
            for body in bodies(number):
                before_ns = await _took_ns(alone.turn(body, 99)) if number % 2 else 0
                route, first_ns, told_ns = await both.timed_turn(body)
                alone_ns = before_ns or await _took_ns(alone.turn(body, 99))
                if number >= WARM_UP:
                    found.setdefault(route, []).append((first_ns - alone_ns, told_ns, alone_ns))
    finally:
        both.close()
        alone.proxy.listener.close()
        gc.unfreeze()
    return {
        route: PeerTimes(*(median(one) / 1000 for one in zip(*times, strict=True))) for route, times in found.items()
    }


async def _took_ns(turn: Awaitable[object]) -> int:
    began_ns = perf_counter_ns()
    await turn
    return perf_counter_ns() - began_ns


@click.command()
@click.option("--conversations", default=1500, show_default=True, help="Timed ones, of two turns each.")
def main(conversations: int) -> None:
    """Times what it takes to tell another process of a SPLIT and of a LOCAL turn, and to take it in there."""
    for route, us in asyncio.run(measure(conversations)).items():
        click.echo(
            f"{route}: telling {us.telling:.1f} us, told {us.told:.1f} us, "
            f"in all {us.telling + us.told:.1f} us beside {us.alone:.1f} us for the turn itself"
        )


if __name__ == "__main__":
    main()
