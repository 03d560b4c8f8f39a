"""Reasoning before an answer, over each API: streamed and whole alike, counted, and in the KV as any other text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from ppd.servers.sim.core.config import TemplateName
from ppd.servers.sim.core.tokens import Tokenizer

if TYPE_CHECKING:
    import openai  # takes a second, and so does anthropic: who only collects these tests needs neither

HI: Any = [{"role": "user", "content": "hi there"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PIECES = {"tokenizer": Tokenizer.PIECES}


@pytest.fixture
async def engine(lab: Any) -> Any:
    return await lab.start(model="m", reasoning=1.0, template=TemplateName.QWEN, **PIECES)


@pytest.fixture
async def client(engine: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    import openai

    async with openai.AsyncOpenAI(base_url=f"http://{engine.address}/v1", api_key="k", max_retries=0) as client:
        yield client


async def said(lab: Any, engine: Any, messages: Any = HI, **fields: Any) -> Any:
    """The message of a chat's answer, and its usage."""
    answer = (await lab.chat(engine, messages, **fields)).json
    return answer["choices"][0]["message"], answer["usage"]


@pytest.mark.parametrize("tokenizer", Tokenizer)
@pytest.mark.parametrize("template", TemplateName)
async def test_a_stream_adds_up_to_the_whole_answer(lab: Any, template: TemplateName, tokenizer: Tokenizer) -> None:
    engine = await lab.start(reasoning=1.0, template=template, tokenizer=tokenizer)
    message, usage = await said(lab, engine)
    assert message["reasoning"].strip() and message["content"].strip()
    assert not set("<>\n") & set(message["reasoning"] + message["content"])
    streamed = (await lab.chat(engine, HI, stream=True, stream_options={"include_usage": True})).chunks
    deltas = [choice["delta"] for chunk in streamed for choice in chunk["choices"]]
    for name in ("reasoning", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    assert streamed[-1]["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]
    width = 5 if tokenizer is Tokenizer.PIECES else 1
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(message["reasoning"]) // width}
    assert usage["completion_tokens"] > (len(message["reasoning"]) + len(message["content"])) // width


@pytest.mark.parametrize("tokenizer", Tokenizer)
@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("template", [TemplateName.QWEN, TemplateName.GLM])
async def test_within_a_round_the_whole_answer_is_a_hit_and_after_it_none_of_its_reasoning(
    lab: Any, template: TemplateName, share: float, tokenizer: Tokenizer
) -> None:
    settings = {"reasoning": share, "template": template, "tokenizer": tokenizer, "block_size": 1}
    engine = await lab.start(**settings, num_blocks=8192, max_model_len=8192)
    first, used = await said(lab, engine, tools=[TOOL], tool_choice="required")
    assert bool(first.get("reasoning")) is bool(share)
    results = [{"role": "tool", "tool_call_id": "other", "content": "3"}]
    _, within = await said(lab, engine, [*HI, first, *results], tools=[TOOL])
    # All but the end mark, whose KV the engine has not computed.
    assert within["prompt_tokens_details"]["cached_tokens"] == used["total_tokens"] - 1
    _, after = await said(lab, engine, [*HI, first, *results, *HI], tools=[TOOL])
    cached = after["prompt_tokens_details"]["cached_tokens"]
    if share:
        assert used["prompt_tokens"] - 2 <= cached < used["prompt_tokens"] + 9  # the opening mark
    else:
        assert cached >= used["total_tokens"]


@pytest.mark.parametrize(
    ("asked", "reasons"),
    [
        ({}, None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
    ],
)
@pytest.mark.parametrize("template", TemplateName)
async def test_a_request_may_say_whether_there_is_reasoning(
    lab: Any, template: TemplateName, asked: Any, reasons: bool | None
) -> None:
    engine = await lab.start(reasoning=0.5, template=template, **PIECES)
    seen = set()
    for number in range(8):
        messages = [{"role": "user", "content": f"hi {number}"}]
        message, _ = await said(lab, engine, messages, max_tokens=200, **asked)
        assert message["content"].strip() and "think" not in message["content"]
        seen.add(message["reasoning"] is not None)
    assert seen == ({True, False} if reasons is None else {reasons})


async def test_a_model_without_reasoning_does_not_listen(lab: Any) -> None:
    message, usage = await said(lab, await lab.start(), chat_template_kwargs={"enable_thinking": True})
    assert "reasoning" not in message
    assert "completion_tokens_details" not in usage


async def test_the_older_name_of_the_member(lab: Any) -> None:
    engine = await lab.start(reasoning=1.0, reasoning_field="reasoning_content")
    message, _ = await said(lab, engine)
    assert message["reasoning_content"] and "reasoning" not in message
    chunks = (await lab.chat(engine, HI, stream=True)).chunks
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]


async def test_hidden_reasoning_is_counted_and_leaks_through_no_token(lab: Any, engine: Any) -> None:
    shown, usage = await said(lab, engine)
    asked = {"include_reasoning": False, "return_token_ids": True, "logprobs": True}
    hidden = (await lab.chat(engine, HI, **asked)).json
    (choice,) = hidden["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (shown["content"], None)
    assert (choice["token_ids"], choice["logprobs"]) == (None, None)
    assert hidden["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]
    chunks = (await lab.chat(engine, HI, stream=True, **asked)).chunks
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content") or "" for choice in deltas) == shown["content"]
    assert not any("token_ids" in choice or "reasoning" in choice["delta"] or choice["logprobs"] for choice in deltas)


async def test_an_answer_may_be_cut_within_its_reasoning(lab: Any, engine: Any) -> None:
    answer = (await lab.chat(engine, HI, max_tokens=9)).json
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None and len(choice["message"]["reasoning"]) == 35  # without 2 for the mark


async def test_a_call_follows_its_reasoning(lab: Any, engine: Any) -> None:
    message, _ = await said(lab, engine, tools=[TOOL], tool_choice="required")
    (call,) = message["tool_calls"]
    assert message["reasoning"] and message["content"] is None
    assert call["function"] == {"name": "add", "arguments": "{}"}


async def test_reasoning_is_a_function_of_the_kv(lab: Any, engine: Any) -> None:
    other = await lab.start(model="m", reasoning=1.0, template=TemplateName.QWEN, seed=7, **PIECES)
    p, d = [await lab.start(role, model="m", reasoning=1.0, template=TemplateName.QWEN, **PIECES) for role in "PD"]
    expected, _ = await said(lab, engine)
    handed_over = (await lab.split(p, d, HI)).json["choices"][0]["message"]
    assert handed_over["reasoning"] == expected["reasoning"]
    assert (await said(lab, other))[0]["reasoning"] != expected["reasoning"]


@pytest.mark.slow
async def test_openai_reads_a_reasoning_item_before_the_message(client: openai.AsyncOpenAI) -> None:
    from openai.types.responses import ResponseCompletedEvent

    whole = await client.responses.create(model="m", input="hi there")
    reasoning, message = whole.output
    assert reasoning.type == "reasoning" and message.type == "message"
    assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens > 20
    events = [event async for event in await client.responses.create(model="m", input="hi there", stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    places = [event.output_index for event in events if event.type == "response.output_item.done"]
    assert (added, places) == (["reasoning", "message"], [0, 1])
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert [part.text for part in reasoning.content or ()] == [thought]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert isinstance(events[-1], ResponseCompletedEvent)
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]


@pytest.mark.slow
async def test_anthropic_reads_a_thinking_block_before_the_text(engine: Any) -> None:
    asked: Any = {"model": "m", "messages": HI, "max_tokens": 400}
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=f"http://{engine.address}", api_key="k", max_retries=0) as client:
        whole = await client.messages.create(**asked)
        thinking, text = whole.content
        assert thinking.type == "thinking" and text.type == "text" and thinking.signature
        async with client.messages.stream(**asked) as stream:
            places = [event.index async for event in stream if event.type == "content_block_start"]
            final = await stream.get_final_message()
        assert places == [0, 1]
        assert [(block.type, getattr(block, "thinking", None) or block.text) for block in final.content] == [
            ("thinking", thinking.thinking),
            ("text", text.text),
        ]
        (only,) = (await client.messages.create(**asked, thinking={"type": "disabled"})).content
        assert only.type == "text"
