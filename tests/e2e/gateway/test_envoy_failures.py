"""What clients get, and what is left behind, when a part of a fleet behind a real Envoy dies, hangs or leaves."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from ppd.proxy.config import Mode
from ppd.servers.fleet.ports import free_ports
from tests.e2e.gateway.envoy_program import carried, envoy_before
from tests.support.fleet import Fleet, proxy_before
from tests.support.proxy import Chat, ProxyClient, Turn

pytestmark = pytest.mark.e2e
LONG = "Tell me of a thing that lasts for long. " * 20


def told(turn: Turn) -> tuple[int, str, str]:
    """Of an error of Envoy's own: in OpenAI's shape, and with a word of what is missing."""
    error = turn.body["error"]
    return turn.status, error["type"], error["message"].partition(" ")[0]


async def test_a_picker_that_dies_is_503_and_back_at_once_when_it_is(tmp_path: Path) -> None:
    port, clients, own = free_ports(3)
    async with Fleet.of("D1") as engines, AsyncExitStack() as lives:
        addresses = [("D1", engines.engines["D1"].address)]
        first = await lives.enter_async_context(AsyncExitStack())
        picker = partial(proxy_before, addresses, picker_port=port, port=own, mode=Mode.ALWAYS_LOCAL)
        proxy, url, _ = await first.enter_async_context(picker())
        async with envoy_before(proxy, url, clients, tmp_path, sees_answers=True) as base:
            chat = Chat(ProxyClient(proxy, base, engines.session))
            assert (await chat.say(LONG)).status == 200
            await first.aclose()
            assert told(await chat.say(LONG)) == (503, "gateway_error", "no")
            del chat.messages[-1]
            await lives.enter_async_context(picker())
            answer = await chat.say(LONG)
            assert answer.status == 200
            assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_picker_that_hangs_is_504(tmp_path: Path) -> None:
    (clients,) = free_ports(1)
    async with Fleet.of("D1", queue_timeout_s=0.1) as fleet:
        with socket.create_server(("127.0.0.1", 0)) as hanging:
            pickers = [hanging.getsockname()]
            async with envoy_before(fleet.proxy, fleet.base_url, clients, tmp_path, pickers=pickers) as url:
                assert told(await Chat(ProxyClient(fleet.proxy, url, fleet.session)).say(LONG)) == (
                    504,
                    "gateway_error",
                    "no",
                )


async def test_of_two_pickers_one_may_die(tmp_path: Path) -> None:
    one, other, clients = free_ports(3)
    async with Fleet.of("D1", picker_port=one) as fleet:
        addresses = [("D1", fleet.engines["D1"].address)]
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(proxy_before(addresses, picker_port=other, mode=Mode.ALWAYS_LOCAL))
            pickers = [("127.0.0.1", one), ("127.0.0.1", other)]
            url = await fleet.stack.enter_async_context(
                envoy_before(fleet.proxy, fleet.base_url, clients, tmp_path, pickers=pickers)
            )
            envoy = ProxyClient(fleet.proxy, url, fleet.session)
            for _ in range(4):
                assert (await Chat(envoy).say(LONG, max_tokens=2)).status == 200
            assert 0 < len(fleet.proxy.state.receipts.newest(9)) < 4
        for _ in range(4):
            assert (await Chat(envoy).say(LONG, max_tokens=2)).status == 200


@asynccontextmanager
async def sidecar_process(engine: str, log: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A `ppd sidecar` that can be killed, and its address."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    argv = ("--engine", f"http://{engine}", "--listen", address, "--allow-prefill", "127.0.0.0/8")
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ppd.servers", "sidecar", *argv, stdout=out, stderr=out
        )
    try:
        yield process, address
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_sidecar_that_dies_in_the_prefill_leg_leaves_no_kv_on_p(tmp_path: Path) -> None:
    slow = {"time_scale": 1.0}
    async with carried(tmp_path, "P1", mode=Mode.ALWAYS_SPLIT, engine=slow) as (fleet, envoy):
        engine = await fleet.start("D1", **slow)
        async with sidecar_process(engine.address, tmp_path / "sidecar.log") as (process, address):
            await fleet.join("D1", engine, address)
            prefill = fleet.engines["P1"]
            asking = asyncio.create_task(Chat(envoy).say(LONG * 20))
            await fleet.until(lambda: bool(prefill.scheduler.sequences) or asking.done())
            assert not asking.done(), await asking
            process.kill()
            assert told(await asking) == (503, "gateway_error", "no")
            await fleet.until(fleet.idle)
            assert prefill.pinned == 0
            assert not engine.received


async def test_the_sessions_of_a_d_that_drains_go_elsewhere(tmp_path: Path) -> None:
    async with carried(tmp_path, "D1 D2", options={"sees_answers": True}) as (fleet, envoy):
        chat = Chat(envoy)
        places = []
        for _ in range(3):
            answer = await chat.say(LONG, max_tokens=4)
            assert answer.status == 200
            places.append(answer.headers["x-ppd-decode"])
            drained = fleet.engines[places[-1]].address
            if len(places) == 1:
                await fleet.admin("PATCH", f"/workers/{drained}", {"draining": True})
        assert places[0] != places[1] == places[2]
