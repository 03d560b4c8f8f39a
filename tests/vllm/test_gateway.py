"""Real engines behind a real Envoy, ppd's picker and a sidecar before D: the proxy's texts and the proxy's hits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ppd.proxy.config import Mode
from ppd.proxy.fleet.worker import Role
from ppd.servers.fleet.ports import free_ports
from ppd.servers.vllm.launch import TINY_NAME
from tests.e2e.gateway.envoy_program import envoy_before, is_finished, sidecar_before
from tests.support.proxy import Chat, ProxyClient, running_proxy
from tests.vllm.test_conversations import THREE, salted

pytestmark = pytest.mark.asyncio(loop_scope="session")

PULLED, HIT = "external_kv_transfer", "local_cache_hit"


async def played(fleet: Any, client: Any, body: dict[str, Any], proxy: Any) -> list[tuple[Any, ...]]:
    """Route and text of each turn, the cached tokens that it was told, and D's own counts of what it had and pulled."""
    chat, turns = Chat(client), []
    for text in THREE:
        before = await fleet.counters(Role.DECODE)
        turn = await chat.say(text, **body)
        after = await fleet.counters(Role.DECODE)
        assert turn.status == 200, turn.body
        told = turn.body["usage"]["prompt_tokens_details"]["cached_tokens"]
        counted = [after.get(name, 0.0) - before.get(name, 0.0) for name in (HIT, PULLED)]
        turns.append((turn.route, turn.text, told, *counted))
        request_id = turn.headers["x-request-id"]
        await client.until(partial(is_finished, proxy, request_id))  # the next turn finds it learnt
    return turns


async def test_three_turns_behind_envoy_are_those_of_the_proxy(fleet: Any, tmp_path: Path) -> None:
    await fleet.mode(Mode.ALWAYS_LOCAL)
    alone = await played(fleet, fleet, salted(max_tokens=48), fleet.proxy)
    picker, clients, reports = free_ports(3)
    p, d = (fleet.specs[role].address for role in (Role.PREFILL, Role.DECODE))
    settings: dict[str, Any] = {
        "mode": Mode.ALWAYS_LOCAL,
        "picker_port": picker,
        "heartbeat_port": reports,
        "probe_interval_s": 0.5,
    }
    async with running_proxy(workers=(f"P={p}",), **settings) as (proxy, url, session):
        asked = ProxyClient(proxy, url, session)
        async with (
            sidecar_before(d, proxy) as sidecar,
            envoy_before(proxy, url, clients, tmp_path) as envoy,
        ):
            status, _ = await asked.admin("POST", "/workers", {"worker": f"D={sidecar}"})
            assert status == 201
            await asked.until(lambda: list(asked.states().values()) == ["up", "up"], 60)
            through = ProxyClient(proxy, envoy, session, TINY_NAME)
            await played(fleet, through, salted(max_tokens=48), proxy)  # the sidecar's reports are waited for from here
            behind = await played(fleet, through, salted(max_tokens=48), proxy)
    assert [turn[0] for turn in alone] == ["SPLIT", "LOCAL", "LOCAL"]
    assert behind == alone
