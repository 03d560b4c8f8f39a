"""How many Python functions of the proxy a turn calls, from its body to the end of its answer, and their instructions.

    python -m benchmarks.turns.calls                  # the functions that are called most
    python -m benchmarks.turns.calls --instructions   # those that take most instructions of Python's bytecode

Nothing else that a turn costs is the same on every machine and in every run. A worker's answer comes from memory, as in
`benchmarks.small.decision_cost`; sockets and HTTP are left out, and so are asyncio, other libraries and compiled code.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click

import ppd.proxy

from ..small.decision_cost import SIZES, conversation
from ..small.proxy_here import bench

LIMITS = {"SPLIT": 418, "LOCAL": 266}
"""With the compiled modules; of the first turn of a conversation of three messages, and of its second. Lower them."""

CONVERSATIONS = 12
SHOWN = 25  # functions
_PROXY = str(Path(ppd.proxy.__file__).parent)
_Told = TypeVar("_Told")


@dataclass(frozen=True, slots=True)
class TurnWork:
    """By function of the proxy."""

    calls: Counter[str] = field(default_factory=Counter)
    instructions: Counter[str] = field(default_factory=Counter)


async def count() -> dict[str, TurnWork]:
    """By route: what the turn of several did that called the fewest functions.

    Other turns do what is done once: they import, are the first on their worker, forget old arrivals, or
    learn the habits that many have noted.
    """
    one, found = bench(0), dict[str, TurnWork]()
    try:
        for number in range(CONVERSATIONS):
            for body in bodies(number):
                name, work = await counted(one.turn(body, 99))
                route = name.split()[-1]
                found[route] = min(found.get(route, work), work, key=lambda each: each.calls.total())
    finally:
        one.proxy.listener.close()
    return found


def bodies(number: int) -> tuple[bytes, bytes]:
    first, second = conversation(number, *SIZES["2 KB"], 0)
    assert first is not None, "it has three messages"
    return first, second


async def counted(turn: Awaitable[_Told]) -> tuple[_Told, TurnWork]:
    with counting(TurnWork()) as work:
        return await turn, work


@contextmanager
def counting(work: TurnWork) -> Iterator[TurnWork]:
    """Adds what is called inside; what calls that is not counted meanwhile."""
    before = sys.gettrace()
    sys.settrace(_tracer(work))
    try:
        yield work
    finally:
        sys.settrace(before)


def _tracer(work: TurnWork) -> Callable[[FrameType, str, Any], Any]:
    def traced(frame: FrameType, event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PROXY):
            return None
        name = f"{frame.f_code.co_filename[len(_PROXY) + 1 :]}: {frame.f_code.co_qualname}"
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            work.calls[name] += 1
        elif event == "opcode":
            work.instructions[name] += 1
        return traced

    return traced


def lines(found: Mapping[str, TurnWork], limits: Mapping[str, int], by_instructions: bool) -> Iterator[str]:
    for route, work in found.items():
        calls, instructions = work.calls.total(), work.instructions.total()
        yield f"{route}: {calls} calls, of which at most {limits[route]} are allowed; {instructions} instructions"
        for name, times in (work.instructions if by_instructions else work.calls).most_common(SHOWN):
            yield f"{times:5} {name}"


def command(
    count: Callable[[], Coroutine[Any, Any, Mapping[str, TurnWork]]], limits: Mapping[str, int], told: str
) -> click.Command:
    """A program that shows what `count` finds. told: its help."""

    @click.command(help=told)
    @click.option("--instructions", "by_instructions", is_flag=True, help="Show those that take most instructions.")
    def main(by_instructions: bool) -> None:
        for line in lines(asyncio.run(count()), limits, by_instructions):
            click.echo(line)

    return main


main = command(count, LIMITS, "Counts the Python calls of a SPLIT and of a LOCAL turn, and their instructions.")


if __name__ == "__main__":
    main()
