from __future__ import annotations

from typing import Any

import pytest

from ppd.servers.sim.api.prompts import chat_prompt, messages_prompt, responses_prompt
from ppd.servers.sim.api.requests import JsonBody
from ppd.servers.sim.core.errors import BadRequest
from ppd.servers.sim.core.tokens import decode

HI = {"role": "user", "content": "hi"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
OTHER_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}


def chat(*messages: Any, **fields: Any) -> tuple[int, ...]:
    return chat_prompt(JsonBody({"messages": list(messages), **fields}))


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (chat(HI), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        (chat(HI, add_generation_prompt=False), "<|im_start|>user\nhi<|im_end|>\n"),
        (chat(HI, continue_final_message=True), "<|im_start|>user\nhi"),
        (
            chat(HI, tools=[{"b": 1, "a": 2}], add_generation_prompt=False),
            '<|im_start|>system\n# Tools\n{"a":2,"b":1}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n',
        ),
        (
            chat(CALL, add_generation_prompt=False),
            '<|im_start|>assistant\n\n<tool_call>\n{"name":"add","arguments":{}}\n</tool_call><|im_end|>\n',
        ),
        (
            chat({"role": "tool", "content": "3", "tool_call_id": "c1"}, add_generation_prompt=False),
            "<|im_start|>tool\n3<|im_end|>\n",
        ),
    ],
)
def test_template(prompt: tuple[int, ...], text: str) -> None:
    assert decode(prompt) == text


def test_parts_and_strings_render_alike() -> None:
    assert chat({"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}) == chat(HI)


def test_pictures_are_told_apart_by_content() -> None:
    one, same, other = (chat({"role": "user", "content": [part]}) for part in (IMAGE, dict(IMAGE), OTHER_IMAGE))
    assert one == same != other
    assert len(one) == len(chat({"role": "user", "content": ""})) + 16


def test_the_next_turn_starts_with_the_last_prompt_and_its_answer() -> None:
    first = chat(HI)
    second = chat(HI, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"})
    assert second[: len(first) + 5] == (*first, *map(ord, "hello"))


def test_the_three_apis_render_the_same_conversation_alike() -> None:
    said = [HI, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go"}]
    system = {"role": "system", "content": "be"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        {"role": "user", "content": "go"},
    ]
    blocks = [{"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]} for turn in said]
    expected = chat(system, *said)
    assert responses_prompt(JsonBody({"input": items, "instructions": "be"})) == expected
    assert messages_prompt(JsonBody({"messages": blocks, "system": "be"})) == expected


@pytest.mark.parametrize("kwargs", [{"enable_thinking": True}, {"enable_thinking": False}])
def test_template_arguments_are_part_of_the_prompt(kwargs: dict[str, bool]) -> None:
    assert chat(HI, chat_template_kwargs=kwargs) != chat(HI)


def test_tool_use_and_its_result_are_rendered() -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "3"}]}
    text = decode(messages_prompt(JsonBody({"messages": [use, result]})))
    assert '{"name":"add","arguments":{"a":1}}' in text
    assert "<tool_response>\n3\n</tool_response>" in text


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", [{"content": "no role"}], [{"role": "user", "content": 3}], [{"role": "user", "content": [{}]}]],
)
def test_a_malformed_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(BadRequest):
        chat_prompt(JsonBody({"messages": messages}))
