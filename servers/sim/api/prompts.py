"""Reads the conversation of a request of any API, and has its prompt rendered by the engine's chat template."""

from __future__ import annotations

from typing import Any

from ..core.config import SimConfig
from ..core.errors import BadRequest
from ..core.reasoning import Thoughts
from ..templates.conversation import MEDIA_PARTS, Call, Conversation, Media, Message, Part, Result, media_of
from ..templates.template import render, thoughts_of
from .requests import JsonBody

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_DEFAULT = SimConfig()


def chat_prompt(body: JsonBody, config: SimConfig = _DEFAULT) -> tuple[int, ...]:
    messages = [_chat_message(message) for message in _objects(body.raw("messages"), "messages")]
    if not messages:
        raise BadRequest("messages must not be empty.", "messages")
    continues = body.flag("continue_final_message")
    conversation = Conversation(
        messages=messages,
        tools=_tools(body),
        kwargs=body.mapping("chat_template_kwargs"),
        thinks=_thinks(body),
        opens=body.raw("add_generation_prompt") is not False and not continues,
        continues=continues,
    )
    return render(conversation, config)


def responses_prompt(body: JsonBody, config: SimConfig = _DEFAULT) -> tuple[int, ...]:
    given = body.raw("input")
    messages = [Message("system", [text])] if (text := body.text("instructions")) else []
    if isinstance(given, str):
        messages.append(Message("user", [given]))
    else:
        messages += [_responses_message(item) for item in _objects(given, "input")]
    if not given:
        raise BadRequest("input must not be empty.", "input")
    return render(Conversation(messages=messages, tools=_tools(body), thinks=_thinks(body)), config)


def messages_prompt(body: JsonBody, config: SimConfig = _DEFAULT) -> tuple[int, ...]:
    messages = [_chat_message(message) for message in _objects(body.raw("messages"), "messages")]
    if not messages:
        raise BadRequest("messages must not be empty.", "messages")
    if system := body.raw("system"):
        messages.insert(0, Message("system", _content(system)))
    return render(Conversation(messages=messages, tools=_tools(body), thinks=_thinks(body)), config)


def thoughts(body: JsonBody, config: SimConfig) -> Thoughts | None:
    """How the answer to a conversation begins; None: at once."""
    return thoughts_of(config, _thinks(body))


def _thinks(body: JsonBody) -> bool | None:
    """As vLLM reads it: an effort is a wish to reason unless the template is told otherwise."""
    told = _member(body, "chat_template_kwargs", "enable_thinking")
    if isinstance(told, bool):
        return told
    if _member(body, "thinking", "type") == "disabled":  # Anthropic's API
        return False
    nested = (_member(body, name, "effort") for name in ("reasoning", "output_config"))
    effort = next((effort for effort in (body.raw("reasoning_effort"), *nested) if isinstance(effort, str)), None)
    return None if effort is None else effort != "none"


def _member(body: JsonBody, holder: str, name: str) -> Any:
    held = body.raw(holder)
    return held.get(name) if isinstance(held, dict) else None


def _chat_message(message: dict[str, Any]) -> Message:
    role = message.get("role")
    if not isinstance(role, str):
        raise BadRequest("Every message needs a role.", "messages")
    parts = _content(message.get("content"))
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        parts.append(_call(function if isinstance(function, dict) else {}))
    return Message(role, parts, _reasoning(message))


def _reasoning(message: dict[str, Any]) -> str:
    """In the member of today, in its older name, or in the blocks of Anthropic's API."""
    for name in ("reasoning", "reasoning_content"):
        if isinstance(text := message.get(name), str):
            return text
    content = message.get("content")
    blocks = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    texts = [part.get("thinking") for part in blocks if part.get("type") == "thinking"]
    return "".join(text for text in texts if isinstance(text, str))


def _responses_message(item: dict[str, Any]) -> Message:
    kind = item.get("type", "message")
    if kind == "function_call":
        return Message("assistant", [_call(item)], joins=True)
    if kind == "function_call_output":
        return Message("tool", _content(item.get("output")))
    if kind == "reasoning":
        return Message("assistant", [], _item_reasoning(item), joins=True)
    message = _chat_message(item)
    message.joins = message.role == "assistant"
    return message


def _item_reasoning(item: dict[str, Any]) -> str:
    """The first text of its content, else of its summary, as vLLM takes it."""
    for parts in (item.get("content"), item.get("summary")):
        if isinstance(parts, list) and parts and isinstance(parts[0], dict):
            return text if isinstance(text := parts[0].get("text"), str) else ""
    return ""


def _content(content: Any) -> list[Part]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise BadRequest("content must be a string or a list of parts.", "messages")
    return [read for part in content if (read := _part(part)) is not None]


def _part(part: Any) -> Part | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
        raise BadRequest("Every content part needs a type.", "messages")
    if kind in _TEXT_PARTS:
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise BadRequest(f"A content part of type {kind} needs its text.", "messages")
        return text
    if kind in MEDIA_PARTS:
        return media_of(part)
    if kind == "tool_use":
        return Call(part.get("name"), part.get("input"))
    if kind == "tool_result":
        parts = _content(part.get("content"))
        return Result(tuple(part for part in parts if isinstance(part, str | Media)))
    if kind in ("thinking", "redacted_thinking"):
        return None
    raise BadRequest(f"Unknown content part type: {kind}.", "messages")


def _call(function: dict[str, Any]) -> Call:
    return Call(function.get("name"), function.get("arguments"))


def _tools(body: JsonBody) -> list[Any]:
    tools = body.raw("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadRequest("tools must be a list.", "tools")
    return tools or []


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRequest(f"{name} must be a list of objects.", name)
    return value
