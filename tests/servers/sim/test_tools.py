"""Tools, forms and log probabilities: streamed and whole alike. tests/e2e/engines has the clients that read them."""

from __future__ import annotations

from typing import Any

import pytest

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}
CHAT_TOOLS: Any = [{"type": "function", "function": FUNCTION}]
HI: Any = [{"role": "user", "content": "hi there"}]
NAMED = {"type": "function", "function": {"name": "weather"}}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture
async def engine(lab: Any) -> Any:
    return await lab.start(model="m")


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
