"""Engines that do what is not their role's: one lends itself as P to another, and a P answers turns alone."""

from __future__ import annotations

from dataclasses import replace as replace_costs
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy.config import Mode
from ppd.proxy.fleet.worker import Role
from ppd.proxy.laws import profile_file
from ppd.servers.vllm.launch import TINY_NAME
from tests.support.fleet import crowded, proxy_before
from tests.support.proxy import ProxyClient
from tests.vllm.test_conversations import BLOCK, THREE, salted

pytestmark = pytest.mark.asyncio(loop_scope="session")

ENGINES = (Role.DECODE, Role.REPLICA)
LONG = f"{THREE[0]} " * 12


@pytest.fixture
def slow(tmp_path: Path) -> str:
    """The profile of an engine that computes prompts slowly, and is quick in all else."""
    shipped = profile_file.find("h100-llama-3.1-8b")
    costs = replace_costs(shipped.costs, prefill_token_s=0.01, transfer_s=0.0, send_s=0.0)
    path = tmp_path / "slow.json"
    path.write_bytes(profile_file.encode(replace(shipped, name="slow", costs=costs, fit=None)))
    return str(path)


@pytest.mark.parametrize("called", [Role.DECODE, Role.REPLICA])
async def test_a_session_moves_with_its_kv_and_says_what_one_engine_would(fleet: Any, slow: str, called: Role) -> None:
    addresses = [(called, fleet.specs[role].address) for role in ENGINES]
    engines = {fleet.specs[role].address: role for role in ENGINES}
    async with proxy_before(addresses, limit_s=60, mode=Mode.SLO, profile=slow, moves_kv=True) as running:
        client = ProxyClient(*running, TINY_NAME)
        chat, body = client.conversation(), salted(max_tokens=48)
        first = await chat.say(LONG, **body)
        at = {view.name: view.id for view in client.proxy.state.registry.views()}
        home = at[first.headers["X-PPD-Decode"]]
        other = next(address for address in engines if address != home)
        lent, pulled = [await fleet.counters(engines[address]) for address in (home, other)]
        with crowded(client.proxy, home):
            second = await chat.say(THREE[1], **body)
        lent_after, pulled_after = [await fleet.counters(engines[address]) for address in (home, other)]
        third = await chat.say(THREE[2], **body)
        third_after = await fleet.counters(engines[other])
    assert (second.route, at[second.headers["X-PPD-Prefill"]], at[second.headers["X-PPD-Decode"]]) == (
        *("SPLIT", home),
        other,
    )
    prompt = second.body["usage"]["prompt_tokens"]
    assert prompt - BLOCK <= pulled_after["external_kv_transfer"] - pulled.get("external_kv_transfer", 0.0) <= prompt
    hits = lent_after["local_cache_hit"] - lent.get("local_cache_hit", 0.0)
    held = first.body["usage"]["prompt_tokens"] + first.body["usage"]["completion_tokens"]
    assert held - 2 * BLOCK <= hits <= held, "the lender computed only what was new"
    assert (third.route, at[third.headers["X-PPD-Decode"]]) == ("LOCAL" if called is Role.DECODE else "REPLICA", other)
    assert third_after["local_cache_hit"] - pulled_after.get("local_cache_hit", 0.0) >= prompt - BLOCK
    for number, turn in enumerate((first, second, third)):
        messages = chat.messages[: 2 * number + 1]
        assert turn.text == await fleet.straight(Role.PREFILL, messages, **salted(max_tokens=48))


async def test_a_p_answers_turns_alone_and_hands_over_what_it_holds(fleet: Any, slow: str) -> None:
    roles = (Role.PREFILL, Role.DECODE)
    addresses = [(role, fleet.specs[role].address) for role in roles]
    p, d = (address for _, address in addresses)
    async with proxy_before(addresses, limit_s=60, mode=Mode.SLO, profile=slow, prefills_answer=True) as running:
        client = ProxyClient(*running, TINY_NAME)
        chat, body = client.conversation(), salted(max_tokens=48)
        with crowded(client.proxy, d):
            first = await chat.say(LONG, **body)
        before = await fleet.counters(Role.PREFILL)
        second = await chat.say(THREE[1], **body)
        answered, pulled = [await fleet.counters(role) for role in roles]
        with crowded(client.proxy, p):
            third = await chat.say(THREE[2], **body)
        handed_over, got = [await fleet.counters(role) for role in roles]
    assert [turn.headers["X-PPD-Decode"] for turn in (first, second, third)] == ["P1", "P1", "D1"]
    assert [turn.route for turn in (first, second, third)] == ["REPLICA", "REPLICA", "SPLIT"]
    held = [turn.body["usage"]["prompt_tokens"] + turn.body["usage"]["completion_tokens"] for turn in (first, second)]
    for tokens, after, earlier in ((held[0], answered, before), (held[1], handed_over, answered)):
        hits = after["local_cache_hit"] - earlier.get("local_cache_hit", 0.0)
        assert tokens - 2 * BLOCK <= hits <= tokens, "P computed only what was new"
    prompt = third.body["usage"]["prompt_tokens"]
    moved = got["external_kv_transfer"] - pulled.get("external_kv_transfer", 0.0)
    assert prompt - BLOCK <= moved <= prompt
    for number, turn in enumerate((first, second, third)):
        assert turn.text == await fleet.straight(Role.REPLICA, chat.messages[: 2 * number + 1], **body)
