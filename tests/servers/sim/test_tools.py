"""Tools, forms and log probabilities over each API: streamed and whole alike, and of the shape that clients read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

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
NAMED = {"type": "function", "function": {"name": "weather"}}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


class Trip(BaseModel):
    city: str
    days: int
    stops: list[str]


@pytest.fixture
async def engine(lab: Any) -> Any:
    return await lab.start(model="m")


@pytest.fixture
async def client(engine: Any) -> AsyncIterator[openai.AsyncOpenAI]:
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


@pytest.mark.parametrize(
    ("asked", "finish", "calls"),
    [
        ({"tool_choice": "none"}, "stop", 0),
        ({"tool_choice": NAMED}, "stop", 1),  # as OpenAI and vLLM have it
        ({"tool_choice": "required"}, "tool_calls", 1),
        ({"tool_choice": "required", "max_tokens": 60}, "length", 1),
        ({"tool_choice": "required", "max_tokens": 5}, "length", 0),
    ],
)
async def test_a_chats_choice(lab: Any, engine: Any, asked: dict[str, Any], finish: str, calls: int) -> None:
    body = {"tools": CHAT_TOOLS, "n": 2, **asked}
    whole = (await lab.chat(engine, HI, **body)).json
    stream = (await lab.chat(engine, HI, **body, stream=True, stream_options={"include_usage": True})).chunks
    for at, choice in enumerate(whole["choices"]):
        told = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], len(told)) == (finish, calls)
        mine = [part for chunk in stream for part in chunk["choices"] if part["index"] == at]
        deltas = [part["delta"] for part in mine]
        arguments = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
        assert "".join(arguments) == (told[0]["function"]["arguments"] if told else "")
        assert "".join(delta.get("content", "") for delta in deltas) == (choice["message"]["content"] or "")
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [finish]
    assert stream[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    ids = [call["id"] for choice in whole["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids)


async def test_auto_calls_or_says_and_after_a_result_only_says(lab: Any, engine: Any) -> None:
    reasons, after = set(), set()
    for number in range(12):
        asked = [{"role": "user", "content": f"question {number}"}]
        choice = (await lab.chat(engine, asked, tools=CHAT_TOOLS)).json["choices"][0]
        reasons.add((choice["finish_reason"], choice["message"]["content"] is None))
        result = [*asked, {"role": "tool", "tool_call_id": "c", "content": "sunny"}]
        after.add((await lab.chat(engine, result, tools=CHAT_TOOLS)).json["choices"][0]["finish_reason"])
    assert reasons == {("tool_calls", True), ("stop", False)}
    assert after == {"stop"}


async def test_equal_engines_call_alike_and_another_history_calls_otherwise(lab: Any) -> None:
    body = {"tools": CHAT_TOOLS, "tool_choice": "required"}
    others: list[dict[str, Any]] = [{}, {"block_size": 4, "num_blocks": 8192}, {"seed": 1}]
    texts = []
    for settings in others:
        answer = await lab.chat(await lab.start(**settings), HI, **body)
        texts.append(answer.json["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
    assert texts[0] == texts[1] != texts[2]
    changed = await lab.chat(await lab.start(), [{"role": "user", "content": "hi there!"}], **body)
    assert changed.json["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] != texts[0]


async def test_a_split_call_is_that_of_a_replica_and_a_hit_on_the_next_turn(lab: Any) -> None:
    p, d, r = await lab.start("P"), await lab.start("D"), await lab.start("R")
    body = {"tools": CHAT_TOOLS, "tool_choice": "required"}
    expected = (await lab.chat(r, HI, **body)).json["choices"][0]["message"]
    params = await lab.prefill(p, HI, **body)
    one = (await lab.chat(d, HI, **body, kv_transfer_params=params)).json
    message = one["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == expected["tool_calls"][0]["function"]
    call = message["tool_calls"][0]
    two = await lab.chat(d, [*HI, message, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}], **body)
    assert two.cached_tokens == (one["usage"]["total_tokens"] - 1) // 16 * 16


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": HI, "tools": CHAT_TOOLS, "tool_choice": "always"}, "tool_choice"),
        (CHAT, {"messages": HI, "tools": CHAT_TOOLS, "tool_choice": [1]}, "tool_choice"),
        (CHAT, {"messages": HI, "tools": CHAT_TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, "response_format"),
        (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        (CHAT, {"messages": HI, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/completions", {"prompt": "hi", "logprobs": 21}, "logprobs"),
    ],
)
async def test_what_cannot_be_is_refused(lab: Any, engine: Any, path: str, body: dict[str, Any], param: str) -> None:
    answer = await lab.post(engine, path, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


async def test_anthropics_client_gets_a_tool_use(engine: Any) -> None:
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


async def test_log_probabilities_of_a_call_miss_no_token(lab: Any, engine: Any) -> None:
    body = {"tools": CHAT_TOOLS, "tool_choice": "required", "logprobs": True}
    chunks = (await lab.chat(engine, HI, **body, stream=True)).chunks
    usage = (await lab.chat(engine, HI, **body)).json["usage"]
    entries = [
        entry
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert len(entries) == usage["completion_tokens"]
    assert all(entry["top_logprobs"] == [] for entry in entries)


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
