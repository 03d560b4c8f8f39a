"""Does a turn leave anything behind? A million of them in one process, without sockets.

    python -m benchmarks.turns.leaks --turns 1000000

Conversations of four turns begin anew all the time, so that the table of sessions and the receipts are full after the
first tenth, and each turn pushes something out. After every tenth: memory, Python objects, and what the proxy's books
count. Both must stay as they are from the second tenth on. In the end: the classes that have grown since then.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections import Counter
from pathlib import Path

import click

from ..small.decision_cost import conversation
from ..small.proxy_here import TurnBench, bench

TURNS = 4  # of one conversation
LIMIT = 2_000  # sessions and receipts
TENTHS = 10


def rss_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def objects() -> Counter[str]:
    """By class, of those that the collector follows."""
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


async def play(one: TurnBench, first: int, conversations: int) -> None:
    for number in range(first, first + conversations):
        for turn in range(TURNS):
            _, body = conversation(number, 400, 2 * turn + 1, one.tools)
            await one.turn(body, number * TURNS + turn)


def state_of(one: TurnBench) -> dict[str, int]:
    state = one.proxy.state
    return {
        "sessions": len(state.sessions),
        "legs under way": sum(view.inflight for view in state.registry.views()),
        "handoffs": state.handoffs.outstanding(state.now()),
    }


async def measure(turns: int) -> Counter[str]:
    """The classes of which there are more in the end than after the first tenth."""
    one = bench(0, session_limit=LIMIT, receipts_kept=LIMIT)
    known, each = Counter[str](), max(1, turns // TENTHS // TURNS)
    for tenth in range(TENTHS):
        began_s = time.process_time()
        await play(one, tenth * each, each)
        spent_us = (time.process_time() - began_s) * 1e6 / (each * TURNS)
        gc.collect()
        now = objects()
        known = known or now
        books = ", ".join(f"{count} {name}" for name, count in state_of(one).items())
        click.echo(
            f"{(tenth + 1) * each * TURNS:>9} turns: {rss_kib():>7} KiB, {now.total():>7} objects, "
            f"{spent_us:.0f} us a turn; {books}"
        )
    return +(now - known)


@click.command(help=__doc__)
@click.option("--turns", default=1_000_000, show_default=True)
def main(turns: int) -> None:
    grown = asyncio.run(measure(turns))
    click.echo("grown: " + (", ".join(f"{name} +{count}" for name, count in grown.most_common(8)) or "nothing"))


if __name__ == "__main__":
    main()
