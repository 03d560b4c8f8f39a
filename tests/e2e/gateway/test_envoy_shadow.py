"""A picker that only watches, beside the one that rules: a real Envoy, and simulated engines."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from pathlib import Path

import pytest

from ppd.proxy.assembly import Proxy
from ppd.proxy.config import Mode
from ppd.servers.fleet.ports import free_ports
from tests.e2e.gateway.envoy_program import carried
from tests.support.fleet import proxy_before
from tests.support.proxy import Chat

pytestmark = pytest.mark.e2e
LONG = "Tell me of a thing that lasts for long. " * 20


def is_known(shadow: Proxy, request_id: str) -> bool:
    receipt = shadow.state.receipts.find(request_id)
    return receipt is not None and receipt.outcome == "completed"


async def test_a_shadow_notes_what_it_would_have_done_and_changes_nothing(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    watched = {"shadow": ("127.0.0.1", port), "sees_answers": True}
    async with carried(tmp_path, "D1 D2", options=watched) as (fleet, envoy):
        only_known_to_it = await fleet.start("R1")
        addresses = [
            *((name, engine.address) for name, engine in fleet.engines.items()),
            ("R1", only_known_to_it.address),
        ]
        async with proxy_before(addresses, picker_port=port, picker_shadow=True, mode=Mode.REPLICA) as (shadow, _, _):
            chat, alone = Chat(envoy), Chat(fleet, headers={"Authorization": "Bearer another"})
            for turn in range(3):
                answer = await chat.say(LONG, max_tokens=20)
                assert (answer.status, answer.text) == (200, (await alone.say(LONG, max_tokens=20)).text)
                request_id = answer.headers["x-request-id"]
                await fleet.until(partial(is_known, shadow, request_id))
                noted, done = shadow.state.receipts.find(request_id), fleet.proxy.state.receipts.find(request_id)
                assert noted is not None and done is not None
                assert noted.shadow is not None
                assert (noted.shadow.route, noted.shadow.decode, noted.turn) == ("REPLICA", "R1", turn + 1)
                assert (
                    (noted.route, noted.decode)
                    == (done.route, done.decode)
                    == ("LOCAL", answer.headers["x-ppd-decode"])
                )
                assert (noted.prompt_tokens, noted.cached_tokens) == (done.prompt_tokens, done.cached_tokens)
                assert done.shadow is None
            assert not only_known_to_it.received
            await fleet.until(fleet.idle)


async def test_a_shadow_that_hangs_or_is_gone_delays_nobody(tmp_path: Path) -> None:
    statuses = []
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # the kernel takes connections, and nobody reads them
        async with (
            carried(tmp_path, "D1", options={"shadow": hanging.getsockname()}) as (_, envoy),
            asyncio.timeout(60),  # the time-out of a picker that rules is longer
        ):
            for padding in (0, 900_000):
                statuses.append((await Chat(envoy).say(LONG, max_tokens=20, user="x" * padding)).status)
            hanging.close()
            statuses.append((await Chat(envoy).say(LONG, max_tokens=20)).status)
    assert statuses == [200] * 3
