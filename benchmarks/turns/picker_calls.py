"""How many Python functions of its own a picker calls a turn, beside those of the proxy's turn, and their instructions.

    python -m benchmarks.turns.picker_calls                  # the functions that are called most
    python -m benchmarks.turns.picker_calls --instructions   # those that take most instructions of Python's bytecode

Of the frames that `benchmarks.turns.picker_cost` sends, with what `benchmarks.turns.calls` counts by; only functions of
the gateway's room.
"""

from __future__ import annotations

from collections import Counter

from ..small.proxy_here import bench
from .calls import CONVERSATIONS, TurnWork, bodies, command, counted
from .picker_cost import Gateway, picker

LIMITS = {"SPLIT": 150, "LOCAL": 150}
"""Of the first turn of a conversation of three messages, and of its second. Lower them."""

_ROOM = "gateway/"


async def count() -> dict[str, TurnWork]:
    """By route: what the turn of several did that called the fewest functions."""
    proxy, found = bench(0).proxy, dict[str, TurnWork]()
    gateway = Gateway(picker(proxy))
    try:
        for number in range(CONVERSATIONS):
            for body in bodies(number):
                _, work = await counted(gateway.turn(gateway.reads(body)))
                own = TurnWork(_of_room(work.calls), _of_room(work.instructions))
                route = proxy.state.receipts.newest(1)[0].route
                found[route] = min(found.get(route, own), own, key=lambda each: each.calls.total())
    finally:
        proxy.listener.close()
    return found


def _of_room(times: Counter[str]) -> Counter[str]:
    return Counter({name: number for name, number in times.items() if name.startswith(_ROOM)})


main = command(
    count, LIMITS, "Counts the gateway's own Python calls in a SPLIT and in a LOCAL turn, and their instructions."
)


if __name__ == "__main__":
    main()
