"""Last, as it costs the fleet its P: a killed prefill server leaves conversations working."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.config import Mode
from ppd.proxy.workers import Role

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_conversations_outlive_their_prefill_server(fleet: Any) -> None:
    await fleet.mode(Mode.ALWAYS_SPLIT)
    chat = fleet.conversation()
    assert (await chat.say("A conversation that starts while all is well.")).route == "SPLIT"
    await fleet.engines[Role.PREFILL].kill()
    second = await chat.say("And goes on without its prefill server.")
    assert (second.status, second.route, second.reason) == (200, "LOCAL", "no_prefill_worker")
    fresh = await fleet.conversation().say("A new one is served as well.")
    assert (fresh.status, fresh.reason) == (200, "no_prefill_worker")
    await fleet.mode(Mode.REPLICA)
    alone = fleet.conversation()
    await fleet.mode(Mode.ALWAYS_SPLIT)
    assert (await alone.say("Whatever is left answers.")).status == 200
