"""The proxy is stopped while both legs of a turn are under way: they go on until the limit, and are cut then, both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import aiohttp
import pytest

from ppd.proxy.connectors import CONNECTORS, writes_into_decode
from ppd.proxy.failures import Leg
from ppd.proxy.leg_moves import LegOrder
from ppd.servers.sim.core.fault_orders import FaultKind, FaultPhase, Faults, Order
from tests.e2e.failures.fleet import PATH, FaultFleet, Seen, Talk
from tests.e2e.failures.outcomes import held_against
from tests.e2e.fleet.connector_fleets import NAMES, WORDS, options_of
from tests.support.fleet import start_engine

LIMIT_S = 0.1  # of a drain that cuts
BOTH = ["nixl_push", "sglang"]  # D waits for P; and P for D too
OTHERS = [name for name in NAMES if name not in BOTH and CONNECTORS[name].order is not LegOrder.P_THEN_D]


@dataclass(slots=True)
class Draining:
    """A turn with both legs under way, in a proxy that is told to stop; its engines go on."""

    field: FaultFleet
    proxy: AsyncExitStack
    session: aiohttp.ClientSession

    async def ask(self, body: dict[str, Any], seen: Seen) -> None:
        """By a connection that the end of the proxy's own client does not end."""
        async with self.session.post(self.field.base_url + PATH, json=body) as answer:
            seen.status, seen.headers = answer.status, answer.headers
            try:
                while data := await answer.content.readany():
                    seen.body += data
                seen.is_whole = True
            except aiohttp.ClientError:
                pass

    def under_way(self) -> list[Leg]:
        return [leg.kind for leg in self.field.newest().legs if leg.ended_s is None]

    async def stop(self, asking: asyncio.Task[None]) -> None:
        stopping = asyncio.create_task(self.proxy.aclose())
        await self.field.until(lambda: self.field.proxy.drain.is_draining)
        await asking
        await stopping

    async def check_engines(self) -> None:
        """No leg is left, and nobody is blamed for the proxy's end."""
        field = self.field
        await field.until(lambda: field.at_rest() and not field.is_reading())
        # A P that had computed keeps that until its D, or its lease, lets go; a D what a P was to write that was ended.
        field.end_leases()
        await field.until(lambda: not any(engine.scheduler.sequences for engine in field.engines.values()))
        assert field.pinned() == 0
        assert not any(engine.counters.traps for engine in field.engines.values())
        assert all(leg.ended_s is not None and leg.error is None for leg in field.newest().legs)
        assert held_against(field) == {}
        assert not any(view.inflight for view in field.proxy.state.registry.views())
        assert (field.proxy.state.admission.inside, field.proxy.state.admission.waiting) == (0, 0)


@asynccontextmanager
async def drainable(connector: str, limit_s: float, time_scale: float = 2.0) -> AsyncIterator[Draining]:
    async with AsyncExitStack() as outer, AsyncExitStack() as proxy:
        session = await outer.enter_async_context(aiohttp.ClientSession())
        field = await proxy.enter_async_context(FaultFleet.of("", shutdown_timeout_s=limit_s))
        for name in ("P1", "D1"):  # which outlive the proxy
            settings = {"connector": connector, "num_blocks": 2048, "time_scale": time_scale, "shutdown_s": 0.05}
            engine = await start_engine(outer, name, now=field.clock, **settings)
            await field.join(name, engine, engine.address, options_of(engine))
        yield Draining(field, proxy, session)


@pytest.mark.parametrize(
    ("connector", "goes_on", "stream"),
    [*product(BOTH, (True, False), (True, False)), *((connector, False, True) for connector in OTHERS)],
)
async def test_a_drain_while_each_engine_waits_for_the_other(connector: str, goes_on: bool, stream: bool) -> None:
    body = Talk([{"role": "user", "content": WORDS * (20 if goes_on else 60)}]).body(stream=stream)
    async with drainable(connector, *((60.0, 2.0) if goes_on else (LIMIT_S, 10.0))) as draining:
        field, seen = draining.field, Seen()
        right = await field.right_text(body)
        asking = asyncio.create_task(draining.ask(body, seen))
        await field.until(lambda: bool(field.engines["P1"].scheduler.sequences))
        assert draining.under_way() == [Leg.PREFILL, Leg.DECODE]
        await draining.stop(asking)
        receipt = field.newest()
        if goes_on:
            assert (seen.is_complete, seen.text, receipt.outcome) == (True, right, "completed")
        else:
            assert (seen.status, seen.headers["X-PPD-Refused"]) == (503, "draining")
            assert (receipt.outcome, receipt.error) == ("failed", "draining")
            stopped = field.engines["P1"].counters.finished["abort"] == 1
            assert stopped or field.engines["P1"].protocol.is_written, (
                "P was told to stop, as D was, unless D waits for it to write"
            )
        await draining.check_engines()


WRITING = [name for name in NAMES if writes_into_decode(CONNECTORS[name])]


@pytest.mark.parametrize("connector", WRITING)
async def test_a_drain_waits_for_p_to_write_what_a_client_has_left(connector: str) -> None:
    """D would keep the blocks that it has set aside."""
    body = Talk([{"role": "user", "content": WORDS * 60}]).body(stream=True)
    async with drainable(connector, 60.0, 15.0) as draining:
        field = draining.field
        asking = asyncio.create_task(draining.ask(body, Seen()))
        await field.until(lambda: bool(field.engines["P1"].scheduler.sequences))
        asking.cancel()
        await field.until(lambda: field.newest().outcome == "cancelled")
        await draining.proxy.aclose()
        assert field.engines["P1"].counters.finished["abort"] == 0
        await field.until(lambda: not any(engine.scheduler.sequences for engine in field.engines.values()))


@pytest.mark.parametrize("goes_on", [True, False], ids=["goes_on", "cut"])
@pytest.mark.parametrize("connector", BOTH)
async def test_a_drain_while_d_answers_and_p_is_at_its_end(connector: str, goes_on: bool) -> None:
    body = Talk([{"role": "user", "content": WORDS}]).body(stream=True, max_tokens=20 if goes_on else 2000)
    body["ignore_eos"] = True
    async with drainable(connector, 20.0 if goes_on else LIMIT_S) as draining:
        field, seen = draining.field, Seen()
        right = await field.right_text(body)
        field.engines["P1"].faults = Faults([Order(FaultKind.SLOW, phase=FaultPhase.HEAD, delay_s=2.0)])
        asking = asyncio.create_task(draining.ask(body, seen))
        await field.until(lambda: bool(seen.text) if seen.is_stream else False)
        assert draining.under_way() == [Leg.PREFILL, Leg.DECODE]
        await draining.stop(asking)
        receipt = field.newest()
        if goes_on:
            assert (seen.is_complete, seen.text, receipt.outcome) == (True, right, "completed")
        else:
            assert (receipt.outcome, receipt.status, receipt.error) == ("broken", 200, "draining")
            assert set(seen.events[-1]["error"]) == {"message", "type", "param", "code"}
            assert right.startswith(seen.text)
            assert "[DONE]" not in seen.events
        await draining.check_engines()
