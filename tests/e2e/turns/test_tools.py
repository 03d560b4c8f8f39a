"""Tools and forms through the proxy, with the clients that applications use."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from ppd.proxy.config import DataPlane

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "kelvin"]}},
    "required": ["city"],
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
ASK: Any = [{"role": "user", "content": "What is the weather where you are, and will it stay so? " * 4}]


def openai_client(fleet: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.base_url}/v1", api_key="k", max_retries=0)


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> tuple[str, Any]:
    """The route, and the answer that the client has put together."""
    async with client.chat.completions.stream(model="sim", tools=TOOLS, **asked) as stream:
        async for _ in stream:
            pass
        return stream._response.headers["x-ppd-route"], await stream.get_final_completion()


@pytest.mark.parametrize("plane", DataPlane)
async def test_a_tool_loop_is_answered_where_its_call_was_made(start_fleet: Any, plane: DataPlane) -> None:
    async with start_fleet("P1 D1 R1", data_plane=plane) as fleet, openai_client(fleet) as client:
        route, one = await streamed(client, messages=ASK, tool_choice="required")
        message = one.choices[0].message
        (call,) = message.tool_calls
        assert (route, one.choices[0].finish_reason, call.function.name) == ("SPLIT", "tool_calls", "weather")
        assert set(json.loads(call.function.arguments)) >= {"city"}
        d = fleet.engines["D1"].counters
        pulled, hits = d.external_kv_tokens, d.local_cache_hit_tokens
        said = message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        told = [*ASK, said, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        route, two = await streamed(client, messages=told)
        assert (route, two.choices[0].finish_reason) == ("LOCAL", "stop")
        assert two.choices[0].message.content
        # D finds its own call, too.
        assert d.external_kv_tokens == pulled
        assert d.local_cache_hit_tokens - hits > len(ASK[0]["content"]) + len(call.function.arguments)
        await fleet.until(fleet.idle)


async def test_a_form_is_kept_by_every_route(start_fleet: Any) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS}}
    asked: Any = {"model": "sim", "messages": ASK, "response_format": form, "logprobs": True, "top_logprobs": 2}
    texts = []
    for names in ("P1 D1", "R1"):
        async with start_fleet(names) as fleet, openai_client(fleet) as client:
            whole = (await client.chat.completions.create(**asked)).choices[0]
            chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(**asked, stream=True)]
            assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
            entries = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content or ()]
            assert whole.logprobs is not None and entries == whole.logprobs.content
            texts.append(whole.message.content or "")
    assert texts[0] == texts[1]
    assert set(json.loads(texts[0])) >= {"city"}


async def test_the_other_apis_call_tools_too(start_fleet: Any) -> None:
    async with start_fleet("P1 D1") as fleet, openai_client(fleet) as client:
        function: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS}
        async with client.responses.stream(
            model="sim", input=ASK, tools=[function], tool_choice="required"
        ) as responses:
            (item,) = (await responses.get_final_response()).output
        assert item.type == "function_call" and "city" in json.loads(item.arguments)
        tool: Any = {"name": "weather", "input_schema": PARAMETERS}
        async with anthropic.AsyncAnthropic(base_url=fleet.base_url, api_key="k", max_retries=0) as other:
            async with other.messages.stream(
                model="sim", messages=ASK, tools=[tool], tool_choice={"type": "any"}, max_tokens=400
            ) as messages:
                answer = await messages.get_final_message()
        (block,) = answer.content
        assert block.type == "tool_use" and "city" in block.input
        assert answer.stop_reason == "tool_use"
        await fleet.until(fleet.idle)
