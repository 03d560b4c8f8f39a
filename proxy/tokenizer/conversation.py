"""A request's conversation as vLLM hands it to a chat template. Source: vLLM 0.32, `renderers/` and `entrypoints/`.

What cannot be rendered just as the engine does it is not rendered at all: pictures and sounds, parts of unknown types,
a template of the request's own, histories that the engine stores.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from ..openai.prompts.shapes import without_billing
from .chat_template import ChatTemplate, Message, Tools

Body = dict[str, Any]

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "thinking": "thinking", "refusal": "refusal"}
_CHANGES_ALL = (
    *("chat_template", "functions", "function_call", "mm_processor_kwargs", "media_io_kwargs", "prompt_embeds"),
    "truncate_prompt_tokens",
)
_ENGINES_OWN = frozenset(  # arguments of the engine's call that a request must not set, or that are no variables
    ("chat_template", "tokenize", "messages", "conversation", "tools", "return_dict", "return_tensors", "padding")
) | {"truncation", "max_length", "return_assistant_tokens_mask", "tokenizer_kwargs"}


class Unrenderable(Exception):
    """The prompt is not rendered; `why` is a word for the metric."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Conversation(msgspec.Struct, frozen=True):
    messages: list[Message]
    tools: Tools
    variables: dict[str, Any]  # of the template
    add_special_tokens: bool = False

    def render(self, template: ChatTemplate) -> str:
        """Raises what the template's code raises."""
        has_tools = self.tools is not None
        as_parts = template.content_is_parts(tools=has_tools)
        messages = [_shown(message, as_parts=as_parts) for message in self.messages]
        if not template.knows_developer(tools=has_tools):
            messages = _without_developer(messages)
        return template.render(messages, self.tools, **self.variables)


def chat_conversation(body: Body) -> Conversation:
    """Of a body for `/v1/chat/completions`. Raises Unrenderable, or what a body of another shape leads to."""
    if any(body.get(name) is not None for name in _CHANGES_ALL):
        raise Unrenderable("options")
    return Conversation(
        messages=body["messages"],
        tools=None if body.get("tools") is None else [chat_tool(tool) for tool in body["tools"]],
        variables=variables(
            body,
            effort=body.get("reasoning_effort"),
            add_generation_prompt=body.get("add_generation_prompt", True),
            continue_final_message=body.get("continue_final_message", False),
            documents=body.get("documents"),
        ),
        add_special_tokens=bool(body.get("add_special_tokens")),
    )


def variables(body: Body, *, effort: str | None, **given: Any) -> dict[str, Any]:
    """given: counts before `chat_template_kwargs`, except for what is None."""
    own = body.get("chat_template_kwargs") or {}
    if not _ENGINES_OWN.isdisjoint(own):
        raise Unrenderable("options")
    if effort is not None and "enable_thinking" not in own:
        given["enable_thinking"] = effort != "none"
    told = {"reasoning_effort": effort, **given}
    return {**own, **{name: value for name, value in told.items() if value is not None and value != "auto"}}


def chat_tool(tool: Body) -> Body:
    """With all members, in the order in which the engine's classes have them."""
    if tool.get("type", "function") != "function":
        raise Unrenderable("tools")
    function, later = tool["function"], tool.get("defer_loading")
    found = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        found["strict"] = function["strict"]
    if (own_later := function.get("defer_loading", later)) is not None:
        found["defer_loading"] = own_later
    shown = {"type": "function", "function": found}
    return shown if later is None else {**shown, "defer_loading": later}


def _shown(message: Message, *, as_parts: bool) -> Message:
    role = message["role"]
    shown: Message = {"role": role, "content": _content(message, as_parts=as_parts)}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            shown["tool_calls"] = [_call(call) for call in calls]
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            shown["reasoning"] = shown["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            shown["tool_call_id"] = message["tool_call_id"]
        if as_parts:
            shown["content"] = "\n".join(part["text"] for part in shown["content"])
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            shown[name] = message[name]
    if role == "developer":
        shown["tools"] = message.get("tools")
    return shown


def _content(message: Message, *, as_parts: bool) -> str | list[Body]:
    content = message.get("content")
    parts: Iterable[Any] = () if content is None else (content,) if isinstance(content, str) else content
    texts = [text for part in parts if (text := _text(part)) is not None]
    if message["role"] == "system":
        texts = [text for told in texts if (text := without_billing(told)) or not told]
    return [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)


def _text(part: Any) -> str | None:
    """None for a part without any."""
    if isinstance(part, str):
        return part
    name = _TEXTS.get(part.get("type"))
    if name is None:
        raise Unrenderable("parts")
    text = part.get(name)
    if text is not None and not isinstance(text, str):
        raise Unrenderable("parts")
    return text


def _call(call: Body) -> Body:
    function = call["function"]
    if call.get("type", "function") != "function":
        raise Unrenderable("tools")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: Any) -> Body:
    """Templates want an object; what is none becomes an empty one."""
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except json.JSONDecodeError:
            given = None
    return given if isinstance(given, dict) else {}


def _without_developer(messages: list[Message]) -> list[Message]:
    """For templates without that role: as the system's, and all that the system says at the beginning."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    renamed = [
        {name: value for name, value in {**message, "role": "system"}.items() if name != "tools"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    said = [_joined(message["content"]) for message in renamed if message["role"] == "system"]
    if [place for place, message in enumerate(renamed) if message["role"] == "system"] == [0]:
        return renamed
    others = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, said))}, *others]


def _joined(content: str | list[Body]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
