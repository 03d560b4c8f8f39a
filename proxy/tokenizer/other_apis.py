"""Anthropic's Messages and OpenAI's Responses as conversations, by the same way as vLLM turns them into chat.

Source: vLLM 0.32, `entrypoints/anthropic/serving.py` and `entrypoints/openai/responses/utils.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateError

from ..openai.prompts.shapes import BILLING
from .chat_template import ChatTemplate, Message
from .conversation import Body, Conversation, Unrenderable, chat_tool, variables

_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_TWO_SYSTEMS = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
_HISTORY = (
    *("previous_response_id", "previous_input_messages", "prompt", "conversation", "prompt_embeds"),
    *("media_io_kwargs", "mm_processor_kwargs"),
)


# -- Messages


def messages_conversation(body: Body, template: ChatTemplate) -> Conversation:
    """Of a body for `/v1/messages`. Raises Unrenderable, or what a body of another shape leads to."""
    system, merges = [*_system_texts(body.get("system"))], _wants_one_system(template)
    messages: list[Message] = []
    for message in body["messages"]:
        if message["role"] != "system":
            messages += _said(message)
        elif text := "".join(_system_texts(message["content"])):
            if merges:
                system.append(text)
            else:
                messages.append({"role": "system", "content": text})
    if system:
        messages.insert(0, {"role": "system", "content": "".join(system)})
    tools = body.get("tools")
    return Conversation(
        messages=messages,
        tools=None if tools is None else [_messages_tool(tool) for tool in tools],
        variables=variables(
            body, effort=_effort(body, template), add_generation_prompt=True, continue_final_message=False
        ),
    )


def _system_texts(content: str | list[Body] | None) -> Iterator[str]:
    for block in ({"type": "text", "text": content},) if isinstance(content, str) else content or ():
        if block["type"] in ("tool_addition", "tool_removal"):
            raise Unrenderable("tools")
        if block["type"] == "text" and block.get("text") and not block["text"].startswith(BILLING):
            yield block["text"]


def _wants_one_system(template: ChatTemplate) -> bool:
    """Whether the system may speak only first: then what it says later is put there."""
    try:
        template.render(_TWO_SYSTEMS, add_generation_prompt=False)
    except TemplateError:
        return True
    return False


def _effort(body: Body, template: ChatTemplate) -> str | None:
    effort: str | None = (body.get("output_config") or {}).get("effort")
    if (body.get("thinking") or {}).get("type") != "disabled":
        return effort
    probes = [_probe(template, one) for one in ("none", *_EFFORTS)]
    return "low" if probes[0] is None or probes[0] in probes[1:] else "none"


def _probe(template: ChatTemplate, effort: str) -> str | None:
    told = variables({}, effort=effort, add_generation_prompt=True)
    try:
        return template.render([{"role": "user", "content": "Hi"}], **told)
    except Exception:
        return None


def _said(message: Body) -> Iterator[Message]:
    """What a tool's result says comes before the rest of its message."""
    role, content = message["role"], message["content"]
    shown: Message = {"role": role}
    if isinstance(content, str):
        yield {**shown, "content": content}
        return
    texts, calls, thoughts = list[str](), list[Body](), list[str]()
    for block in content:
        match block["type"]:
            case "text":
                texts += [block["text"]] if block.get("text") else []
            case "thinking":
                thoughts += [block["thinking"]] if block.get("thinking") is not None else []
            case "tool_use":
                arguments = json.dumps(block.get("input") or {})
                function = {"name": block.get("name") or "", "arguments": arguments}
                calls.append({"id": block.get("id") or "", "type": "function", "function": function})
            case "tool_result" if role == "user":
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": _result(block)}
            case "redacted_thinking" | "tool_reference":
                pass
            case _:
                raise Unrenderable("parts")
    if thoughts:
        shown["reasoning"] = "".join(thoughts)
    if calls:
        shown["tool_calls"] = calls
    if texts:
        shown["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    if role != "user" or texts:
        yield shown


def _result(block: Body) -> str:
    content = block.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise Unrenderable("parts")
    return "\n".join(part.get("text", "") for part in content)


def _messages_tool(tool: Body) -> Body:
    if "input_schema" not in tool:
        raise Unrenderable("tools")  # one of Anthropic's own
    schema = tool["input_schema"]
    if "type" not in schema:
        schema = {**schema, "type": "object"}
    function = {name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")}
    return chat_tool({"type": "function", "function": {**function, "parameters": schema}})


# -- Responses


def responses_conversation(body: Body) -> Conversation:
    """Of a body for `/v1/responses`. Raises Unrenderable, or what a body of another shape leads to."""
    if any(body.get(name) is not None for name in _HISTORY):
        raise Unrenderable("stored")
    if body.get("truncation", "disabled") != "disabled":
        raise Unrenderable("options")
    given, messages = body["input"], list[Message]()
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for item in given:
            _add_item(messages, item)
    continues = not isinstance(given, str) and _is_open(given[-1])
    return Conversation(
        messages=messages,
        tools=[_responses_tool(tool) for tool in body["tools"]] if body.get("tools") else None,
        variables=variables(
            body,
            effort=(body.get("reasoning") or {}).get("effort"),
            add_generation_prompt=not continues,
            continue_final_message=continues,
        ),
        add_special_tokens=True,
    )


def _is_open(item: Body) -> bool:
    kind = item.get("type", "message")
    return kind in ("message", "reasoning") and item.get("status") in ("in_progress", "incomplete")


def _add_item(messages: list[Message], item: Body) -> None:
    """Items of one reply are one message, as far as none of them says again what another has said."""
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "function_call" and not item.get("namespace"):
        function = {"name": item["name"], "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if (last := _reply(messages)) is not None:
            last.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "tool_calls": [call]})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif kind == "reasoning":
        _reply_says(messages, "reasoning", _reasoning(item))
    elif kind == "message" and role == "assistant":
        _reply_says(messages, "content", _first_text(item.get("content")))
    elif kind == "message" and role is not None:
        messages.append({"role": role, "content": item.get("content")})
    else:
        raise Unrenderable("parts")


def _reply(messages: list[Message]) -> Message | None:
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def _reply_says(messages: list[Message], what: str, text: str) -> None:
    last = _reply(messages)
    if last is not None and last.get(what) is None:
        last[what] = text
    else:
        messages.append({"role": "assistant", what: text})


def _reasoning(item: Body) -> str:
    if item.get("encrypted_content"):
        raise Unrenderable("parts")
    for parts in (item.get("content"), item.get("summary")):
        if parts:
            return str(parts[0]["text"])
    return ""


def _first_text(content: Any) -> str:
    text = content if isinstance(content, str) else content[0].get("text") if content else None
    if not isinstance(text, str):
        raise Unrenderable("parts")
    return text


def _responses_tool(tool: Body) -> Body:
    if tool.get("type") != "function":
        raise Unrenderable("tools")
    return chat_tool({"type": "function", "function": tool})
