"""How many Python functions of the proxy a turn calls, from its body to the end of its answer.

    python -m benchmarks.turns.calls

Nothing else that a turn costs is the same on every machine and in every run. A worker's answer comes from memory, as in
`benchmarks.small.decision_cost`; sockets and HTTP are left out, and so are asyncio and other libraries.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import click

import ppd.proxy

from ..small.decision_cost import SIZES, conversation
from ..small.proxy_here import TurnBench, bench

LIMITS = {"SPLIT": 745, "LOCAL": 577}
"""With the compiled modules; of the first turn of a conversation of three messages, and of its second. Lower them."""

CONVERSATIONS = 12
_SHOWN = 25
_PROXY = str(Path(ppd.proxy.__file__).parent)


async def count() -> dict[str, Counter[str]]:
    """By route: how often each function was called, in the turn of several that called the fewest.

    Other turns do what is done once: they import, are the first on their worker, or forget old arrivals.
    """
    one, found = bench(0), dict[str, Counter[str]]()
    try:
        for number in range(CONVERSATIONS):
            for body in _bodies(number):
                name, calls = await _counted(one, body)
                route = name.split()[-1]
                found[route] = min(found.get(route, calls), calls, key=Counter.total)
    finally:
        one.proxy.listener.close()
    return found


def _bodies(number: int) -> tuple[bytes, bytes]:
    first, second = conversation(number, *SIZES["2 KB"], 0)
    assert first is not None, "it has three messages"
    return first, second


async def _counted(one: TurnBench, body: bytes) -> tuple[str, Counter[str]]:
    calls = Counter[str]()

    def called(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_PROXY):
            calls[f"{frame.f_code.co_filename[len(_PROXY) + 1 :]}: {frame.f_code.co_qualname}"] += 1

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        return await one.turn(body, 99), calls
    finally:
        sys.setprofile(before)


@click.command()
def main() -> None:
    """Counts the Python calls of a SPLIT and of a LOCAL turn."""
    for route, calls in asyncio.run(count()).items():
        click.echo(f"{route}: {calls.total()} calls, of which at most {LIMITS[route]} are allowed")
        for name, times in calls.most_common(_SHOWN):
            click.echo(f"{times:5} {name}")


if __name__ == "__main__":
    main()
