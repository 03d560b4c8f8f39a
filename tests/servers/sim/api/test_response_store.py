"""Responses that an engine stores: continued, read, and cancelled while they run in the background."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest


async def ask(engine: Any, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session:
        async with session.request(method, f"http://{engine.address}{path}", json=body) as answer:
            return answer.status, await answer.json()


async def respond(engine: Any, text: str, **members: Any) -> tuple[int, Any]:
    return await ask(
        engine, "POST", "/v1/responses", {"model": "sim", "input": text, "max_output_tokens": 8, **members}
    )


async def test_a_stored_response_is_the_history_of_the_next(lab: Any) -> None:
    engine = await lab.start(stores_responses=True)
    _, first = await respond(engine, "hi")
    _, alone = await respond(engine, "And?")
    status, second = await respond(engine, "And?", previous_response_id=first["id"])
    assert status == 200
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"] > alone["usage"]["input_tokens"]
    assert await ask(engine, "GET", f"/v1/responses/{second['id']}") == (200, second)


@pytest.mark.parametrize(("stores", "members"), [(False, {}), (True, {"store": False})])
async def test_what_is_not_stored_is_unknown(lab: Any, stores: bool, members: dict[str, Any]) -> None:
    engine = await lab.start(stores_responses=stores)
    _, first = await respond(engine, "hi", **members)
    status, answer = await ask(engine, "GET", f"/v1/responses/{first['id']}")
    assert (status, answer["error"]["param"]) == (404, "response_id")
    assert (await respond(engine, "And?", previous_response_id=first["id"]))[0] == 404


async def test_the_bodys_request_id_is_the_responses_and_the_headers_is_not(lab: Any) -> None:
    engine = await lab.start()
    assert (await respond(engine, "hi", request_id="mine"))[1]["id"] == "mine"


async def test_a_response_in_the_background_can_be_cancelled_until_it_is_complete(lab: Any) -> None:
    engine = await lab.start(stores_responses=True, time_scale=1.0)
    _, queued = await respond(engine, "hi", background=True, max_output_tokens=20_000)
    assert queued["status"] == "queued"
    _, cancelled = await ask(engine, "POST", f"/v1/responses/{queued['id']}/cancel")
    assert cancelled["status"] == "cancelled"
    _, done = await respond(engine, "hi")
    assert (await ask(engine, "POST", f"/v1/responses/{done['id']}/cancel"))[0] == 400
    assert not list(engine.scheduler.sequences)
