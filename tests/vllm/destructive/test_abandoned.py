"""Clients that leave, at each phase of a hand-over: no engine keeps anything for them, long before a lease ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from benchmarks.network.fault_link import Way
from ppd.proxy.fleet.worker import Role

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = 8000  # tokens: P computes them for seconds
SHORT = 1500
WITHIN_S = 10.0  # a third of P's lease
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
PULLED = "external_kv_transfer"
serial = itertools.count()
both = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


def prompt(tokens: int) -> list[dict[str, Any]]:
    """A message of about as many tokens, that no cache knows."""
    words = f"{next(serial)} left behind, and forgotten by everyone. "
    return [{"role": "user", "content": (words * tokens)[:tokens]}]


def ask(client: Any, tokens: int, *, stream: bool, max_tokens: int = 6000) -> asyncio.Task[Any]:
    """A turn that goes on for long unless its client leaves."""
    body: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "cache_salt": f"left-{next(serial)}"}
    say = client.stream if stream else client.chat
    return asyncio.create_task(say(prompt(tokens), **body))


async def leave(asking: asyncio.Task[Any]) -> None:
    """Closes the client's connection."""
    assert not asking.done(), "it waits for its answer"
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking


@asynccontextmanager
async def nothing_stays(fleet: Any, beside: Any, **fates: int) -> AsyncIterator[None]:
    """What happens inside leaves nothing on the engines and in the proxy, and costs P no lease.

    fates: how many hand-overs the proxy must say to have ended so.
    """
    expired = (await fleet.counters(Role.PREFILL))[EXPIRED]
    yield

    async def is_idle() -> bool:
        loads = [await fleet.load(role) for role in (Role.PREFILL, Role.DECODE)]
        return beside.is_idle() and not any(load.running or load.waiting or load.kv_usage for load in loads)

    await fleet.eventually(is_idle, WITHIN_S)
    assert (await fleet.counters(Role.PREFILL))[EXPIRED] == expired
    for sample in ("ppd_handoffs_outstanding", 'ppd_inflight_legs{role="P"}', 'ppd_inflight_legs{role="D"}'):
        assert await beside.metric(sample) == 0, sample
    for fate, count in fates.items():
        assert await beside.metric(f'ppd_handovers_abandoned_total{{fate="{fate}"}}') == count


async def more(fleet: Any, role: Role, name: str) -> Callable[[], Awaitable[bool]]:
    """Whether this engine has counted more of `name` than when this was called."""
    before: float = (await fleet.counters(role)).get(name, 0.0)

    async def counts_more() -> bool:
        counters: dict[str, float] = await fleet.counters(role)
        return counters.get(name, 0.0) > before

    return counts_more


@both
async def test_a_client_that_leaves_while_p_computes(fleet: Any, stream: bool) -> None:
    async with fleet.beside() as beside, nothing_stays(fleet, beside, aborted=1):
        asking = ask(beside, LONG, stream=stream)
        await fleet.eventually(lambda: fleet.computes(Role.PREFILL))
        await leave(asking)


@both
async def test_a_client_that_leaves_while_ps_answer_is_on_the_wire(fleet: Any, stream: bool) -> None:
    """P has pinned the prompt's KV, and the proxy does not know of it yet: D takes it off P's hands."""
    async with fleet.beside(Role.PREFILL) as beside, nothing_stays(fleet, beside, taken=1):
        has_computed = await more(fleet, Role.PREFILL, "vllm:prompt_tokens_total")
        asking = ask(beside, SHORT, stream=stream)
        await fleet.until(lambda: beside.inflight(Role.PREFILL))
        await beside.links[Role.PREFILL].partition(Way.BACK, accepts=True)
        await fleet.eventually(has_computed)
        await leave(asking)
        await asyncio.sleep(0.03)
        beside.links[Role.PREFILL].heal()


async def test_clients_that_leave_while_d_is_busy(fleet: Any) -> None:
    """D computes a long prompt; what it is asked for meanwhile is not admitted yet, or pulled, or queued."""
    async with fleet.beside() as beside, nothing_stays(fleet, beside):
        handoffs, now = beside.proxy.state.handoffs, beside.proxy.state.now
        busy = asyncio.create_task(fleet.straight(Role.DECODE, prompt(LONG * 3 // 2), max_tokens=1))
        await fleet.eventually(lambda: fleet.computes(Role.DECODE))
        for stream, stays_s in itertools.product((True, False), (0.0, 0.3)):
            asking = ask(beside, SHORT, stream=stream)
            await fleet.until(lambda: handoffs.outstanding(now()) > 0)
            await asyncio.sleep(stays_s)
            await leave(asking)
            await fleet.until(beside.is_idle, WITHIN_S)
        await busy
