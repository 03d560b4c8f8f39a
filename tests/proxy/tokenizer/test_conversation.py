"""How requests of each API reach a chat template; `tests/vllm/test_tokenizer.py` compares prompts with the engine's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppd.proxy.tokenizer.chat_template import ChatTemplate
from ppd.proxy.tokenizer.conversation import Conversation, Unrenderable, chat_conversation
from ppd.proxy.tokenizer.other_apis import messages_conversation, responses_conversation

SHOWING = "{{ [messages, tools, add_generation_prompt, enable_thinking | default('-')] | tojson }}"
PARTS = SHOWING + "{# {% for m in messages %} #}{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}"
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "{% endfor %}" + SHOWING
)

USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "parameters": {"type": "object"}}
SHOWN_TOOL = {"type": "function", "function": {"name": "f", "description": None, "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SHOWN_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def shown(talk: Conversation, template: str = SHOWING) -> list[Any]:
    rendered: list[Any] = json.loads(talk.render(ChatTemplate(template, {})))
    return rendered


def chat(*messages: Any, template: str = SHOWING, **body: Any) -> list[Any]:
    return shown(chat_conversation({"messages": list(messages), **body}), template)


@pytest.mark.parametrize(
    ("message", "rendered"),
    [
        (USER, USER),
        (
            {"role": "user", "content": [text("a"), text("b")], "name": "ann"},
            {"role": "user", "content": "a\nb", "name": "ann"},
        ),
        ({"role": "user", "content": ["a", {"type": "text"}]}, {"role": "user", "content": "a"}),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "tool_calls": []}, {"role": "assistant", "content": ""}),
        (
            {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [SHOWN_CALL],
                "reasoning": "hm",
                "reasoning_content": "hm",
            },
        ),
        (
            {"role": "tool", "tool_call_id": "c", "content": [text("1"), text("2")]},
            {"role": "tool", "content": "1\n2", "tool_call_id": "c"},
        ),
        ({"role": "system", "content": "x-anthropic-billing-header: 1\nyou"}, {"role": "system", "content": "you"}),
        ({"role": "system", "content": "x-anthropic-billing-header: 1"}, {"role": "system", "content": ""}),
        ({"role": "developer", "content": "you"}, {"role": "system", "content": "you"}),
    ],
)
def test_chat_messages(message: Any, rendered: Any) -> None:
    assert chat(message) == [[rendered], None, True, "-"]


@pytest.mark.parametrize(
    ("arguments", "object"),
    [("", {}), (None, {}), ("{", {}), ("[1]", {}), ('{"a": [1]}', {"a": [1]}), ({"b": 2}, {"b": 2})],
)
def test_arguments_are_objects(arguments: Any, object: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    ((message,), *_) = chat({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == object


def test_content_may_be_parts() -> None:
    ((user, tool), *_) = chat({"role": "user", "content": "a"}, {"role": "tool", "content": "b"}, template=PARTS)
    assert (user["content"], tool["content"]) == ([text("a")], "b")


def test_what_developers_say_later_comes_first_where_the_template_does_not_know_them() -> None:
    said = [{"role": "system", "content": "a"}, USER, {"role": "developer", "content": "b"}]
    assert chat(*said)[0] == [{"role": "system", "content": "a\n\nb"}, USER]
    assert [one["role"] for one in chat(*said, template=SHOWING + "{# 'developer' #}")[0]] == [
        "system",
        "user",
        "developer",
    ]


@pytest.mark.parametrize(
    ("body", "rest"),
    [
        ({"add_generation_prompt": False}, [None, False, "-"]),
        ({"reasoning_effort": "none"}, [None, True, False]),
        ({"reasoning_effort": "low"}, [None, True, True]),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, [None, True, False]),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, [None, True, "-"]),
        ({"tools": []}, [[], True, "-"]),
        ({"tools": [{"type": "function", "function": {**TOOL, "strict": None, "more": 1}}]}, [[SHOWN_TOOL], True, "-"]),
    ],
)
def test_chat_options(body: dict[str, Any], rest: list[Any]) -> None:
    assert chat(USER, **body)[1:] == rest


PICTURE = {"role": "user", "content": [text("a"), {"type": "image_url", "image_url": {"url": "data:,x"}}]}


@pytest.mark.parametrize(
    ("messages", "body", "why"),
    [
        ([PICTURE], {}, "parts"),
        ([{"role": "user", "content": [{"type": "made_up"}]}], {}, "parts"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], {}, "parts"),
        ([USER], {"chat_template": "{{ 1 }}"}, "options"),
        ([USER], {"chat_template_kwargs": {"tools": []}}, "options"),
        ([USER], {"truncate_prompt_tokens": 5}, "options"),
        ([USER], {"mm_processor_kwargs": {}}, "options"),
        ([USER], {"tools": [{"type": "custom"}]}, "tools"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}], {}, "tools"),
    ],
)
def test_what_cannot_be_rendered_as_the_engine_does_is_not(messages: list[Any], body: dict[str, Any], why: str) -> None:
    with pytest.raises(Unrenderable) as raised:
        chat(*messages, **body)
    assert raised.value.why == why


def anthropic(*messages: Any, template: str = SHOWING, **body: Any) -> list[Any]:
    told = {"messages": list(messages), **body}
    return shown(messages_conversation(told, ChatTemplate(template, {})), template)


SAID = {
    "role": "assistant",
    "content": [{"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "id": "c", "name": "f"}],
}
FOUND = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [text("1")]}, text("so?")]}
LATER = {"role": "system", "content": [text("b")]}


@pytest.mark.parametrize(
    ("told", "rendered"),
    [
        (
            {"system": [text("x-anthropic-billing-header: 1"), text("a"), text("b")]},
            [{"role": "system", "content": "ab"}, USER],
        ),
        (
            {"messages": [FOUND]},
            [{"role": "tool", "content": "1", "tool_call_id": "c"}, {"role": "user", "content": "so?"}],
        ),
        (
            {"messages": [{"role": "user", "content": [FOUND["content"][0]]}]},
            [{"role": "tool", "content": "1", "tool_call_id": "c"}],
        ),
        (
            {"system": "a", "messages": [USER, LATER]},
            [{"role": "system", "content": "a"}, USER, {"role": "system", "content": "b"}],
        ),
    ],
)
def test_messages_of_anthropic(told: dict[str, Any], rendered: list[Any]) -> None:
    body = {"messages": [USER], **told}
    assert anthropic(*body.pop("messages"), **body)[0] == rendered


def test_replies_of_anthropic() -> None:
    ((reply,), *_) = anthropic(SAID)
    assert (reply["reasoning"], reply["content"]) == ("hm", "")
    assert reply["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]


def test_what_the_system_says_later_comes_first_where_the_template_wants_it() -> None:
    assert anthropic(USER, LATER, template=ONE_SYSTEM, system="a")[0] == [{"role": "system", "content": "ab"}, USER]


def test_options_of_anthropic() -> None:
    tools = [{"name": "f", "input_schema": {}}]
    assert anthropic(USER, tools=tools)[1] == [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": {"type": "object"}}}
    ]
    assert anthropic(USER, output_config={"effort": "low"})[3] is True
    assert anthropic(USER, thinking={"type": "disabled"})[3] is False, "enable_thinking is rendered"
    body = {"messages": [USER], "thinking": {"type": "disabled"}}
    assert messages_conversation(body, ChatTemplate("{{ 1 }}", {})).variables["reasoning_effort"] == "low", (
        "none is ignored"
    )


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "system", "content": [{"type": "tool_addition"}]}]},
        {"messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]},
    ],
)
def test_what_cannot_be_rendered_of_anthropic(body: dict[str, Any]) -> None:
    with pytest.raises(Unrenderable):
        messages_conversation(body, ChatTemplate(SHOWING, {}))


REASONED = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
ANSWERED = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
EMPTY_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
THOUGHT = {"reasoning": "hm", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [USER]),
        ([{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], [USER]),
        (
            [REASONED, ANSWERED, CALLED, CALLED],
            [{"role": "assistant", "content": "a", "tool_calls": [EMPTY_CALL, EMPTY_CALL], **THOUGHT}],
        ),
        ([ANSWERED, ANSWERED], [{"role": "assistant", "content": "a"}] * 2),
        ([CALLED], [{"role": "assistant", "content": "", "tool_calls": [EMPTY_CALL]}]),
        (
            [{"type": "function_call_output", "call_id": "c", "output": "1"}],
            [{"role": "tool", "content": "1", "tool_call_id": "c"}],
        ),
    ],
)
def test_items_of_responses(items: Any, messages: list[Any]) -> None:
    assert shown(responses_conversation({"input": items}))[0] == messages


def test_options_of_responses() -> None:
    body = {
        "input": "hi",
        "instructions": "you",
        "reasoning": {"effort": "none"},
        "tools": [{"type": "function", **TOOL}],
    }
    assert shown(responses_conversation(body)) == [
        [{"role": "system", "content": "you"}, USER],
        [SHOWN_TOOL],
        True,
        False,
    ]
    going_on = responses_conversation({"input": [ANSWERED | {"status": "incomplete"}]})
    assert going_on.render(ChatTemplate("{{ messages[0].content }}.", {})) == "a"


@pytest.mark.parametrize(
    "body",
    [
        {"input": "hi", "previous_response_id": "r"},
        {"input": "hi", "previous_input_messages": [{"role": "user", "content": "a"}]},
        {"input": "hi", "truncation": "auto"},
        {"input": "hi", "tools": [{"type": "web_search"}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
        {"input": [{"type": "message", "role": "assistant", "content": [{"type": "refusal"}]}]},
    ],
)
def test_what_cannot_be_rendered_of_responses(body: dict[str, Any]) -> None:
    with pytest.raises(Unrenderable):
        responses_conversation(body)
