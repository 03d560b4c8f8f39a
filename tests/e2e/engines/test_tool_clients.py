"""Tools, forms and log probabilities of an engine are of the shape that the official clients read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from ppd.proxy.fleet.worker import Role
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.engine.engine import SimEngine
from ppd.servers.sim.launch import running_engine

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}
CHAT_TOOLS: Any = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS: Any = [{"type": "function", **FUNCTION}]
MESSAGES_TOOLS: Any = [{"name": "weather", "input_schema": PARAMETERS}]
HI: Any = [{"role": "user", "content": "hi there"}]


class Trip(BaseModel):
    city: str
    days: int
    stops: list[str]


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with running_engine(SimConfig(role=Role.REPLICA, model="m")) as engine:
        yield engine


@pytest.fixture
async def client(engine: SimEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{engine.address}/v1", api_key="k", max_retries=0) as client:
        yield client


def is_asked(arguments: Any) -> bool:
    return set(arguments) == {"city", "days"} and isinstance(arguments["city"], str) and 1 <= arguments["days"] <= 9


async def test_a_required_call_streams_in_pieces_that_make_up_the_whole_one(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "m", "messages": HI, "tools": CHAT_TOOLS, "tool_choice": "required"}
    whole = (await client.chat.completions.create(**asked)).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    assert is_asked(json.loads(call.function.arguments))

    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    first, *others = deltas
    assert first.index == 0 and (first.id or "").startswith("chatcmpl-tool-")
    assert first.function is not None and first.function.name == "weather"
    assert all(delta.id is None and delta.index == 0 for delta in others)
    assert len(others) > 10
    assert "".join(delta.function.arguments or "" for delta in deltas if delta.function) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


async def test_anthropics_client_gets_a_tool_use(engine: SimEngine) -> None:
    asked: Any = {"model": "m", "messages": HI, "max_tokens": 500, "tools": MESSAGES_TOOLS}
    async with anthropic.AsyncAnthropic(base_url=f"http://{engine.address}", api_key="k", max_retries=0) as client:
        whole = await client.messages.create(**asked, tool_choice={"type": "any"})
        async with client.messages.stream(**asked, tool_choice={"type": "any"}) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        named = await client.messages.create(**asked, tool_choice={"type": "tool", "name": "weather"})
        result: Any = {"type": "tool_result", "tool_use_id": "t", "content": "sunny"}
        told: Any = [*HI, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        after = await client.messages.create(**asked | {"messages": told})
    for message in (whole, streamed):
        (block,) = message.content
        assert block.type == "tool_use" and getattr(block, "name", "") == "weather"
        assert is_asked(getattr(block, "input", None))
        assert message.stop_reason == "tool_use"
    assert streamed.content[0].model_dump()["input"] == whole.content[0].model_dump()["input"]
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert kinds.count("input_json") > 10
    assert named.content[0].type == "tool_use"
    assert [block.type for block in after.content] == ["text"]


async def test_a_responses_call_has_its_own_item_and_events(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "m", "input": "hi", "tools": RESPONSES_TOOLS, "tool_choice": "required"}
    whole = await client.responses.create(**asked)
    (item,) = whole.output
    assert item.type == "function_call" and item.name == "weather" and is_asked(json.loads(item.arguments))
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == item.arguments
    assert len(pieces) > 10
    output: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
    told: Any = [{"role": "user", "content": "hi"}, item.model_dump(), output]
    after = await client.responses.create(model="m", input=told, tools=RESPONSES_TOOLS)
    assert [one.type for one in after.output] == ["message"]


async def test_answers_parse_into_the_clients_own_type(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.parse(model="m", messages=HI, response_format=Trip)
    response = await client.responses.parse(model="m", input="hi", text_format=Trip)
    assert isinstance(chat.choices[0].message.parsed, Trip)
    assert isinstance(response.output_parsed, Trip)
    stream = await client.chat.completions.create(
        model="m", messages=HI, response_format={"type": "json_object"}, stream=True
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert isinstance(json.loads(text), dict)
    cut = await client.chat.completions.create(
        model="m", messages=HI, response_format={"type": "json_object"}, max_tokens=6
    )
    assert (cut.choices[0].finish_reason, len(cut.choices[0].message.content or "")) == ("length", 6)


async def test_a_completion_may_be_json_too(client: openai.AsyncOpenAI) -> None:
    body = {"response_format": {"type": "json_object"}}
    done = await client.completions.create(model="m", prompt="once", max_tokens=500, extra_body=body)
    assert isinstance(json.loads(done.choices[0].text), dict)


async def test_a_chats_log_probabilities(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "m", "messages": HI, "logprobs": True, "top_logprobs": 3, "max_tokens": 8}
    whole = (await client.chat.completions.create(**asked)).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content or []
    assert "".join(entry.token for entry in content) == whole.message.content
    for entry in content:
        assert [len(entry.top_logprobs), entry.top_logprobs[0].token] == [3, entry.token]
        assert entry.bytes == list(entry.token.encode())
        assert entry.logprob < 0
    chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(**asked, stream=True)]
    assert [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content or ()] == content
    plain = (await client.chat.completions.create(model="m", messages=HI, max_tokens=8)).choices[0]
    assert (plain.logprobs, plain.message.content) == (None, whole.message.content)


async def test_a_completions_log_probabilities(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "m", "prompt": ["once", "twice"], "logprobs": 2, "max_tokens": 6}
    whole = (await client.completions.create(**asked)).choices
    for choice in whole:
        logprobs = choice.logprobs
        assert logprobs is not None
        assert "".join(logprobs.tokens or ()) == choice.text
        assert logprobs.text_offset == list(range(6))
        assert [len(top) for top in logprobs.top_logprobs or ()] == [2] * 6
        assert len(logprobs.token_logprobs or ()) == 6
    streamed: dict[int, list[int]] = {0: [], 1: []}
    async for chunk in await client.completions.create(**asked, stream=True):
        for part in chunk.choices:
            assert part.logprobs is not None
            streamed[part.index] += part.logprobs.text_offset or ()
    assert streamed == {0: list(range(6)), 1: list(range(6))}
