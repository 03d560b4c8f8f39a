"""`ppd why` asks a real proxy: by a whole id, by its beginning, and with a wrong key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ppd.proxy.cli.why import command
from ppd.proxy.config import Mode
from tests.support.proxy import ADMIN_KEY

pytestmark = pytest.mark.e2e


async def ask(fleet: Any, request_id: str, key: str = ADMIN_KEY) -> Result:
    arguments = [request_id, "--proxy", fleet.base_url, "--admin-key", key]
    return await asyncio.to_thread(CliRunner().invoke, command, arguments)


async def test_a_running_proxy_is_asked(start_fleet: Any) -> None:
    async with start_fleet("P1 D1 D2", mode=Mode.SLO, profile="h100-llama-3.1-8b") as fleet:
        for request_id in ("one-a", "one-b", "two:1"):
            assert (await fleet.conversation(X_Request_Id=request_id).say("hi")).status == 200
        for asked in ("two:1", "tw"):
            told = await ask(fleet, asked)
            assert told.exit_code == 0, told.output
            assert "two:1" in told.output
            assert "the best first" in told.output
        several = await ask(fleet, "one")
        assert several.exit_code == 1
        assert "2 requests begin with 'one'" in several.output
        unknown = await ask(fleet, "three")
        assert unknown.exit_code == 1
        assert "no receipt of request 'three'" in unknown.output
        early = await fleet.post("/v1/chat/completions", [1], {"X-Request-Id": "four"})
        assert (early.status, early.headers["X-Request-Id"]) == (400, "four")
        assert "none of requests that were refused before they were turns" in (await ask(fleet, "four")).output
        refused = await ask(fleet, "two:1", "guess")
        assert refused.exit_code == 1
        assert "the admin key is missing or wrong" in refused.output


async def test_a_proxy_without_an_admin_key_says_so(start_fleet: Any) -> None:
    async with start_fleet("", admin_key="") as fleet:
        told = await ask(fleet, "a")
        assert (told.exit_code, "set admin_key" in told.output) == (1, True)
