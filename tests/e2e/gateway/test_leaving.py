"""The client of a real Envoy leaves, wherever its SPLIT stands: engines stop, no KV stays on P, all books are free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from ppd.proxy.config import Mode
from ppd.servers.sim.core.fault_orders import FaultKind, FaultPhase, Faults, Order
from ppd.servers.sim.engine.engine import SimEngine
from tests.e2e.gateway.envoy_program import carried, sidecar_before
from tests.support.fleet import Fleet
from tests.support.proxy import Chat, ProxyClient

pytestmark = pytest.mark.e2e
LONG = "Tell me of a thing that lasts for long. "
PHASES = ("p_computes", "p_answers", "d_computes", "answers")


async def soon(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.0005)


async def first_report(fleet: Fleet, envoy: ProxyClient) -> None:
    """The sidecar has reported, so it is waited for from now on."""
    assert (await Chat(envoy).say("Are you there?", max_tokens=2)).status == 200
    async with asyncio.timeout(60):
        while not any([await fleet.metric(f'ppd_turn_reports_total{{result="{each}"}}') for each in ("taken", "late")]):
            await asyncio.sleep(0.01)


async def ask(url: str, body: Mapping[str, object]) -> None:
    async with aiohttp.ClientSession() as client, client.post(url, json=body) as answer:
        await answer.read()


async def until_there(phase: str, prefill: SimEngine, decode: SimEngine, tokens: int) -> None:
    if phase == "p_computes":
        await soon(lambda: bool(prefill.scheduler.sequences))
    elif phase == "p_answers":
        await soon(lambda: bool(prefill.pinned))
    elif phase == "d_computes":
        await soon(lambda: bool(decode.scheduler.sequences))
    else:
        await soon(lambda: decode.counters.generation_tokens > tokens + 3)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves_ends_both_legs(tmp_path: Path, phase: str, stream: bool) -> None:
    slow = {"time_scale": 1.0}
    async with carried(tmp_path, "P1", mode=Mode.ALWAYS_SPLIT, engine=slow) as (fleet, envoy):
        decode, prefill = await fleet.start("D1", **slow), fleet.engines["P1"]
        async with sidecar_before(decode.address, fleet.proxy) as address:
            await fleet.join("D1", decode, address)
            await first_report(fleet, envoy)
            asked, tokens = len(decode.received), decode.counters.generation_tokens
            if phase == "p_computes":
                prefill.config = replace(prefill.config, time_scale=20.0)  # it is at it whenever one looks
            if phase == "p_answers":
                prefill.faults = Faults([Order(FaultKind.SLOW, phase=FaultPhase.HEAD, delay_s=0.4)])
            said = [{"role": "user", "content": LONG * (200 if phase == "p_computes" else 5)}]
            endless = {"max_tokens": 20_000, "ignore_eos": True, "stream": stream}
            body = {"model": "sim", "messages": said, **endless}
            asking = asyncio.create_task(ask(f"{envoy.base_url}/v1/chat/completions", body))
            await until_there(phase, prefill, decode, tokens)
            asking.cancel()
            await asyncio.wait({asking})
            await fleet.until(fleet.idle)
            receipt = fleet.proxy.state.receipts.newest(1)[0]
            await fleet.until(lambda: receipt.outcome != "running")
            assert (receipt.outcome, receipt.route) == ("cancelled", "SPLIT")
            assert (prefill.pinned, prefill.counters.expired_handoffs) == (0, 0)
            assert not prefill.counters.traps
            assert not decode.counters.traps
            assert (len(decode.received) > asked) == (phase != "p_computes")
            assert fleet.proxy.state.admission.inside == 0
