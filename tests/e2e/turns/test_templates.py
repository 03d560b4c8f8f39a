"""What workers report as cached teaches the order of a model's template."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from ppd.proxy.config import DataPlane
from tests.support.scripted_workers import odd_worker

TOOLS = [{"type": "function", "function": {"name": "find", "description": "Looks for something. " * 200}}]
TOKENS = {"prompt": 1600, "tools": 1100}


@pytest.mark.parametrize("data_plane", [DataPlane.NATIVE, DataPlane.ASGI])
async def test_a_worker_that_finds_the_tools_cached_under_another_system_renders_them_first(
    start_fleet: Any, data_plane: DataPlane
) -> None:
    asked = list[dict[str, Any]]()

    async def answers(request: web.Request) -> web.Response:
        asked.append(json.loads(await request.read()))
        cached = TOKENS["tools"] if len(asked) > 1 else 0
        usage = {
            "prompt_tokens": TOKENS["prompt"],
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        choice = {"index": 0, "message": {"role": "assistant", "content": "yo"}, "finish_reason": "stop"}
        return web.json_response({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage})

    async with start_fleet("", data_plane=data_plane) as fleet, odd_worker(fleet, answers, "R"):
        templates = fleet.proxy.state.templates
        for name in ("ann", "bob"):
            assert not templates.known.of("sim").tools_first
            system = {"role": "system", "content": f"You help {name}. " + "Be brief and kind. " * 60}
            body = {"model": "sim", "messages": [system, {"role": "user", "content": "hi"}], "tools": TOOLS}
            assert (await fleet.post("/v1/chat/completions", body)).status == 200
        assert len(asked) == 2
        assert templates.known.of("sim").tools_first
