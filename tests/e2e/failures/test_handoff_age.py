"""A handoff that has become too old on its way reaches no D: by then P may have given its blocks to other prompts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ppd.servers.fleet.ports import free_ports
from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, FaultPhase, Faults, Order
from ppd.servers.sim.engine.engine import SimEngine
from tests.support.fleet import Fleet, start_engine, static_workers
from tests.support.scripted_workers import LateReader
from tests.support.serve_program import serving, until

LEASE_S = 2.4
AGE_S = 1.6
LONG = "A message of some length, so that there are blocks to move. " * 20
QUICK: dict[str, Any] = {"mode": "always_split", "handoff_max_age_s": AGE_S}


def held_up(seconds: float, times: int = 1, phase: FaultPhase = FaultPhase.REQUEST) -> Faults:
    """P has computed the prompt, and its answer takes so long."""
    return Faults([Order(FaultKind.SLOW, leg=FaultLeg.PREFILL, times=times, phase=phase, delay_s=seconds)])


def traps(*engines: SimEngine) -> int:
    return sum(sum(engine.counters.traps.values()) for engine in engines)


async def legs_of(fleet: Any, turn: Any) -> list[tuple[str, str | None]]:
    return [(leg["kind"], leg["error"]) for leg in (await fleet.receipt(turn))["legs"]]


P, D, STALE = ("prefill", None), ("decode", None), ("decode", "stale_handoff")


@pytest.mark.parametrize("phase", [FaultPhase.REQUEST, FaultPhase.HEAD], ids=["head", "body"])
async def test_an_answer_of_p_that_is_held_up_beyond_the_lease_makes_no_text_wrong(
    start_fleet: Any, phase: FaultPhase
) -> None:
    async with start_fleet("P1 P2 D1", engine={"lease_s": LEASE_S}, **QUICK) as fleet:
        right = (await fleet.conversation().say(LONG)).text
        for name in ("P1", "P2"):
            fleet.engines[name].faults = held_up(LEASE_S + 0.1, phase=phase)
        turn = await fleet.conversation().say(LONG)
        assert (turn.status, turn.text) == (200, right)
        assert await legs_of(fleet, turn) == [P, STALE, P, D]
        first, _, second, _ = (await fleet.receipt(turn))["legs"]
        assert first["worker"] == second["worker"], "it has the prompt in its cache"
        assert not traps(*fleet.engines.values())
        sample = 'ppd_leg_failures_total{cause="stale_handoff",leg="decode",phase="connect"}'
        assert await fleet.metric(sample) == 1


@pytest.mark.parametrize(
    ("budget", "legs"),
    [(100, [P, STALE] * 3 + [("local", None)]), (0, [P, STALE, ("local", None)])],
    ids=["with budget", "without"],
)
async def test_a_p_that_is_always_too_slow_costs_time_but_no_turn(
    start_fleet: Any, budget: int, legs: list[tuple[str, str | None]]
) -> None:
    retries = {"retry_burst": budget, "retry_share": 0.0}
    async with start_fleet("P1 P2 D1", **{**QUICK, "handoff_max_age_s": 0.02, **retries}) as fleet:
        for name in ("P1", "P2"):
            fleet.engines[name].faults = held_up(0.05, times=99)
        turn = await fleet.conversation().say(LONG)
        assert (turn.status, await legs_of(fleet, turn)) == (200, legs)
        assert not fleet.proxy.state.health.breakers.states(fleet.proxy.state.now()), "it is nobody's fault"


async def test_a_handoff_that_is_not_pulled_over_leases_has_no_age(start_fleet: Any) -> None:
    async with start_fleet("", **{**QUICK, "handoff_max_age_s": 0.001}) as fleet:
        for name in ("P1", "D1"):
            await fleet.add(name, options=",connector=none")
        turn = await fleet.conversation().say(LONG)
        assert (turn.status, await legs_of(fleet, turn)) == (200, [P, D])


def prompt(number: int) -> dict[str, Any]:
    return {"model": "sim", "prompt": f"{number} {LONG}", "max_tokens": 24, "temperature": 0}


async def text_of(session: aiohttp.ClientSession, url: str, number: int) -> str:
    async with session.post(f"{url}/v1/completions", json=prompt(number)) as answer:
        assert answer.status == 200
        return str((await answer.json())["choices"][0]["text"])


async def test_a_proxy_that_was_stopped_makes_no_text_wrong(tmp_path: Path) -> None:
    """As a debugger, a laptop's lid or a starved machine does, with P's answer in its socket meanwhile."""
    async with AsyncExitStack() as stack:
        p, d = [await start_engine(stack, name, lease_s=LEASE_S) for name in ("P1", "D1")]
        workers = static_workers([("P1", p.address), ("D1", d.address)])
        flags = ("--mode", "always_split", "--handoff-max-age-s", f"{AGE_S}", "--canary-interval-s", "0")
        proxy = await stack.enter_async_context(serving(tmp_path, workers, 1, *flags))
        p.faults = held_up(1.0, times=4)
        asking = [asyncio.create_task(text_of(proxy.session, proxy.base_url, number)) for number in range(4)]
        await until(lambda: len(p.handoffs) == 4)
        os.kill(proxy.process.pid, signal.SIGSTOP)
        await asyncio.sleep(LEASE_S + 0.1)
        os.kill(proxy.process.pid, signal.SIGCONT)
        texts = await asyncio.gather(*asking)
        p.faults = Faults()
        assert texts == [await text_of(proxy.session, f"http://{p.address}", number) for number in range(4)]
        assert not traps(p, d)
        assert p.counters.expired_handoffs >= 4, "so long that the blocks were free for others"


@asynccontextmanager
async def engine_process(role: str) -> AsyncIterator[tuple[int, str]]:
    """A simulated engine that can be stopped, by its process id and address."""
    (port,) = free_ports(1)
    argv = ("-m", "ppd.servers.sim", "--role", role, "--port", str(port), "--time-scale", "0")
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.DEVNULL)
    try:
        yield process.pid, f"127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def test_a_d_that_stood_still_makes_no_text_wrong(start_fleet: Any) -> None:
    """It reads after the lease what it was sent in time. Other prompts' KV must not be in its cache either, later."""
    lease_s = 6.0
    settings = {**QUICK, "handoff_max_age_s": lease_s * 2 / 3, "probe_interval_s": 3600.0}
    async with start_fleet("P1 D2", engine={"lease_s": lease_s}, **settings) as fleet, engine_process("D") as (pid, at):
        await fleet.admin("POST", "/workers", {"worker": f"D={at}"})
        await fleet.until(lambda: set(fleet.states().values()) == {"up"} and len(fleet.states()) == 3)
        p = fleet.engines["P1"]
        right = [await text_of(fleet.session, f"http://{p.address}", number) for number in range(8)]
        os.kill(pid, signal.SIGSTOP)
        asking = [asyncio.create_task(text_of(fleet.session, fleet.base_url, number)) for number in range(8)]
        await fleet.until(lambda: p.counters.expired_handoffs > 0)
        os.kill(pid, signal.SIGCONT)
        assert await asyncio.gather(*asking) == right
        sample = 'ppd_leg_failures_total{cause="stale_handoff",leg="decode",phase="request_sent"}'
        assert await fleet.metric(sample) > 0
        assert [await text_of(fleet.session, f"http://{at}", number) for number in range(8)] == right
        assert not traps(*fleet.engines.values())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "used_handoff"),
        ({"remote_request_id": "another"}, "unknown_handoff"),
        ({"remote_engine_id": "another"}, "wrong_engine"),
        ({"remote_block_ids": []}, "no_remote_blocks"),
    ],
)
async def test_a_case_in_which_a_handoff_is_misused_fails_by_its_name(changes: dict[str, Any], named: str) -> None:
    """Whatever else it looks at: with NIXL's pull mode no engine refuses such a leg."""
    with pytest.raises(AssertionError, match=named):
        async with Fleet.of("P1 D1") as fleet:
            body = {"model": "sim", "messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
            ask = {"kv_transfer_params": {"do_remote_decode": True}}
            params = (await leg_to(fleet, "P1", body | ask))["kv_transfer_params"]
            await leg_to(fleet, "D1", body | {"kv_transfer_params": params})
            again = {"kv_transfer_params": params | changes, "cache_salt": "D holds nothing of it"}
            await leg_to(fleet, "D1", body | again)


async def leg_to(fleet: Fleet, name: str, body: dict[str, Any]) -> Any:
    """What the engine answers to a leg that no proxy has made."""
    async with fleet.session.post(f"http://{fleet.engines[name].address}/v1/chat/completions", json=body) as answer:
        return await answer.json()


async def test_a_d_that_reads_late_gets_the_time_to_take_what_its_client_left(start_fleet: Any) -> None:
    """The head of a stream shows that it was read; of other answers nothing does before their end, so they get less."""
    async with start_fleet("P1", **QUICK) as fleet, LateReader(late_s=0.3).joined(fleet) as d:
        body = {"model": "sim", "messages": [{"role": "user", "content": LONG}], "max_tokens": 4}
        for number, (stream, late_s) in enumerate(((True, 0.3), (False, 0.3), (True, 1.0), (False, 1.0)), start=1):
            d.late_s = late_s
            asking = asyncio.create_task(fleet.post("/v1/chat/completions", {**body, "stream": stream}))
            await fleet.until(lambda came=number: d.came == came)
            asking.cancel()
            await fleet.until(lambda came=number: d.taken + d.dropped == came)
        assert (d.taken, d.dropped) == (3, 1)
