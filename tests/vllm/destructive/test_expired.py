"""A D that hears of a handoff when P has long used the KV's blocks for others' prompts: no wrong text comes of it.

vLLM does not refuse such a handoff: D reads what lies there by now and answers with status 200.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.network.fault_link import Way
from ppd.proxy.fleet.worker import Role

pytestmark = pytest.mark.asyncio(loop_scope="session")

EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
LEASE_S = 30.0
NO_TIME_S = 0.01  # each leg has a connection of its own: a kept one is closed by D, which would tell
PROMPT_TOKENS = 1500
OTHERS_TOKENS = 8000  # at most, of each of others' prompts
others = itertools.count(100)
ASKED = {"max_tokens": 24, "cache_salt": "expired"}


@dataclass
class Outcome:
    status: int
    text: str
    right: str


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def outcomes(fleet: Any) -> dict[str, Outcome]:
    """Turns whose D cannot be reached from P's answer until P has given the KV's blocks to others.

    One proxy probes its D, as it does with static workers; the other one hears of nothing, as if an agent spoke for D.
    """
    expired = (await fleet.counters(Role.PREFILL))[EXPIRED]
    async with (
        fleet.beside(Role.DECODE, probe_interval_s=5.0, keepalive_s=NO_TIME_S) as probing,
        fleet.beside(Role.DECODE, probe_interval_s=3600.0, keepalive_s=NO_TIME_S) as trusting,
    ):
        for beside in (probing, trusting):
            await beside.links[Role.DECODE].partition(Way.OUT, accepts=True)
        asking = {
            "probed, streamed": asyncio.create_task(ask(fleet, 1, probing.stream)),
            "probed, whole": asyncio.create_task(ask(fleet, 2, probing.chat)),
            "not probed, streamed": asyncio.create_task(ask(fleet, 3, trusting.stream)),
            "not probed, whole": asyncio.create_task(ask(fleet, 4, trusting.chat)),
        }
        await asyncio.sleep(LEASE_S / 2)
        while (free := await free_tokens(fleet)) > PROMPT_TOKENS:
            await occupy(fleet, min(OTHERS_TOKENS, free), pinned=True)
        await fleet.eventually(lambda: has_expired(fleet, expired + len(asking)), LEASE_S)
        await occupy(fleet, await free_tokens(fleet))
        for beside in (probing, trusting):
            beside.links[Role.DECODE].heal()
        async with asyncio.timeout(60):
            return {name: await answer for name, answer in asking.items()}


@pytest.mark.parametrize("turn", ["probed, streamed", "probed, whole", "not probed, streamed", "not probed, whole"])
async def test_a_handoff_that_expires_on_its_way_to_d(outcomes: dict[str, Outcome], turn: str) -> None:
    outcome = outcomes[turn]
    if outcome.status == 200:
        assert outcome.text == outcome.right
    else:
        assert outcome.status in (502, 503, 504)


async def ask(fleet: Any, number: int, say: Any) -> Outcome:
    messages = prompt(number, PROMPT_TOKENS)
    answer = await say(messages, **ASKED)
    return Outcome(answer.status, answer.text, await fleet.straight(Role.REPLICA, messages, **ASKED))


def prompt(number: int, tokens: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": (f"{number} is what nobody came for. " * tokens)[:tokens]}]


async def has_expired(fleet: Any, count: float) -> bool:
    return bool((await fleet.counters(Role.PREFILL))[EXPIRED] >= count)


async def free_tokens(fleet: Any) -> int:
    """What P's cache has room for, but for a few blocks."""
    load = await fleet.load(Role.PREFILL)
    return int((1 - load.kv_usage) * load.kv_capacity_tokens) - 256


async def occupy(fleet: Any, tokens: int, *, pinned: bool = False) -> None:
    """Another's prompt on P; a `pinned` one keeps its blocks for a D that never comes."""
    asked = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}} if pinned else {}
    number = next(others)
    await fleet.straight(Role.PREFILL, prompt(number, tokens), max_tokens=1, cache_salt=f"others-{number}", **asked)
