"""What turns leave behind is freed by its references: the garbage collector stops the proxy while it looks."""

from __future__ import annotations

import asyncio
import gc
import io
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from ppd.proxy.config import Mode
from tests.e2e.failures.fleet import PATH, FaultFleet, Seen, Talk

Ask = Callable[[FaultFleet, int], Awaitable[None]]

TURNS = 10
OTHERS = {
    "AsgiExchange",
    "BodyRoom",
    "GuardedExchange",
    "RequestHead",
}  # requests that are no turns, which the stock framework answers
WORDS = "Some words, so that there are blocks to move. " * 3


@contextmanager
def uncollected() -> Iterator[Counter[str]]:
    """By type, what of the proxy's only the collector could free."""
    found = Counter[str]()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        kinds = [type(one) for one in gc.garbage]
        ours = (kind.__qualname__ for kind in kinds if kind.__module__.startswith("ppd.proxy"))
        found.update(name for name in ours if name not in OTHERS)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def whole(field: FaultFleet, number: int) -> None:
    assert (await field.ask(Talk([{"role": "user", "content": f"{number} {WORDS}"}]).body(stream=False))).is_complete


async def streamed(field: FaultFleet, number: int) -> None:
    assert (await field.ask(Talk([{"role": "user", "content": f"{number} {WORDS}"}]).body())).is_complete


async def left(field: FaultFleet, number: int) -> None:
    """By its client, in the middle."""
    seen, body = Seen(), Talk([{"role": "user", "content": f"{number} {WORDS}"}]).body(max_tokens=20_000)
    asking = asyncio.create_task(field.ask(body, seen))
    await field.until(lambda: len(seen.body) > 0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await field.until(field.at_rest)


async def large(field: FaultFleet, number: int) -> None:
    """Read by the helper process, from shared memory."""
    assert "context length" in await refused(field, f"{number} {'word ' * 300_000}")


async def intricate(field: FaultFleet, number: int) -> None:
    """Refused by the helper process."""
    assert "parts" in await refused(field, [{"type": "text", "text": f"{number} {'word ' * 10}"}] * 25_000)


async def refused(field: FaultFleet, content: object) -> str:
    body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": content}]}).encode()
    headers = {"Content-Type": "application/json"}
    async with field.session.post(field.base_url + PATH, data=io.BytesIO(body), headers=headers) as answer:
        assert answer.status == 400
        return str((await answer.json())["error"]["message"])


@pytest.mark.parametrize("mode", [Mode.ALWAYS_SPLIT, Mode.ALWAYS_LOCAL])
@pytest.mark.parametrize("turn", [whole, streamed, left, large, intricate], ids=lambda turn: turn.__name__)
async def test_turns_leave_nothing_to_the_collector(turn: Ask, mode: Mode) -> None:
    async with FaultFleet.of("P1 D1", mode=mode) as field:
        await turn(field, TURNS)
        with uncollected() as found:
            for number in range(TURNS):
                await turn(field, number)
            await field.until(field.at_rest)
            await asyncio.sleep(0.1)
    assert found == {}
