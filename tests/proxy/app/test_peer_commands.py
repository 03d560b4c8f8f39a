"""What the operator's API asks of the processes: while many receipts are written, turns go on."""

from __future__ import annotations

import asyncio

from ppd.proxy.app.peer_commands import WRITTEN_AT_ONCE, newest_receipts
from ppd.proxy.assembly import assemble
from ppd.proxy.config import ProxyConfig
from ppd.proxy.settings import Settings
from ppd.proxy.telemetry.receipts import Receipt


def receipt(number: int) -> Receipt:
    return Receipt(
        id=str(number),
        at="",
        endpoint="",
        model="m",
        stream=False,
        session="",
        turn=1,
        kind="first",
        outcome="completed",
    )


async def test_the_loop_goes_on_while_many_receipts_are_written() -> None:
    proxy = assemble(Settings(ProxyConfig(heartbeat_port=0)))
    rounds, steps = 0, 4

    async def others() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    for number in range(steps * WRITTEN_AT_ONCE):
        proxy.state.receipts.open(receipt(number))
    going_on = asyncio.create_task(others())
    try:
        found = await newest_receipts(proxy, 1000)
    finally:
        going_on.cancel()
        proxy.listener.close()
    assert [one.id for one in found[:2]] == [str(steps * WRITTEN_AT_ONCE - 1), str(steps * WRITTEN_AT_ONCE - 2)]
    assert len(found) == steps * WRITTEN_AT_ONCE and rounds >= steps
