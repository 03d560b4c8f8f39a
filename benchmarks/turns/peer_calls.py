"""How many Python functions of the proxy are called to tell another process of a turn, and there to take it in.

    python -m benchmarks.turns.peer_calls                  # the functions that are called most
    python -m benchmarks.turns.peer_calls --instructions   # those that take most instructions of Python's bytecode

With what `benchmarks.turns.calls` counts by. Two processes of one proxy share an event loop; all turns come to the
first. Telling is what its turns take more than in a proxy of one process. As where an answer takes longer than a
round, news is sent while the worker computes, with the turn's end, and after it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import click

from ppd.proxy.peers import channels
from ppd.proxy.peers.channels import Channels, End, Member, make_ends

from ..small.proxy_here import TurnBench, bench
from . import calls
from .calls import CONVERSATIONS, TurnWork, bodies, counted, counting, lines

_NEVER_S = 3600.0
LIMITS = {"SPLIT, telling": 55, "SPLIT, told": 37, "LOCAL, telling": 52, "LOCAL, told": 34}
"""With the compiled modules; of the first turn of a conversation of three messages, and of its second. Lower them."""


@dataclass(frozen=True, slots=True)
class ToldTurn:
    telling: TurnWork
    told: TurnWork
    packets: list[int] = field(default_factory=list)  # bytes of each


class WatchedEnd(End):
    """Notes how large the packets are that it sends."""

    def __init__(self, end: End) -> None:
        super().__init__(end.socket, end.sent, end.side)
        self.packets: list[int] = []

    def send(self, packet: bytes) -> bool:
        self.packets.append(len(packet))
        return super().send(packet)


class TwoProcesses:
    """`first` is given turns."""

    def __init__(self) -> None:
        one, other = make_ends(2)
        one[1] = self._end = WatchedEnd(one[1])
        self._ends = [self._end, other[0]]
        secret = Member().secret
        self._turn = self._new_turn()
        self.first = bench(0, Member(index=0, ends=one, secret=secret), self._round)
        self.second = bench(0, Member(index=1, ends=other, secret=secret))

    async def join(self) -> None:
        """From then on the second process reads only when it is made to."""
        await asyncio.gather(*(one.proxy.membership.join() for one in (self.first, self.second)))
        self.flush()
        self.drain()
        _channels(self.second).close()

    def flush(self) -> None:
        """The first tells the second."""
        _channels(self.first).flush()

    def drain(self) -> None:
        """The second takes in what it was told."""
        _channels(self.second).drain()

    def close(self) -> None:
        for one in (self.first, self.second):
            one.proxy.listener.close()
        for end in self._ends:
            end.close()

    async def turn(self, body: bytes) -> tuple[str, ToldTurn]:
        """With its route."""
        turn = self._new_turn()
        self._end_timer()
        name, work = await counted(self.first.turn(body, 99))
        self._round()
        turn.telling.calls.update(work.calls)
        turn.telling.instructions.update(work.instructions)
        return name.split()[-1], turn

    def _new_turn(self) -> ToldTurn:
        self._turn = turn = ToldTurn(TurnWork(), TurnWork())
        self._end.packets = turn.packets
        return turn

    def _end_timer(self) -> None:
        """It ends between turns: within one only where the machine, as it counts, takes over `ROUND_S` for that."""
        own = _channels(self.first)
        if own._flushing is not None:
            own._flushing.cancel()
            own._flushing = None

    def _round(self) -> None:
        with counting(self._turn.telling):
            self.flush()
        with counting(self._turn.told):
            self.drain()


def _channels(one: TurnBench) -> Channels:
    return one.proxy.membership._channels


@asynccontextmanager
async def two_processes() -> AsyncIterator[TwoProcesses]:
    both, round_s = TwoProcesses(), channels.ROUND_S
    channels.ROUND_S = _NEVER_S
    try:
        await both.join()
        yield both
    finally:
        channels.ROUND_S = round_s
        both.close()


async def count() -> dict[str, ToldTurn]:
    """By route: of several turns the fewest calls that each part took, as one may come to more by the clock."""
    alone, found = await calls.count(), dict[str, ToldTurn]()
    async with two_processes() as both:
        for number in range(CONVERSATIONS):
            for body in bodies(number):
                route, turn = await both.turn(body)
                found[route] = _least(found.get(route, turn), turn)
    for route, turn in found.items():
        _take_off(turn.telling.calls, alone[route].calls)
        _take_off(turn.telling.instructions, alone[route].instructions)
    return found


def _take_off(done: Counter[str], alone: Counter[str]) -> None:
    """Leaves what a turn does more where there is another process. What it does less is no part of telling.

    Which of two equal workers is chosen takes calls, and whether they are equal depends on how quick the machine is.
    """
    done.subtract(alone)
    for name in [name for name, count in done.items() if count <= 0]:
        del done[name]


def _least(one: ToldTurn, other: ToldTurn) -> ToldTurn:
    return ToldTurn(
        min(one.telling, other.telling, key=_calls),
        min(one.told, other.told, key=_calls),
        min(one.packets, other.packets, key=len),
    )


def _calls(work: TurnWork) -> int:
    return work.calls.total()


def parts(found: dict[str, ToldTurn]) -> dict[str, TurnWork]:
    """By route and part."""
    return {
        f"{route}, {part}": work
        for route, turn in found.items()
        for part, work in (("telling", turn.telling), ("told", turn.told))
    }


@click.command()
@click.option("--instructions", "by_instructions", is_flag=True, help="Show the functions that take most instructions.")
def main(by_instructions: bool) -> None:
    """Counts what it takes to tell another process of a SPLIT and of a LOCAL turn, and to take it in there."""
    found = asyncio.run(count())
    for line in lines(parts(found), LIMITS, by_instructions):
        click.echo(line)
    for route, turn in found.items():
        click.echo(f"{route}: packets of {', '.join(map(str, turn.packets))} bytes")


if __name__ == "__main__":
    main()
