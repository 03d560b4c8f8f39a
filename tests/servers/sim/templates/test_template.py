"""The templates' texts, as `tokenizer_config.json` of Qwen3 and `chat_template.jinja` of GLM-4.6 write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd.servers.sim.api.prompts import chat_prompt, messages_prompt, responses_prompt
from ppd.servers.sim.api.requests import JsonBody
from ppd.servers.sim.core.config import SimConfig, TemplateName
from ppd.servers.sim.core.tokens import Tokenizer, decode

QWEN, GLM, PLAIN = TemplateName.QWEN, TemplateName.GLM, TemplateName.PLAIN
USER, MORE = {"role": "user", "content": "hi"}, {"role": "user", "content": "more"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def reply(content: Any = "yes", **members: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **members}


def call(identity: str, arguments: Any) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": "add", "arguments": arguments}}


def result(identity: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": content}


def made(template: TemplateName, tokenizer: Tokenizer = Tokenizer.PIECES) -> SimConfig:
    return SimConfig(template=template, tokenizer=tokenizer)


def text(template: TemplateName, *messages: Any, **fields: Any) -> str:
    return decode(chat_prompt(JsonBody({"messages": list(messages), **fields}), made(template)))


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (QWEN, [USER], "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        (
            QWEN,
            [SYSTEM, USER],
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            QWEN,
            [USER, reply("", tool_calls=[call("a", '{"x": 1}')]), result("a", "1"), result("b", "2")],
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
            '\n<tool_call>\n{"name":"add","arguments":{"x":1}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (GLM, [USER], "[gMASK]<sop><|user|>\nhi<|assistant|>"),
        (GLM, [SYSTEM, USER], "[gMASK]<sop><|system|>\nBe brief.<|user|>\nhi<|assistant|>"),
        (
            GLM,
            [USER, reply("", tool_calls=[call("a", '{"x": 1}')]), result("a", "1"), result("b", "2")],
            "[gMASK]<sop><|user|>\nhi<|assistant|>\n<think></think>\n"
            '\n<tool_call>\n{"name":"add","arguments":{"x":1}}\n</tool_call>'
            "<|observation|>\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|assistant|>",
        ),
    ],
)
def test_template(template: TemplateName, messages: list[Any], expected: str) -> None:
    assert text(template, *messages) == expected


def test_tools_come_after_the_systems_text_in_qwen_and_before_it_in_glm() -> None:
    qwen, glm = (text(template, SYSTEM, USER, tools=[TOOL]) for template in (QWEN, GLM))
    assert qwen.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    assert qwen.index("Be brief.") < qwen.index('{"type":"function"') < qwen.index("<|im_end|>") < qwen.index("hi")
    assert glm.startswith("[gMASK]<sop><|system|>\n# Tools\n\n")
    assert glm.index('{"type":"function"') < glm.index("<|system|>\nBe brief.") < glm.index("<|user|>\nhi")
    assert text(QWEN, USER, tools=[TOOL]).startswith("<|im_start|>system\n# Tools\n\n")


@pytest.mark.parametrize(
    ("template", "shown", "hidden"),
    [
        (QWEN, "<|im_start|>assistant\n<think>\nhm\n</think>\n\nyes<|im_end|>", "<|im_start|>assistant\nyes<|im_end|>"),
        (GLM, "<|assistant|>\n<think>hm</think>\nyes", "<|assistant|>\n<think></think>\nyes"),
    ],
)
@pytest.mark.parametrize(
    "answer",
    [
        reply(reasoning="hm"),
        reply(reasoning_content="hm\n"),
        reply("<think>\nhm\n</think>\n\nyes"),
        reply([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"}]),
    ],
)
def test_reasoning_is_kept_until_the_next_message_of_a_user(
    template: TemplateName, shown: str, hidden: str, answer: Any
) -> None:
    within = text(template, USER, answer, result("a", "1"))
    after = text(template, USER, answer, result("a", "1"), reply("done"), MORE)
    assert shown in within
    assert hidden in after
    assert "hm" not in after


@pytest.mark.parametrize("template", [QWEN, GLM])
def test_ids_and_the_spacing_of_arguments_are_not_printed(template: TemplateName) -> None:
    one = text(template, USER, reply(None, tool_calls=[call("a", '{"x": 1}')]), result("a", "1"))
    other = text(template, USER, reply(None, tool_calls=[call("b", {"x": 1})]), result("b", "1"))
    assert one == other


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (QWEN, "hi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        (GLM, "hi/nothink<|assistant|>\n<think></think>"),
    ],
)
@pytest.mark.parametrize("asked", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
def test_reasoning_can_be_forbidden(template: TemplateName, ends: str, asked: Any) -> None:
    assert text(template, USER, **asked).endswith(ends)
    assert text(template, USER, reasoning_effort="low") == text(template, USER)


@pytest.mark.parametrize(("template", "ends"), [(QWEN, "assistant\nyes"), (GLM, "<think></think>\nyes")])
def test_a_last_message_can_go_on(template: TemplateName, ends: str) -> None:
    body = {"continue_final_message": True, "add_generation_prompt": False}
    assert text(template, reply(), USER, reply(), **body).endswith("\n\nyes" if template is QWEN else ends)


@pytest.mark.parametrize("template", [QWEN, GLM])  # the plain one shows items and blocks as they are
def test_the_three_apis_render_the_same_loop_alike(template: TemplateName) -> None:
    chat = [
        *(SYSTEM, USER),
        reply("sum", reasoning="hm", tool_calls=[call("a", "{}")]),
        result("a", "3"),
        {"role": "user", "content": "so?"},
    ]
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "sum"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"role": "user", "content": "so?"},
    ]
    use = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
    blocks = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "sum"}, use],
        },
        {"role": "user", "content": [{"type": "tool_result", "content": "3"}, {"type": "text", "text": "so?"}]},
    ]
    config = made(template)
    expected = chat_prompt(JsonBody({"messages": chat}), config)
    assert responses_prompt(JsonBody({"input": items, "instructions": "Be brief."}), config) == expected
    assert messages_prompt(JsonBody({"messages": blocks, "system": "Be brief."}), config) == expected


MESSAGES = st.lists(
    st.one_of(
        st.sampled_from([USER, MORE, SYSTEM, result("a", "1"), reply(reasoning="hm")]),
        st.text(max_size=20).map(lambda content: {"role": "user", "content": content}),
        st.text(max_size=20).map(reply),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("tokenizer", Tokenizer)
@pytest.mark.parametrize("template", [PLAIN, GLM])
@settings(max_examples=40)
@given(before=MESSAGES, more=MESSAGES)
def test_a_prompts_beginning_is_the_prompt_of_its_first_messages(
    template: TemplateName, tokenizer: Tokenizer, before: list[Any], more: list[Any]
) -> None:
    """In GLM as long as no reasoning is dropped. (In Qwen results that follow each other share a turn.)"""
    if template is GLM:
        before, more = ([m for m in some if "reasoning" not in m] for some in (before, more))
    config = made(template, tokenizer)
    body: dict[str, Any] = {"add_generation_prompt": False}
    if not before:
        return
    first = chat_prompt(JsonBody({**body, "messages": before}), config)
    whole = chat_prompt(JsonBody({**body, "messages": before + more}), config)
    assert whole[: len(first)] == first
