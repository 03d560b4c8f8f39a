"""The KV of a session goes from D to P and back on real engines, and P computes only what is new."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ppd.proxy.fleet.worker import Role
from ppd.servers.vllm.launch import TINY_NAME
from tests.support.proxy import ADMIN_KEY, Chat, ProxyClient, Turn, running_proxy
from tests.vllm.conftest import KEEPS_S
from tests.vllm.test_conversations import BLOCK, THREE, salted
from tests.vllm.test_lending import LONG

pytestmark = pytest.mark.asyncio(loop_scope="session")

P, D = Role.PREFILL, Role.REPLICA  # an R's engine, which the proxy is told of as a D
TOLD = f",bidirectional_kv_xfer=true,decoder_kv_blocks_ttl={KEEPS_S}"


@dataclass
class Talk:
    """A conversation, and what P and D have counted."""

    fleet: Any
    chat: Chat
    body: dict[str, Any] = field(default_factory=lambda: salted(max_tokens=60))

    async def say(self, text: str, route: str) -> tuple[Turn, dict[str, float], dict[str, float]]:
        """The turn, whose text is that of one engine, and what P and D have counted meanwhile."""
        self.chat.headers |= {"X-PPD-Force-Route": route, "X-Admin-Key": ADMIN_KEY}
        before = [await self.fleet.counters(at) for at in (P, D)]
        turn = await self.chat.say(text, **self.body)
        after = [await self.fleet.counters(at) for at in (P, D)]
        assert (turn.status, turn.route) == (200, route), turn.headers
        alone = await self.fleet.straight(Role.DECODE, self.chat.messages[:-1], **salted(max_tokens=60))
        assert turn.text == alone
        assert (
            not turn.body.keys() & {"kv_transfer_params", "prompt_token_ids"} or turn.body["prompt_token_ids"] is None
        )
        on_p, on_d = (
            {name: now[name] - was.get(name, 0.0) for name in now} for now, was in zip(after, before, strict=True)
        )
        return turn, on_p, on_d


@asynccontextmanager
async def told(fleet: Any) -> AsyncIterator[ProxyClient]:
    workers = tuple(f"{role}={fleet.specs[at].address}{TOLD}" for role, at in (("P", P), ("D", D)))
    async with running_proxy(workers=workers) as running:
        client = ProxyClient(*running, TINY_NAME)
        await client.until(lambda: list(client.states().values()) == ["up", "up"], 60)
        yield client


async def test_p_reads_back_turn_after_turn_and_the_text_is_that_of_one_engine(fleet: Any) -> None:
    async with told(fleet) as client:
        talk = Talk(fleet, client.conversation())
        first, _, _ = await talk.say(LONG, "SPLIT")
        held = first.body["usage"]["total_tokens"]
        for text in THREE[1:]:
            turn, on_p, on_d = await talk.say(text, "READBACK")
            prompt, read = turn.body["usage"]["prompt_tokens"], on_p["external_kv_transfer"]
            assert held - 1 <= read <= held
            assert on_p["local_compute"] == prompt - read, "P computed only what was new"
            assert on_d["external_kv_transfer"] + on_d["local_cache_hit"] >= prompt - 1
            assert on_d["external_kv_transfer"] <= prompt - held + 2 * BLOCK, "D had the rest"
            assert turn.body["usage"]["prompt_tokens_details"]["cached_tokens"] == read
            held = turn.body["usage"]["total_tokens"]


async def test_kv_of_another_conversation_reaches_no_answer_and_no_cache_that_others_use(fleet: Any) -> None:
    """As if two handles were mixed up: P reads KV of other tokens than its prompt begins with, and does not notice."""
    async with told(fleet) as client:
        talks = [Talk(fleet, client.conversation()) for _ in range(2)]
        for talk, text in zip(talks, (LONG, LONG.replace("hike", "bike")), strict=True):
            await talk.say(text, "SPLIT")
        kept = client.proxy.state.handles.kept
        ours, theirs = kept
        kept[ours], kept[theirs] = kept[theirs], kept[ours]
        turn, on_p, on_d = await talks[0].say(THREE[1], "READBACK")
        assert on_p["external_kv_transfer"] > 0
        assert on_d["external_kv_transfer"] == 0
        assert (await client.receipt(turn))["handoff_missing"] == "not_a_prefix"
        for talk in talks:
            await talk.say(THREE[2], "SPLIT")


@pytest.mark.parametrize(
    "spoilt", [{"remote_blocks_expiry_time": 1.0}, {"remote_engine_id": "gone", "remote_port": 1}], ids=["late", "gone"]
)
async def test_a_p_that_cannot_read_says_so_and_keeps_nothing(fleet: Any, spoilt: dict[str, Any]) -> None:
    async with told(fleet) as client:
        talk, before = Talk(fleet, client.conversation()), await fleet.load(P)
        await talk.say(LONG, "SPLIT")
        (history, handle), *_ = client.proxy.state.handles.kept.items()
        params = msgspec.json.encode({**msgspec.json.decode(handle.params), **spoilt})
        client.proxy.state.handles.kept[history] = replace(handle, params=params)
        turn, on_p, _ = await talk.say(THREE[1], "READBACK")
        assert on_p["external_kv_transfer"] == 0
        receipt = await client.receipt(turn)
        assert receipt["handoff_missing"] == "handle_refused"
        assert [leg["status"] for leg in receipt["legs"]] == [500, 200]
        after = await fleet.load(P)
        assert (after.running, after.waiting) == (0, 0)
        assert after.kv_usage <= before.kv_usage, "leases of turns before may have ended"
